"""How a policy step of the paper's recipe grows from 8 to 512 ranks, from simulated steps.

    python experiments/scaling/step_time.py simulate experiments/scaling/step_time.json
    python experiments/scaling/step_time.py draw experiments/scaling/step_time.json \\
        docs/images/scaling_step.png

Each number of ranks is simulated with 2 and with 3 of the 64 layers: work is linear in layers
(tests/studies/estimate/). The rates are assumptions, given once more when it is drawn.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.studies.estimate.simulated_step import simulate
from vapo.studies.estimate.simulation_report import Rates, policy_works, step_seconds
from vapo.studies.estimate.step_counts import StepWork
from vapo.system.libraries import quiet_libraries

ROOT = Path(__file__).parents[2]
RANKS = (8, 16, 32, 64, 128, 256, 512)
LAYERS, FEW = 64, (2, 3)
# prompts and responses: as long as they may be, and the means that the recipe's hours assume
LENGTHS = {"longest": (2048, 20480), "mean": (200, 4000)}
RATES = Rates(sustained_tflops=300.0, interconnect_gb_s=50.0)


def config_of(folder: Path, ranks: int, prompt: int, response: int, layers: int) -> FitConfig:
    shape = json.loads((ROOT / "models/shapes/qwen2.5_32b/config.json").read_text())
    shape |= {"num_hidden_layers": layers, "layer_types": None}
    (folder / "config.json").write_text(json.dumps(shape))
    config = load_config(
        FitConfig,
        [ROOT / "conf/recipes/paper_qwen2.5_32b.yaml"],
        [
            f"actor.path={folder}",
            "critic.init=policy",
            f"data.max_prompt_tokens={prompt}",
            f"rollouts.max_response_tokens={response}",
            "components.value_pretraining.enabled=false",  # the critic's step, once more
        ],
    )
    return replace(config, trainer=replace(config.trainer, devices=ranks, num_nodes=1))


def simulated(ranks: int, prompt: int, response: int) -> dict[str, Any]:
    """The work of a policy step on each rank: FLOPs, and collectives by kind."""
    rows = []
    for layers in FEW:
        with tempfile.TemporaryDirectory() as name:
            step = simulate(config_of(Path(name), ranks, prompt, response, layers))
        rows.append({name: vars(work) for name, work in policy_works(step).items()})
    row: dict[str, Any] = {"ranks": ranks, "microbatches": step.microbatches}
    for name in rows[0]:
        few, more = rows[0][name], rows[1][name]
        row[name] = {"flops": _whole(few["flops"], more["flops"])} | {
            part: {kind: _whole(few[part][kind], more[part][kind]) for kind in more[part]}
            for part in ("numbers", "bytes")
        }
    return row


def _whole(few: float, more: float) -> float:
    return more + (more - few) / (FEW[1] - FEW[0]) * (LAYERS - FEW[1])


def seconds(row: dict[str, Any], rates: Rates) -> tuple[float, float]:
    """The seconds of a step that each GPU computes and sends."""
    works = {name: StepWork(**row[name]) for name in ("actor", "critic")}
    step = step_seconds(works, row["ranks"], rates)
    return step.computing, step.sending


def draw(rows: dict[str, list[dict[str, Any]]], rates: Rates) -> Figure:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, len(rows), sharey=True)
    for axes, (name, steps) in zip(panels, rows.items(), strict=True):
        ranks = [row["ranks"] for row in steps]
        computing, sending = zip(*(seconds(row, rates) for row in steps), strict=True)
        least = [max(pair) for pair in zip(computing, sending, strict=True)]
        totals = [sum(pair) for pair in zip(computing, sending, strict=True)]
        axes.fill_between(ranks, least, totals, color="C0", alpha=0.25, label="step, by overlap")
        axes.plot(ranks, computing, "o-", color="C0", label="computing")
        axes.plot(ranks, sending, "s-", color="C1", label="sending")
        ideal = [computing[0] * ranks[0] / n for n in ranks]
        axes.plot(ranks, ideal, "k:", label="1 / GPUs", zorder=3)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ranks, [str(n) for n in ranks])
        prompt, response = LENGTHS[name]
        axes.set_title(f"prompts of {prompt:,}, responses of {response:,} tokens", fontsize=10)
        axes.set_xlabel("GPUs")
    panels[0].set_ylabel("seconds of a step, predicted")
    panels[0].legend(frameon=False, fontsize=9)
    return figure


def table(rows: dict[str, list[dict[str, Any]]], rates: Rates) -> str:
    """The Markdown table with a row for each number of GPUs."""
    lines = [
        "| GPUs | tokens of a response | micro-batches of the actor | computing, s | sending, s "
        "| step, s | bound by |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, steps in rows.items():
        for row in steps:
            computing, sending = seconds(row, rates)
            bound = "computing" if computing >= sending else "sending"
            lines.append(
                f"| {row['ranks']} | {LENGTHS[name][1]:,} | {row['microbatches']['actor']} | "
                f"{computing:.1f} | {sending:.1f} | {max(computing, sending):.1f} to "
                f"{computing + sending:.1f} | {bound} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["simulate", "draw"])
    parser.add_argument("results", type=Path)
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--sustained_tflops", type=float, default=RATES.sustained_tflops)
    parser.add_argument("--interconnect_gb_s", type=float, default=RATES.interconnect_gb_s)
    options = parser.parse_args()
    if options.action == "simulate":
        quiet_libraries()
        rows = {
            name: [simulated(ranks, *lengths) for ranks in RANKS]
            for name, lengths in LENGTHS.items()
        }
        options.results.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        return
    rows = json.loads(options.results.read_text(encoding="utf-8"))
    rates = Rates(options.sustained_tflops, options.interconnect_gb_s)
    print(table(rows, rates))
    draw(rows, rates).savefig(options.output, dpi=120)


if __name__ == "__main__":
    main()
