"""A recipe as it is written, for three iterations of the policy on a GPU, killed once and resumed.

    python experiments/gpu/recipe.py gsm8k_qwen2.5_0.5b [--minutes 6] [KEY=VALUE ...]
    python experiments/gpu/recipe.py --list

The config is the recipe's, with these changes: a policy of its model's shape with random weights,
prompts and responses of its data's mean lengths (`made_model.py`), one iteration of value
pretraining before three of the policy, a checkpoint after each, and an evaluation of 16 prompts.
Before the last iteration the process is killed with all that it started, and the command is given
again with `--ckpt_path last`. The JSON file has the seconds by stage, the gap between engine and
trainer, and the memory beside `vapo estimate`. `own_model` is `vapo fit --model` instead of a file.

On a CPU `--toy` tries it with a tiny model and the engine `transformers`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_record import (  # beside this file
    RESULTS,
    ROOT,
    SCRATCH,
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
NUM_ITERATIONS = 4  # the first is of value pretraining
PEAK = re.compile(r"^peak: ([\d.]+) GiB, in the stage ([a-z -]+)", re.MULTILINE)


@dataclass(frozen=True)
class Recipe:
    """What a recipe is run with.

    `lengths`: of its data's prompts, template included, and of responses; where episodes have
    several turns, the responses are turns. `needs`: the package that its data or its environment
    is from; without it prompts of a file, and an environment of this folder, stand in.
    """

    shape: str
    lengths: Lengths
    config: str | None = None
    needs: str | None = None
    has_turns: bool = False


RECIPES = {
    "gsm8k_qwen2.5_0.5b": Recipe(
        "qwen2.5_0.5b", Lengths(60, 30, 1024, 200), "conf/recipes/gsm8k_qwen2.5_0.5b.yaml"
    ),
    "smollm2_gpu": Recipe(
        "smollm2_135m", Lengths(20, 6, 64, 20), "conf/recipes/smollm2_gpu.yaml", "reasoning_gym"
    ),
    "sao_environment_qwen2.5_0.5b": Recipe(
        "qwen2.5_0.5b",
        Lengths(280, 80, 512, 150),
        "conf/recipes/sao_environment_qwen2.5_0.5b.yaml",
        "verifiers",
        has_turns=True,
    ),
    "own_model": Recipe("qwen2.5_0.5b", Lengths(130, 40, 1024, 200)),
    "own_model_1.5b": Recipe("qwen2.5_1.5b", Lengths(130, 40, 1024, 200)),
}
TOY = (
    "components.group_sampling.num_prompts=4",
    "rollouts.max_response_tokens=24",
    "rollouts.max_concurrent_sequences=16",
    "training.minibatch_size=8",
    "training.microbatch_tokens=4096",
    "data.max_prompt_tokens=512",
    "rollouts.engine=transformers",
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "trainer.num_threads=1",
)
TOY_TURNS = ("rollouts.max_response_tokens=512", "environment.max_turn_tokens=24")


# ---- the command --------------------------------------------------------------------------------


def write_overlay(recipe: Recipe, model: Path, path: Path) -> None:
    """A config that puts made prompts in the place of the recipe's data."""

    def source(name: str) -> dict[str, Any]:
        columns = {"prompt_column": "prompt", "answer_column": "answer", "answer_pattern": None}
        return {"kind": "jsonl", "path": str(model / name), **columns}

    overlay: dict[str, Any] = {
        "data": {"train": source("problems.jsonl"), "heldout": source("heldout.jsonl")}
    }
    if recipe.has_turns:
        function = f"{HERE / 'stand_in_environment.py'}:StandIn"
        overlay["environment"] = {"kind": "function", "function": function}
    path.write_text(json.dumps(overlay, indent=1), encoding="utf-8")  # JSON is YAML


def stands_in(recipe: Recipe) -> bool:
    """Whether made prompts are in the place of the recipe's data, of a hub or a missing package."""
    return recipe.needs is None or find_spec(recipe.needs) is None


def chosen(recipe: Recipe, model: Path, output: Path, more: Sequence[str]) -> list[str]:
    """What `vapo fit` and `vapo estimate` are both given."""
    overrides = [
        "components.value_pretraining.num_iterations=1",
        "components.value_pretraining.min_iterations=1",
        f"training.num_iterations={NUM_ITERATIONS - 1}",
        "checkpoints.every_n_iterations=1",
        "evaluation.every_n_iterations=1000",
        f"output_dir={output}",
        f"tracking.uri={output.parent / 'mlruns'}",
        "tracking.also=[csv]",
        *more,
    ]
    if recipe.config is None:
        data, reward = model / "problems.jsonl", model / "reward.py"
        base_options = ["--model", str(model), "--data", str(data), "--reward", f"{reward}:score"]
        return [*base_options, "data.heldout_size=16", *overrides]
    base_options = ["--config", recipe.config]
    if stands_in(recipe):
        write_overlay(recipe, model, model / "overlay.yaml")
        base_options += ["--config", str(model / "overlay.yaml")]
    else:
        overrides.insert(0, "data.heldout.num_examples=16")
    return [*base_options, f"actor.path={model}", *overrides]


# ---- what came of it ----------------------------------------------------------------------------


def iterations(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every iteration, the first ones included; what a GPU alone has is left out without one."""
    keys = {
        "tokens": "rollout/num_response_tokens",
        "mean_length": "rollout/response_length_mean",
        "prompt_tokens": "rollout/num_prompt_tokens",
        "gap": "rollout/logprob_gap_mean",
        "allocated_gib": "memory/gpu_gib",
        "held_gib": "memory/gpu_reserved_gib",
        "mfu": "throughput/training_mfu",
        "is_policy": "progress/phase",
    }
    return [
        {
            "seconds": iteration_seconds(row),
            "stages": stages(row),
            **{name: row[key] for name, key in keys.items() if key in row},
        }
        for row in rows
    ]


def estimate(printed: str) -> dict[str, Any] | None:
    """The peak that `vapo estimate` prints, and its stage."""
    match = PEAK.search(printed)
    return match and {"peak_gib": float(match[1]), "stage": match[2]}


def memory(part: dict[str, Any], expected: dict[str, Any] | None) -> dict[str, Any]:
    """The most that torch allocated beside the estimate; the ratio is of the two."""
    allocated = [
        iteration["allocated_gib"]
        for iteration in part["iterations"]
        if "allocated_gib" in iteration
    ]
    figures: dict[str, Any] = {"estimated": expected}
    if allocated:
        figures["allocated_peak_gib"] = max(allocated)
        if expected is not None:
            figures["measured_to_estimated"] = round(max(allocated) / expected["peak_gib"], 3)
    return figures


class Lines:
    """True once as many lines of finished iterations as are asked for were printed."""

    def __init__(self, number: int) -> None:
        self.num_lines = number

    def __call__(self, line: str) -> bool:
        self.num_lines -= line.startswith("iteration")
        return self.num_lines <= 0


def measure(name: str, options: argparse.Namespace) -> Result:
    recipe, end = RECIPES[name], time.monotonic() + 60 * options.minutes
    if options.toy:
        lengths = replace(recipe.lengths, max_response=24, mean_response=12)
        recipe = replace(recipe, lengths=lengths)
    model = SCRATCH / f"model_{name}{'_toy' if options.toy else ''}"
    output, logs = SCRATCH / "recipe", SCRATCH / "logs"
    shutil.rmtree(output, ignore_errors=True)
    setting = {**asdict(recipe), "overrides": options.overrides}
    result = Result(options.out, f"recipe_{name}_{device_slug()}", setting)
    result.contents["stands_in"] = stands_in(recipe) and recipe.config is not None

    def run(step: str, command: list[str], **more: Any) -> dict[str, Any]:
        remaining_s = max(1.0, end - time.monotonic())
        outcome = run_process(command, logs / f"{name}_{step}.log", limit_s=remaining_s, **more)
        print(f"{name}, {step}: {outcome.status}, {outcome.seconds:.0f} s", flush=True)
        if outcome.status not in ("done", "killed"):
            print(*outcome.tail(), sep="\n", flush=True)
        return {**outcome.part(), "printed": outcome.log.read_text(errors="replace")}

    model_outcome = run("model", command(model, recipe.shape, recipe.lengths, tiny=options.toy))
    toy = [*TOY, *(TOY_TURNS if recipe.has_turns else ())] if options.toy else []
    arguments = chosen(recipe, model, output, [*toy, *options.overrides])
    expected = (
        run("estimate", vapo("estimate", *arguments))
        if model_outcome["status"] == "done"
        else model_outcome
    )
    first = run("first", vapo("fit", *arguments), until=Lines(NUM_ITERATIONS - 1))
    start = time.time()
    if first["status"] == "killed":
        again = run("resumed", vapo("fit", *arguments, "--ckpt_path", "last"))
    else:
        again = {"status": "not run: the first process was not killed"}
    part = {
        "asked": ["vapo", "fit", *arguments],
        "status": again["status"],
        "first": _without_text(first),
        "resumed": {**_without_text(again), "seconds_to_its_end": round(time.time() - start, 1)},
        "iterations": iterations(recorded(output)),
    }
    part["memory"] = memory(part, estimate(expected["printed"]))
    part["is_resumed"] = again["status"] == "done" and len(part["iterations"]) == NUM_ITERATIONS
    result.add(name, part)
    print(json.dumps({key: part[key] for key in ("memory", "is_resumed")}), flush=True)
    for iteration in part["iterations"]:
        seconds, gap = iteration["seconds"], iteration.get("gap")
        print(f"{name}: {seconds:.2f} s, gap {gap}, {iteration['stages']}", flush=True)
    return result


def _without_text(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key != "printed"}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", choices=list(RECIPES), nargs="?")
    parser.add_argument("--list", action="store_true", help="print the command of each recipe")
    parser.add_argument("--minutes", type=float, default=6, help="for everything")
    parser.add_argument("--toy", action="store_true", help="a size that only tries the script")
    parser.add_argument("--out", type=Path, help="a folder for the JSON file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args(arguments)
    if options.list:
        script = Path(__file__).relative_to(ROOT)
        print(*(f"python {script} {name}" for name in RECIPES), sep="\n")
        return
    if options.recipe is None:
        parser.error(f"name a recipe: {', '.join(RECIPES)}")
    if not options.toy and not has_gpu():
        parser.error("there is no GPU here: --toy tries the script on a CPU")
    options.out = options.out or (SCRATCH / "results" if options.toy else RESULTS)
    measure(options.recipe, options)


if __name__ == "__main__":
    main()
