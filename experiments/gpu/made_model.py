"""A policy with the shape of a real one and random weights, with prompts and a reward for it.

    python experiments/gpu/made_model.py FOLDER --shape qwen2.5_0.5b [--mean_tokens 200]

A GPU machine may reach no hub, and what an iteration costs depends on shapes and lengths, not on
what the weights know. The end of a response is the model's own draw: in every state its output
layer gives the end token the same chance, so that lengths are geometric up to the limit, and every
trainer and engine that loads the folder draws them from the same distribution. No engine is
told anything, and the log-probs of the trainer are those of the engine.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
SHAPES = ROOT / "models/shapes"
SPECIAL = ("<unk>", "<eos>", "<pad>", "<unused>")
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
SHARED = 0.2  # the channel that is the same in the state of every token
NEVER = -20.0  # nats; one in 10^8 beside the uniform chance of any other token
REWARD = '''"""Half of all responses are right, whatever they say."""

import zlib


def score(response_text, answer, metadata):
    return bool(zlib.crc32(response_text.encode()) % 2)
'''


@dataclass(frozen=True)
class Lengths:
    """The tokens of prompts and responses: prompts are spread evenly around their mean.

    `mean_response` None: no response ends before `max_response`.
    """

    mean_prompt: int
    spread_prompt: int
    max_response: int
    mean_response: int | None = None

    def __post_init__(self) -> None:
        if self.mean_response is not None and self.mean_response > 0.9 * self.max_response:
            raise ValueError(f"a mean of {self.mean_response} is too near to {self.max_response}")

    def end_chance(self) -> float:
        """The chance of the end token at each place; the mean counts those that are cut off."""
        return 0.0 if self.mean_response is None else chance(self.mean_response, self.max_response)


def command(
    folder: Path, shape: str, lengths: Lengths, *, tiny: bool = False, num_rows: int = 4096
) -> list[str]:
    """The command that runs this script, so that the measuring process does not hold a GPU."""
    options = {
        "--shape": shape,
        "--prompt_tokens": lengths.mean_prompt,
        "--prompt_spread": lengths.spread_prompt,
        "--max_tokens": lengths.max_response,
        "--num_rows": num_rows,
    }
    if lengths.mean_response is not None:
        options["--mean_tokens"] = lengths.mean_response
    words = [str(word) for pair in options.items() for word in pair]
    return [sys.executable, __file__, str(folder), *words, *["--tiny"] * tiny]


def mean_length(end_chance: float, limit: int) -> float:
    """The mean tokens of a response that ends at each place with a chance, or at the limit."""
    return (1 - (1 - end_chance) ** limit) / end_chance


def chance(mean: float, limit: int) -> float:
    """The chance with that mean length, by bisection."""
    low, high = 1e-9, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_length(middle, limit) > mean else (low, middle)
    return high


def write_model(folder: Path, shape: str, end_chance: float, *, tiny: bool = False) -> None:
    """Write policy and tokenizer; `tiny` keeps the vocabulary, of two narrow layers."""
    config = AutoConfig.from_pretrained(SHAPES / shape, trust_remote_code=False)
    if tiny:
        config.update({"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128})
        config.update({"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 2048})
        config.head_dim = 32
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:2]
    vocab_size = int(config.vocab_size)
    config.eos_token_id, config.pad_token_id = vocab_size - 3, vocab_size - 2
    config.bos_token_id = None
    make_tokenizer(vocab_size).save_pretrained(folder)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
    set_end_chance(model, end_chance)
    model.to("cpu").save_pretrained(folder)


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """One token for each byte of a text, and names for all others of the vocabulary."""
    vocab = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    vocab |= {f"f{i}": i for i in range(len(vocab), vocab_size - len(SPECIAL))}
    vocab |= {name: vocab_size - len(SPECIAL) + i for i, name in enumerate(SPECIAL)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    fast_tokenizer.chat_template = CHAT_TEMPLATE
    return fast_tokenizer


@torch.no_grad()
def set_end_chance(model: Any, end_chance: float) -> None:
    """Give the end token that chance after every prefix, or hardly any where it is 0.

    One channel of the states is made the same number at every place. No layer writes to it, so the
    end token's output weight for it is a bias of its logit. Where the vocabulary has V tokens, the
    bias ln(p (V - 1) / (1 - p)) gives the chance p beside equal logits; corrections by measured
    chances follow.
    """
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    embedding.weight[:, 0] = SHARED
    for layer in model.base_model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    end, vocab_size = model.config.eos_token_id, model.config.vocab_size
    output.weight[end] = 0
    ids = torch.randint(256, (8, 64), device=model.device)
    states = model.base_model(ids).last_hidden_state[:, 1:]
    shared = states[..., 0].mean()
    if not end_chance:
        output.weight[end, 0] = NEVER / shared
        return
    bias = math.log(end_chance * (vocab_size - 1) / (1 - end_chance))
    for _ in range(3):
        output.weight[end, 0] = bias / shared
        logprobs = (states.float() @ output.weight.float().T).log_softmax(-1)[..., end]
        bias += math.log(end_chance) - math.log(float(logprobs.exp().mean()))
    output.weight[end, 0] = bias / shared


def write_prompts(path: Path, lengths: Lengths, *, num_rows: int, seed: int = 0) -> None:
    """Rows with `prompt` and `answer`; the tokenizer above has a token for each letter."""
    draw = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        spread = draw.randint(-lengths.spread_prompt, lengths.spread_prompt)
        text = "".join(
            draw.choice("abcdefgh 0123456789+-") for _ in range(lengths.mean_prompt + spread - 1)
        )
        rows.append(json.dumps({"prompt": f"{text}=", "answer": str(draw.randrange(10))}))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def write_all(
    folder: Path, shape: str, lengths: Lengths, *, tiny: bool = False, num_rows: int = 4096
) -> Path:
    """A policy, `problems.jsonl` and `reward.py` in the folder; one that is there is kept."""
    described = {"shape": shape, "lengths": vars(lengths), "tiny": tiny, "num_rows": num_rows}
    record = folder / "made.json"
    if not record.exists() or json.loads(record.read_text()) != described:
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder, shape, lengths.end_chance(), tiny=tiny)
        write_prompts(folder / "problems.jsonl", lengths, num_rows=num_rows)
        write_prompts(folder / "heldout.jsonl", lengths, num_rows=16, seed=1)
        (folder / "reward.py").write_text(REWARD, encoding="utf-8")
        record.write_text(json.dumps(described), encoding="utf-8")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="qwen2.5_0.5b", help="a folder of models/shapes")
    parser.add_argument("--prompt_tokens", type=int, default=130)
    parser.add_argument("--prompt_spread", type=int, default=0, help="more or fewer, at most")
    parser.add_argument("--max_tokens", type=int, default=512)
    parser.add_argument("--mean_tokens", type=int, help="of responses; none: no response ends")
    parser.add_argument("--num_rows", type=int, default=4096, help="prompts")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers")
    options = parser.parse_args()
    lengths = Lengths(
        *(options.prompt_tokens, options.prompt_spread), options.max_tokens, options.mean_tokens
    )
    shape, num_rows = options.shape, options.num_rows
    print(write_all(options.folder, shape, lengths, tiny=options.tiny, num_rows=num_rows))


if __name__ == "__main__":
    main()
