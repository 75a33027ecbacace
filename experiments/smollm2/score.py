"""Scores of an exported model by plain Transformers and by plain vLLM: they must be the same.

    python experiments/smollm2/score.py EXPORTED START

prints the mean and largest difference of the log-probs of some chat texts, and how far the
exported model is from the one that training started from.
"""

from __future__ import annotations

import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CHATS = (
    ("4 - 1", "3"),
    ("1 + 5", "The answer is 6."),
    ("7 - 9 + 2", "0"),
    ("8 + 8", "It is 16"),
)


def token_rows(folder: str) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    rows = []
    for problem, answer in CHATS:
        messages = [
            {"role": "system", "content": "Answer with the number alone."},
            {"role": "user", "content": f"What is {problem}?"},
            {"role": "assistant", "content": answer},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        rows.append(tokenizer(text, add_special_tokens=False).input_ids)
    return rows


@torch.no_grad()
def by_transformers(folder: str, rows: list[list[int]]) -> torch.Tensor:
    """Log-probs of all tokens but each row's first, one row after the other."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    ).eval()
    scores = []
    for row in rows:
        logprobs = model(torch.tensor([row])).logits[0].log_softmax(dim=-1)
        scores.append(logprobs[range(len(row) - 1), row[1:]])
    return torch.cat(scores)


def by_vllm(folder: str, rows: list[list[int]]) -> torch.Tensor:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(model=folder, dtype="float32", enforce_eager=True, max_model_len=256)
    outputs = engine.generate(
        [TokensPrompt(prompt_token_ids=row) for row in rows],
        SamplingParams(max_tokens=1, prompt_logprobs=0),
    )
    return torch.tensor(
        [
            output.prompt_logprobs[place][row[place]].logprob
            for row, output in zip(rows, outputs, strict=True)
            for place in range(1, len(row))
        ]
    )


def main() -> None:
    exported, start = sys.argv[1:]
    rows = token_rows(exported)
    scores = by_transformers(exported, rows)
    moved = (scores - by_transformers(start, rows)).abs().mean()
    gap = (by_vllm(exported, rows) - scores).abs()
    print(f"{len(scores)} tokens; exported against start, mean difference {moved:.3g} nats")
    print(f"vLLM against Transformers on the exported folder: mean {gap.mean():.2g}, ", end="")
    print(f"largest {gap.max():.2g} nats")


if __name__ == "__main__":
    main()
