"""An update on groups of responses: the prompt computed once for its group, or for each response.

    python experiments/bench/shared_prompts.py [--model models/smollm2_135m] [--repeats 5]

64 responses in groups of 8, prompts and responses of fixed lengths, one forward and backward of an
actor in micro-batches by the trainer's own token budget. `packed` and `shared_prompts` must come
to the same gradient. With --layout one of them runs once in a case of its own, for a timer
outside.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from measuring import Report, alternate, arguments, setting, start  # beside this file
from packing import make_networks  # beside this file

from vapo.networks.actor_critic import Actor
from vapo.networks.forward_passes import cut_by_tokens
from vapo.networks.layouts import choose_layout
from vapo.networks.loading import load_causal_lm
from vapo.networks.token_inputs import Layout, Sequences, TokenInputs, token_inputs

NUM_PROMPTS, GROUP_SIZE, BUDGET = 8, 8, 2048
CASES = ((50, 18), (30, 80))  # tokens of a prompt, of a response
TOY_CASES = ((7, 5),)
LAYOUTS: tuple[Layout, ...] = ("packed", "shared_prompts")


def make_sequences(prompt_tokens: int, response_tokens: int, vocab_size: int) -> Sequences:
    draw = random.Random(0)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocab_size) for _ in range(length))

    prompts = [ids(prompt_tokens) for _ in range(NUM_PROMPTS)]
    return [(prompt, ids(response_tokens)) for prompt in prompts for _ in range(GROUP_SIZE)]


def cut(sequences: Sequences, layout: Layout) -> list[TokenInputs]:
    chunks = cut_by_tokens(
        [len(prompt) + len(response) for prompt, response in sequences],
        range(len(sequences)),
        max_tokens=BUDGET,
        layout=layout,
        prompts=[tuple(prompt) for prompt, _ in sequences],
    )
    return [token_inputs([sequences[r] for r in c], pad_id=0, layout=layout) for c in chunks]


def update(actor: Actor, chunks: list[TokenInputs], precision: str) -> float:
    """Run forward and backward on a minibatch. Return the norm of its gradient."""
    for chunk in chunks:
        inputs = chunk.to(next(actor.parameters()).device)
        device = inputs.input_ids.device.type
        mixed = torch.autocast(device, torch.bfloat16) if precision == "bf16" else nullcontext()
        with mixed:
            output = actor(inputs, temperature=1.0)
            loss = (output.logprobs - 0.01 * output.entropy).sum()
        loss.backward()
    norm = float(
        torch.nn.utils.get_total_norm([p.grad for p in actor.parameters() if p.grad is not None])
    )
    actor.zero_grad(set_to_none=True)
    return norm


def make_actor(options: argparse.Namespace, device: torch.device) -> Actor:
    if options.model is None:
        sizes = (32, 2, 4) if options.toy else (256, 4, 4)
        actor = make_networks(*sizes, device)[0]
        assert isinstance(actor, Actor)
    else:
        model: Any = load_causal_lm(options.model, dtype="float32", attn_implementation="auto")
        actor = Actor(model.to(device).train())
    assert choose_layout("shared_prompts", [actor.model]) == "shared_prompts"
    return actor


def compare(
    actor: Actor, case: tuple[int, int], precision: str, repeats: int, device: torch.device
) -> list[str]:
    sequences = make_sequences(*case, actor.model.config.vocab_size)
    inputs = {layout: cut(sequences, layout) for layout in LAYOUTS}
    norms: dict[str, float] = {}

    def side(layout: Layout) -> Callable[[], None]:
        def call() -> None:
            norms[layout] = update(actor, inputs[layout], precision)

        return call

    sides = {str(layout): side(layout) for layout in LAYOUTS}
    seconds = alternate(sides, repeats=repeats, device=device)
    return [
        f"| {case[0]} + {case[1]} | {precision} | {layout} | {len(inputs[layout])} "
        f"| {sum(chunk.num_tokens for chunk in inputs[layout]):,} | {seconds[layout]:.3g} "
        f"| {seconds['packed'] / seconds[layout]:.2f}x "
        f"| {abs(norms[layout] / norms['packed'] - 1):.0e} |"
        for layout in LAYOUTS
    ]


def measure(options: argparse.Namespace) -> Report:
    device = start(options)
    actor = make_actor(options, device)
    cases = TOY_CASES if options.toy else (options.case,) if options.case else CASES
    rows = [
        row
        for case in cases
        for precision in options.precision
        for row in compare(actor, case, precision, options.repeats, device)
    ]
    columns = (
        *("prompt + response tokens", "precision", "layout", "micro-batches", "tokens computed"),
        *("seconds", "faster than packed by", "gradient norm differs by"),
    )
    title = "An update on groups of responses, their prompt computed once or for each"
    return Report(title, setting(options, options.model or "a random network"), columns, rows)


def lengths(text: str) -> tuple[int, int]:
    prompt, response = map(int, text.split(","))
    return prompt, response


def options(arguments_: list[str] | None = None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--model", help="a folder; default: a random network")
    parser.add_argument("--precision", nargs="+", default=["float32", "bf16"])
    parser.add_argument("--case", type=lengths, help="PROMPT,RESPONSE tokens")
    parser.add_argument("--layout", choices=LAYOUTS, help="this one alone, once")
    return parser.parse_args(arguments_)


def once(parsed: argparse.Namespace) -> None:
    device = start(parsed)
    actor = make_actor(parsed, device)
    case: tuple[int, int] = parsed.case or CASES[0]
    sequences = make_sequences(*case, actor.model.config.vocab_size)
    update(actor, cut(sequences, parsed.layout), parsed.precision[0])


if __name__ == "__main__":
    parsed = options()
    if parsed.layout is not None:
        once(parsed)
    else:
        print(measure(parsed).text())
