"""One iteration end to end, sampling and update, against TRL's PPO and GRPO trainers.

    python experiments/bench/iterations.py [--system ppo|grpo] [--case NAME] [--repeats 5]
    python experiments/bench/iterations.py --system grpo --case smollm2 --repeats 3

The second needs `make smollm2`: a pretrained model, GRPO alone, on both sides in bf16 autocast
where the processor is fast in it.

Each side is a process of its own (`side_vapo.py`, `side_trl.py`), TRL's in an environment of its
own that is made on first use under build/peers. They take turns, one iteration each; the first
is not counted. All have the same model, prompts of equal length, one epoch, the same number of
optimizer steps and threads. *Unequal* responses end at the end token, which a random model with
a small vocabulary draws with equal chance at every place, so that lengths are geometric;
*equal* ones are never ended, and all as long as the budget. TRL runs in several configurations;
the claim is against its fastest. On one thread the seconds are those of the process.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measuring import Claim, Report, arguments, counts_cpu, setting, start
from peers import peer_python
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification
from turns import Side

from vapo.config.schema import NewModelConfig
from vapo.networks.loading import load_tokenizer
from vapo.networks.new_model import make_tokenizer
from vapo.networks.precision import choose_precision

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRATCH = ROOT / "build/bench"
TITLE = "One iteration end to end"
# the last TRL that has PPO; the newest one
TRL = {"ppo": "1.12.0", "grpo": "1.16.0"}
TARGETS = {"ppo": 2.0, "grpo": 1.5}
PLAIN = {
    "forward_rows": 1_000_000,
    "use_cache": True,
    "gradient_checkpointing": False,
    "bf16": False,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, use_cache=False in the update": {"use_cache": False},
    "bf16": {"bf16": True},
}
SMOLLM2 = ROOT / "models/smollm2_135m"


@dataclass(frozen=True)
class Case:
    """Sizes of a model and of an iteration; the chance of the end token is 1 / vocab_size."""

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_responses: int
    response_tokens: int
    ends: bool
    prompt_tokens: int = 32
    group_size: int = 8
    num_minibatches: int = 4
    folder: Path | None = None

    @property
    def is_pretrained(self) -> bool:
        return self.folder is not None


# the first two have the shape of the state-tracking policy
CASES = {
    "unequal": Case("0.34 M, unequal", 96, 3, 40, 64, 192, True),
    "equal": Case("0.34 M, equal", 96, 3, 40, 64, 64, False),
    "larger": Case("11 M, unequal", 384, 6, 40, 16, 192, True),
    "smollm2": Case(
        *("SmolLM2-135M, equal", 576, 30, 49_152, 64, 80, False),
        prompt_tokens=18,
        folder=SMOLLM2,
    ),
}


def model_folders(case: Case) -> tuple[Path, Path]:
    """Policy and reward model, of random weights; a pretrained policy is in both places."""
    if case.folder is not None:
        return case.folder, case.folder
    folder = SCRATCH / f"model_{case.hidden_size}x{case.num_layers}x{case.vocab_size}"
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=case.vocab_size,
        hidden_size=case.hidden_size,
        intermediate_size=case.hidden_size * 8 // 3,
        num_hidden_layers=case.num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    config.num_labels = 1
    parts = {"policy": Qwen2ForCausalLM, "reward_model": Qwen2ForSequenceClassification}
    for name, kind in parts.items():
        if not (folder / name / "config.json").exists():
            kind(config).save_pretrained(folder / name)
            make_tokenizer(NewModelConfig().alphabet).save_pretrained(folder / name)
    return folder / "policy", folder / "reward_model"


def is_bf16(case: Case) -> bool:
    """A pretrained model is computed in what `trainer.precision` auto takes here, on both sides."""
    precision = choose_precision(torch.device("cpu"), case.hidden_size)
    return case.is_pretrained and precision.name == "bf16-mixed"


def make_settings(system: str, case: Case, threads: int) -> dict[str, Any]:
    draw = random.Random(0)
    group_size = case.group_size if system == "grpo" else 1
    policy, reward_model = model_folders(case)
    return {
        **PLAIN,
        "system": system,
        "policy": str(policy),
        "reward_model": str(reward_model),
        "bf16": is_bf16(case),
        "prompts": [
            draw_prompt(draw, case, policy) for _ in range(case.num_responses // group_size)
        ],
        "num_responses": case.num_responses,
        "response_tokens": case.response_tokens,
        "ends": case.ends,
        "group_size": group_size,
        "num_minibatches": case.num_minibatches,
        "threads": threads,
        "scratch": str(SCRATCH),
    }


def draw_prompt(draw: random.Random, case: Case, policy: Path) -> list[int]:
    """Ids that are the same after decoding and encoding, as TRL does it."""
    if not case.is_pretrained:
        return [draw.randrange(2, 40) for _ in range(case.prompt_tokens)]
    text = "".join(draw.choice("123456789") + draw.choice("+-") for _ in range(case.prompt_tokens))
    token_ids: list[int] = load_tokenizer(str(policy)).encode(text[: case.prompt_tokens])
    return token_ids


def start_sides(system: str, case: Case, options: argparse.Namespace) -> dict[str, Side]:
    settings = make_settings(system, case, options.threads)
    tag = f"{system}-{case.hidden_size}"
    seconds_by_side = {
        "ours": Side(sys.executable, HERE / "side_vapo.py", settings, SCRATCH / f"{tag}-ours.log")
    }
    if options.alone:
        return seconds_by_side
    python = peer_python("trl", TRL[system])
    precision = "bf16" if settings["bf16"] else "float32"
    variants = {precision: {}} if case.is_pretrained else VARIANTS
    for index, (name, variant) in enumerate(variants.items()):
        log = SCRATCH / f"{tag}-trl{index}.log"
        seconds_by_side[name] = Side(python, HERE / "side_trl.py", settings | variant, log)
    return seconds_by_side


def compare(system: str, case: Case, options: argparse.Namespace) -> tuple[list[str], list[Claim]]:
    running = start_sides(system, case, options)
    reports: dict[str, list[dict[str, float]]] = {name: [] for name in running}
    try:
        for round_ in range(options.repeats + 1):
            for name, side in running.items():
                report = side.iteration()
                if round_:
                    reports[name].append(report)
    finally:
        for side in running.values():
            side.close()
    clock = "cpu_s" if counts_cpu("cpu") else "wall_s"

    def median(name: str, key: str) -> float:
        return statistics.median(report[key] for report in reports[name])

    speeds = {
        name: statistics.median(report["tokens"] / report[clock] for report in side_report)
        for name, side_report in reports.items()
    }
    rows = []
    for name in reports:
        label = "ours" if name == "ours" else f"TRL {TRL[system]}, {name}"
        numbers = [f"{median(name, key):,.2f}" for key in ("cpu_s", "wall_s")]
        tokens = f"{median(name, 'tokens'):,.0f}"
        rows.append(
            f"| {system} | {case.name} | {case.num_responses} x <= {case.response_tokens} "
            f"| {label} | {tokens} | {' | '.join(numbers)} | {speeds[name]:,.0f} "
            f"| {speeds['ours'] / speeds[name]:.2f}x |"
        )
    peers = {name: speed for name, speed in speeds.items() if name != "ours"}
    if not peers:
        return rows, []
    best = max(peers, key=lambda name: peers[name])
    target = 2.0 if case.is_pretrained else TARGETS[system]
    ratio = speeds["ours"] / peers[best]
    claim = Claim(
        f"{system.upper()} iteration, {case.name}",
        f"TRL {TRL[system]}, {best}",
        f"at least {target:g}x its tokens/s",
        f"{ratio:.2f}x",
        ratio >= target,
    )
    return rows, [claim]


def measure(options: argparse.Namespace) -> Report:
    start(options)
    rows, claims = [], []
    systems = [options.system] if options.system else list(TRL)
    random_cases = [case for case in CASES.values() if not case.is_pretrained]
    cases = [CASES[options.case]] if options.case else random_cases
    for case in cases:
        if options.toy:
            case = replace(case, num_responses=8, response_tokens=4, group_size=2)
        for system in systems:
            more_rows, more_claims = compare(system, case, options)
            rows += more_rows
            claims += more_claims
    columns = (
        *("system", "model", "responses", "side", "response tokens", "CPU s", "wall s", "tokens/s"),
        "ours / it",
    )
    precision = "bf16" if options.case and is_bf16(CASES[options.case]) else "float32"
    return Report(TITLE, setting(options, precision), columns, rows, claims)


def options(arguments_: list[str] | None = None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--system", choices=list(TRL), help="one instead of both")
    parser.add_argument("--case", choices=list(CASES), help="one instead of all")
    parser.add_argument("--alone", action="store_true", help="our side without a peer")
    return parser.parse_args(arguments_)


if __name__ == "__main__":
    print(measure(options()).text())
