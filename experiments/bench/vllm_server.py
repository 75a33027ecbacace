"""Sampling from `vapo serve` over HTTP against vLLM in the trainer's process, the same responses.

    python experiments/bench/vllm_server.py [--policy models/smollm2_135m] [--repeats 5]
        [--responses 64] [--at_once 32] [--response_tokens 64]

Both sides have the same weights, pushed and probed as in a run, and sample the same requests:
groups of 8 on prompts that are new in each round. No token ends a response. They take turns, with
the order changed each time; the first round warms up and is not counted. Wall-clock time, since a
server's work is in other processes, whose CPU seconds are beside it. Tokens must be equal.
Needs vLLM (`make vllm`) and, unless another folder is named, `make smollm2`.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import psutil
import torch
from all_responses import sample_all  # beside this file
from measuring import Claim, Report, arguments, start  # beside this file
from transformers import PreTrainedTokenizerBase

from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.networks.loading import load_causal_lm, load_tokenizer
from vapo.rollouts.engines.contract import Sampler, SamplingSettings
from vapo.rollouts.engines.selection import access_to, make_sampler
from vapo.system.libraries import quiet_libraries
from vapo.types import Prompt, Rollout

CONFIG, GROUP_SIZE, PROMPT_TOKENS, TARGET = "conf/recipes/smollm2_cpu.yaml", 8, 48, 1.1


class Round(NamedTuple):
    """What one side sampled once: wall-clock seconds, and CPU seconds of all its processes."""

    rollouts: list[Rollout]
    wall_s: float
    cpu_s: float


class Side(NamedTuple):
    sampler: Sampler
    pids: Sequence[int]

    def round(
        self, tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt], budget: int, seed: int
    ) -> Round:
        begin, cpu = time.perf_counter(), self._cpu_s()
        rollouts = sample_all(
            self.sampler,
            tokenizer,
            prompts,
            group_size=GROUP_SIZE,
            settings=SamplingSettings(budget),
            seed=seed,
        )
        return Round(rollouts, time.perf_counter() - begin, self._cpu_s() - cpu)

    def _cpu_s(self) -> float:
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in (os.getpid(), *self.pids))


def overrides(options: argparse.Namespace, *engine: str) -> list[str]:
    return [
        f"actor.path={options.policy}",
        "trainer.precision=32-true",
        f"trainer.num_threads={options.threads}",
        f"data.max_prompt_tokens={PROMPT_TOKENS}",
        f"rollouts.max_response_tokens={options.response_tokens}",
        f"rollouts.max_concurrent_sequences={options.at_once}",
        *engine,
    ]


def server_engine(url: str) -> tuple[str, str]:
    return "rollouts.engine=vllm_server", f"rollouts.servers.urls={url}"


@contextmanager
def serving(options: argparse.Namespace) -> Iterator[tuple[str, list[int]]]:
    """`vapo serve`: its address, and the ids of its processes once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vapo", "serve", "--config", CONFIG, "--port", str(port)]
    # as many threads as in process, and bound to a core as little
    threads = {"OMP_NUM_THREADS": str(options.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with open(options.log, "wb") as log:
        process = subprocess.Popen(
            [*command, *overrides(options, *server_engine(url))],
            env={**os.environ, **threads},
            stdout=log,
            stderr=log,
        )
    server = psutil.Process(process.pid)
    try:
        while not _answers(f"{url}/health"):
            if process.poll() is not None:
                raise SystemExit(f"the server did not start: see {options.log}")
            time.sleep(0.5)
        yield url, [process.pid, *(child.pid for child in server.children(recursive=True))]
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def make_prompts(num: int, vocab_size: int, seed: int) -> list[Prompt]:
    draw = random.Random(seed)
    rows = [tuple(draw.choices(range(2, vocab_size), k=PROMPT_TOKENS)) for _ in range(num)]
    return [Prompt(f"made-up:{seed}, {i}", "", ids, "") for i, ids in enumerate(rows)]


def largest_gap(first: list[Rollout], second: list[Rollout]) -> float:
    if [r.response_ids for r in first] != [r.response_ids for r in second]:
        raise SystemExit("the sides have not sampled the same tokens")
    pairs = zip(first, second, strict=True)
    return max(
        abs(x - y)
        for a, b in pairs
        for x, y in zip(a.rollout_logprobs, b.rollout_logprobs, strict=True)
    )


def measure(options: argparse.Namespace) -> Report:
    quiet_libraries()
    device = start(options)
    tokenizer = load_tokenizer(options.policy)
    model = load_causal_lm(options.policy, dtype="float32", attn_implementation="auto")
    access, vocab_size = access_to(model, device), model.config.vocab_size
    num_prompts = options.responses // GROUP_SIZE
    turns: dict[str, list[Round]] = {"in process": [], "over HTTP": []}
    gap = 0.0
    with serving(options) as (url, pids), TemporaryDirectory() as folder:
        configs = [
            load_config(
                FitConfig, [Path(CONFIG)], [*overrides(options, *engine), f"output_dir={folder}"]
            )
            for engine in (("rollouts.engine=vllm",), server_engine(url))
        ]
        colocated, served = (make_sampler(config, access, tokenizer) for config in configs)
        with closing(colocated), closing(served):
            sides = {"in process": Side(colocated, []), "over HTTP": Side(served, pids)}
            for side in sides.values():
                side.sampler.end_ids = frozenset()  # type: ignore[misc]
            for seed in range(options.repeats + 1):
                prompts = make_prompts(num_prompts, vocab_size, seed)
                rounds_by_name = {
                    name: sides[name].round(tokenizer, prompts, options.response_tokens, seed)
                    for name in (list(sides) if seed % 2 else reversed(sides))
                }
                gap = max(
                    gap, largest_gap(*(result.rollouts for result in rounds_by_name.values()))
                )
                for name, result in rounds_by_name.items() if seed else ():
                    turns[name].append(result)
                print(
                    {
                        n: (round(result.wall_s, 2), round(result.cpu_s, 2))
                        for n, result in rounds_by_name.items()
                    }
                )
    return report(options, model.num_parameters(), turns, gap)


def report(
    options: argparse.Namespace, num_parameters: int, turns: dict[str, list[Round]], gap: float
) -> Report:
    colocated, served = turns.values()
    ratios = [b.wall_s / a.wall_s for a, b in zip(colocated, served, strict=True)]
    ratio = statistics.median(ratios)
    num_tokens = options.responses * options.response_tokens
    rows = [
        f"| {name} | {statistics.median(result.wall_s for result in rounds):.2f} "
        f"| {statistics.median(result.cpu_s for result in rounds):.2f} "
        f"| {num_tokens / statistics.median(result.wall_s for result in rounds):,.0f} |"
        for name, rounds in turns.items()
    ]
    return Report(
        title="Sampling over HTTP",
        setting=", ".join(
            [
                f"torch {torch.__version__}, {os.cpu_count()} cores, {options.threads} thread(s)",
                f"{num_parameters / 1e6:.1f} M parameters, float32",
                f"{options.responses} responses of {options.response_tokens} tokens",
                f"{options.at_once} at a time, median of {options.repeats}, sides alternating",
                f"largest log-prob gap {gap:.1e}",
                f"ratio in each turn {min(ratios):.2f} to {max(ratios):.2f}",
            ]
        ),
        columns=("side", "wall s", "CPU s of its processes", "tokens/s"),
        rows=rows,
        claims=[
            Claim(
                "sampling over HTTP",
                "the engine in process",
                f"at most {TARGET}x the time",
                f"{ratio:.2f}x",
                ratio <= TARGET,
            )
        ],
    )


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--policy", default="models/smollm2_135m")
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--at_once", type=int, default=32)
    parser.add_argument("--response_tokens", type=int, default=64)
    parser.add_argument("--log", default="build/vllm_server.log", help="what the server says")
    parsed = parser.parse_args(argv)
    if parsed.toy:
        parsed.policy, parsed.responses, parsed.response_tokens = "models/state_tracking", 16, 8
    Path(parsed.log).parent.mkdir(parents=True, exist_ok=True)
    return parsed


if __name__ == "__main__":
    print(measure(options()).text())
