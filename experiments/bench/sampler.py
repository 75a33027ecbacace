"""The Transformers sampler against Hugging Face `generate`, in response tokens a second.

    python experiments/bench/sampler.py [--threads 1] [--repeats 5]

Random weights, so responses end at random: with a vocabulary of 40 after 40 tokens on average,
some after 1 and some after 300. `generate` decodes each batch of `rows` responses until its
longest has ended; the sampler refills places. Both sample from the full softmax; the sampler
returns log-probs too. The sides alternate, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from all_responses import sample_all  # beside this file
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from vapo.config.schema import NewModelConfig
from vapo.networks.new_model import make_tokenizer
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.transformers.sampler import TransformersSampler
from vapo.types import Prompt

GROUP_SIZE = 8


@dataclass(frozen=True)
class Case:
    name: str
    hidden_size: int
    num_layers: int
    num_responses: int
    rows: int
    max_response_tokens: int


CASES = (
    Case("tiny, short and even", 32, 2, 256, 256, 20),
    Case("tiny, very unequal", 32, 2, 256, 256, 400),
    Case("tiny, very unequal, queue", 32, 2, 1024, 256, 400),
    Case("default size, short and even", 96, 3, 256, 256, 20),
    Case("default size, very unequal", 96, 3, 256, 256, 400),
    Case("default size, very unequal, queue", 96, 3, 1024, 256, 400),
)


def make_model(case: Case, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=case.hidden_size,
        intermediate_size=case.hidden_size * 8 // 3,
        num_hidden_layers=case.num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).eval()


def make_prompts(num_prompts: int, vocab_size: int) -> list[Prompt]:
    draw = random.Random(0)
    rows = [
        tuple(draw.randrange(2, vocab_size) for _ in range(draw.randint(8, 32)))
        for _ in range(num_prompts)
    ]
    return [Prompt(f"made-up:{i}", "", ids, "") for i, ids in enumerate(rows)]


@torch.no_grad()
def generate(model: Any, prompts: list[Prompt], case: Case, pad_id: int, eos_id: int) -> int:
    """The number of response tokens that `model.generate` made, batch by batch."""
    num_tokens = 0
    prompts_per_batch = case.rows // GROUP_SIZE
    for first in range(0, len(prompts), prompts_per_batch):
        batch = [prompt.prompt_ids for prompt in prompts[first : first + prompts_per_batch]]
        width = max(map(len, batch))
        input_ids = torch.tensor([[pad_id] * (width - len(ids)) + list(ids) for ids in batch])
        output = model.generate(
            input_ids,
            attention_mask=(input_ids != pad_id).long(),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=case.max_response_tokens,
            num_return_sequences=GROUP_SIZE,
        )[:, width:]
        is_end = output == eos_id
        before_end = (is_end.long().cumsum(dim=1) == 0).sum()
        num_tokens += int(before_end + is_end.any(dim=1).sum())
    return num_tokens


def compare(case: Case, repeats: int) -> str:
    tokenizer = make_tokenizer(NewModelConfig().alphabet)
    model = make_model(case, tokenizer)
    pad_id, eos_id = int(tokenizer.pad_token_id), int(tokenizer.eos_token_id)
    prompts = make_prompts(case.num_responses // GROUP_SIZE, len(tokenizer))
    sampler = TransformersSampler(
        model, tokenizer, max_concurrent_sequences=case.rows, device="cpu"
    )
    settings = SamplingSettings(case.max_response_tokens)
    speeds: tuple[list[float], list[float]] = ([], [])
    for seed in range(repeats + 1):
        torch.manual_seed(seed)
        start = time.perf_counter()
        num_theirs = generate(model, prompts, case, pad_id, eos_id)
        middle = time.perf_counter()
        rollouts = sample_all(
            sampler, tokenizer, prompts, group_size=GROUP_SIZE, settings=settings, seed=seed
        )
        end = time.perf_counter()
        if seed:  # the first round warms up
            speeds[0].append(num_theirs / (middle - start))
            speeds[1].append(sum(len(r.response_ids) for r in rollouts) / (end - middle))
    peer_speed, our_speed = map(statistics.median, speeds)
    return (
        f"| {case.name} | {case.num_responses} / {case.rows} | {case.max_response_tokens} "
        f"| {peer_speed:,.0f} | {our_speed:,.0f} | {our_speed / peer_speed:.2f}x |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {platform.machine()}, {options.threads} CPU threads,")
    print(f"median of {options.repeats}, sides alternating, float32\n")
    print("| case | responses / rows | max tokens | generate tok/s | sampler tok/s | ratio |")
    print("|---|---|---|---|---|---|")
    for case in CASES:
        print(compare(case, options.repeats), flush=True)


if __name__ == "__main__":
    main()
