"""Whole iterations on a GPU, ours and TRL's, of the same work: each a process of its own, in turns.

    python experiments/gpu/iterations.py --case equal drawn verl [--minutes 10] [KEY=VALUE ...]

A case is a model's shape, lengths and sizes of a batch; a side is a trainer. All sides of a case
load the same folder (`made_model.py`) and have the same prompts, sampling, optimizer steps,
precision, gradient checkpointing, share of the GPU for vLLM, and no evaluation or checkpoint in
what is counted. Ours is the command `vapo fit`, whose own metrics have the seconds by stage; TRL
is its GRPO trainer (`trl_side.py`). The first iteration of each process is not counted. Overrides
`KEY=VALUE` are for our sides. A JSON file with every iteration is written after each process, and
`tables.py` makes the tables of it.

Lengths: *equal*, no response ends before the limit; *drawn*, each ends by the model's own
end token, at a place that is geometric up to the limit. Both trainers draw from the same
distribution and not the same numbers, so they are compared by tokens per second.

On a CPU `--toy` tries all of it: a tiny model, without vLLM.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpu_record import (  # beside this file
    RESULTS,
    SCRATCH,
    Ended,
    Result,
    Row,
    device_slug,
    has_gpu,
    iteration_seconds,
    recorded,
    run_process,
    stages,
    vapo,
)
from made_model import Lengths, command

HERE = Path(__file__).parent
NEEDED_S = 60  # a process that has less time left is not started
VLLM_SHARE = 0.3  # of the GPU's memory, on all sides


@dataclass(frozen=True)
class Case:
    shape: str
    lengths: Lengths
    num_prompts: int
    group_size: int
    minibatch_size: int
    sides: tuple[str, ...]
    trl_rows: int = 16  # of a forward pass of TRL's

    @property
    def num_responses(self) -> int:
        return self.num_prompts * self.group_size


@dataclass(frozen=True)
class OurSide:
    """What a side of ours changes of the same base, and its iterations of value pretraining."""

    algorithm: str
    overrides: tuple[str, ...] = ()
    num_pretraining: int = 0


TRL = "TRL GRPO"
GRPO_SIDES = ("GRPO", TRL, "VAPO", "VAPO, probe")
CASES = {
    "equal": Case("qwen2.5_0.5b", Lengths(130, 0, 512), 32, 8, 64, GRPO_SIDES),
    "drawn": Case("qwen2.5_0.5b", Lengths(130, 0, 512, 200), 32, 8, 64, GRPO_SIDES),
    # the work of verl's logged run; docs/gpu.md has its seconds
    "verl": Case("qwen2.5_0.5b", Lengths(104, 40, 512, 276), 256, 1, 64, ("PPO",)),
}
ONE_PRETRAINING = (
    "components.value_pretraining.num_iterations=1",
    "components.value_pretraining.min_iterations=1",
)
CRITIC = ("critic.init=policy", "critic.optimizer.lr=1e-6")
OURS = {
    "GRPO": OurSide("grpo", ("algorithm.kl.coef=0", "components.token_level_loss.enabled=true")),
    "VAPO": OurSide("vapo", (*CRITIC, *ONE_PRETRAINING), 1),
    "VAPO, probe": OurSide("probe", ONE_PRETRAINING, 1),
    "PPO": OurSide("ppo", (*CRITIC, "algorithm.kl.coef=0.001", "algorithm.kl.placement=reward")),
}
TOY: dict[str, Any] = {
    "lengths": Lengths(20, 4, 24, 12),
    "num_prompts": 4,
    "group_size": 4,
    "minibatch_size": 8,
    "trl_rows": 4,
}


# ---- our sides ----------------------------------------------------------------------------------


def our_command(
    side: OurSide, case: Case, model: Path, output: Path, num_iterations: int, more: Sequence[str]
) -> list[str]:
    """The command of `vapo fit` with the config of `vapo fit --model` on a GPU, and these sizes."""
    lengths = case.lengths
    longest_prompt = lengths.mean_prompt + lengths.spread_prompt
    return vapo(
        "fit",
        "--config",
        "conf/scale/own_model_gpu.yaml",
        "--config",
        f"conf/algorithm/{side.algorithm}.yaml",
        f"actor.path={model}",
        "data.train.kind=jsonl",
        f"data.train.path={model}/problems.jsonl",
        "data.train.prompt_column=prompt",
        "data.train.answer_column=answer",
        "data.heldout=null",
        "data.heldout_size=2",
        f"data.max_prompt_tokens={longest_prompt}",
        "rewards.verifier=python",
        f"rewards.function={model}/reward.py:score",
        f"components.group_sampling.num_prompts={case.num_prompts}",
        f"components.group_sampling.group_size={case.group_size}",
        f"rollouts.max_response_tokens={lengths.max_response}",
        f"rollouts.max_concurrent_sequences={case.num_responses}",
        *engine_options(),
        f"training.num_iterations={num_iterations}",
        f"training.minibatch_size={case.minibatch_size}",
        # the policy, and with it the lengths, stay what they are; TRL's too
        "actor.optimizer.lr=1e-6",
        "evaluation.k=1",
        "evaluation.every_n_iterations=1000",
        "checkpoints.every_n_iterations=1000",
        "value_pages.every_n_iterations=null",
        f"output_dir={output}",
        f"tracking.uri={output.parent / 'mlruns'}",
        "tracking.also=[csv]",
        *side.overrides,
        *more,
    )


def engine_options() -> list[str]:
    if has_gpu():
        return ["rollouts.engine=vllm", f"rollouts.vllm.gpu_memory_utilization={VLLM_SHARE}"]
    return [
        *("rollouts.engine=transformers", "trainer.accelerator=cpu", "trainer.precision=32-true"),
        "trainer.num_threads=1",
    ]


def our_iterations(rows: Sequence[Row], num_pretraining: int) -> list[dict[str, Any]]:
    """Every iteration of the policy but the first; evaluations are not counted."""
    return [
        {
            "seconds": iteration_seconds(row),
            "tokens": int(row["rollout/num_response_tokens"]),
            "longest": int(row["rollout/response_length_max"]),
            "shortest": int(row["rollout/response_length_min"]),
            "stages": stages(row),
            "gap": row.get("rollout/logprob_gap_mean"),
            "allocated_gib": row.get("memory/gpu_gib"),
            "mfu": row.get("throughput/training_mfu"),
        }
        for row in rows[num_pretraining + 1 :]
    ]


def run_ours(
    name: str, case: Case, model: Path, options: argparse.Namespace, limit_s: float
) -> dict[str, Any]:
    side, output = OURS[name], SCRATCH / "iterations"
    shutil.rmtree(output, ignore_errors=True)
    command = our_command(side, case, model, output, options.iterations + 1, options.overrides)
    outcome = run_process(command, _log(name, options), limit_s=limit_s)
    return part(outcome, our_iterations(recorded(output), side.num_pretraining), command)


# ---- TRL's --------------------------------------------------------------------------------------


def run_trl(case: Case, model: Path, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    report = SCRATCH / "trl_cycles.jsonl"
    report.unlink(missing_ok=True)
    lengths, on_gpu = case.lengths, has_gpu()
    settings = {
        "model": str(model),
        "num_responses": case.num_responses,
        "num_minibatches": case.num_responses // case.minibatch_size,
        "group_size": case.group_size,
        "rows": case.trl_rows,
        "response_tokens": lengths.max_response,
        "max_tokens": lengths.mean_prompt + lengths.spread_prompt + lengths.max_response,
        "num_cycles": options.iterations + 1,
        "gpu": on_gpu,
        "vllm": on_gpu,  # on a CPU, vLLM 0.32 does not take the weights that TRL pushes
        "vllm_share": VLLM_SHARE,
        "threads": 16 if on_gpu else 1,
        "scratch": str(SCRATCH / "trl"),
        "report": str(report),
    }
    command = [options.peer_python, str(HERE / "trl_side.py"), json.dumps(settings)]
    outcome = run_process(command, _log(TRL, options), limit_s=limit_s)
    lines = report.read_text().splitlines() if report.exists() else []
    return part(outcome, [json.loads(line) for line in lines][1:], command)


# ---- all ------------------------------------------------------------------------------------


def _log(name: str, options: argparse.Namespace) -> Path:
    return options.logs / f"{name.lower().replace(', ', '_').replace(' ', '_')}.log"


def part(outcome: Ended, iterations: list[dict[str, Any]], command: list[str]) -> dict[str, Any]:
    return {**outcome.part(), "iterations": iterations, "asked": command[1:]}


def tokens_per_s(parts: Sequence[dict[str, Any]]) -> float | None:
    """The median over all counted iterations of all rounds."""
    speeds = [
        iteration["tokens"] / iteration["seconds"]
        for part in parts
        for iteration in part["iterations"]
    ]
    return statistics.median(speeds) if speeds else None


def ratios(parts: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Ratios by name: our GRPO's tokens/s to TRL's, and VAPO's seconds per token to our GRPO's."""
    speeds = {name: speed for name, of in parts.items() if (speed := tokens_per_s(of))}
    comparisons = {}
    if "GRPO" in speeds:
        if TRL in speeds:
            comparisons[f"GRPO's tokens/s to {TRL}'s"] = speeds["GRPO"] / speeds[TRL]
        for name in ("VAPO", "VAPO, probe"):
            if name in speeds:
                comparisons[f"seconds of {name} to GRPO's"] = speeds["GRPO"] / speeds[name]
    return {name: round(value, 3) for name, value in comparisons.items()}


def measure(name: str, options: argparse.Namespace, end: float) -> Result:
    case = replace(CASES[name], **TOY) if options.toy else CASES[name]
    sides = [side for side in case.sides if options.sides is None or side in options.sides]
    model = SCRATCH / f"model_{case.shape}_{name}{'_toy' if options.toy else ''}"
    outcome = run_process(
        command(model, case.shape, case.lengths, tiny=options.toy),
        options.logs / "made_model.log",
        limit_s=max(1.0, end - time.monotonic()),
    )
    setting = {**asdict(case), "iterations": options.iterations, "overrides": options.overrides}
    result = Result(options.out, f"iterations_{name}_{device_slug()}", setting)
    if not outcome.is_done:
        result.add("model", outcome.part())
        print(f"{name}: no model: {outcome.status}", *outcome.tail(), sep="\n", flush=True)
        return result
    for _ in range(options.rounds):
        for side in sides:
            remaining_s = end - time.monotonic()
            if remaining_s < NEEDED_S and not options.toy:
                results: dict[str, Any] = {"status": "not run: no time left", "iterations": []}
            elif side == TRL:
                results = run_trl(case, model, options, remaining_s)
            else:
                results = run_ours(side, case, model, options, remaining_s)
            result.add(side, results)
            result.contents["ratios"] = ratios(result.contents["parts"])
            result.write()
            print(line(name, side, results), flush=True)
    for ratio, value in result.contents.get("ratios", {}).items():
        print(f"{name}: {ratio}: {value:.2f}", flush=True)
    return result


def not_done(case: str, result: Result) -> list[str]:
    """Name every side of a case that was not measured to its end, and why."""
    return [
        f"{case}, {side}: {part['status']}"
        for side, parts in result.contents["parts"].items()
        for part in parts
        if part["status"] != "done"
    ]


def line(case: str, side: str, results: dict[str, Any]) -> str:
    seconds = [round(iteration["seconds"], 2) for iteration in results["iterations"]]
    if not seconds:
        return "\n".join([f"{case}, {side}: {results['status']}", *results.get("log_end", [])])
    last = results["iterations"][-1]
    return (
        f"{case}, {side}: {seconds} s, {tokens_per_s([results]):,.0f} tokens/s, gap {last['gap']}, "
        f"{last['stages']} ({results['status']})"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--sides", nargs="+", choices=[*OURS, TRL], help="some instead of all")
    parser.add_argument("--iterations", type=int, default=3, help="counted, of each process")
    parser.add_argument("--rounds", type=int, default=1, help="of all sides, one after the other")
    parser.add_argument("--minutes", type=float, default=10, help="for everything")
    parser.add_argument("--peer_python", default=sys.executable, help="of TRL's environment")
    parser.add_argument("--toy", action="store_true", help="a size that only tries the script")
    parser.add_argument("--out", type=Path, help="a folder for the JSON files")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of our sides")
    options = parser.parse_intermixed_args(arguments)
    options.out = options.out or (SCRATCH / "results" if options.toy else RESULTS)
    options.logs = SCRATCH / "logs"
    if not options.toy and not has_gpu():
        parser.error("there is no GPU here: --toy tries the script on a CPU")
    end = time.monotonic() + 60 * options.minutes
    results = {name: measure(name, options, end) for name in options.case}
    if missing := [text for name, result in results.items() for text in not_done(name, result)]:
        parser.exit(1, f"not done: {'; '.join(missing)}\n")


if __name__ == "__main__":
    main()
