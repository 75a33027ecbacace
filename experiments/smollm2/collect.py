"""The finished runs of the comparison, as rows of `results.json`: one for each system and seed.

    python experiments/smollm2/collect.py [SWEEP_FOLDER] [--output results.json]

writes their means as a table of the page that has a place for it, docs/language_model.md or
comparisons.md, too, and each run into the README here. The file's name marks the place. Rows that
the file has of other systems and seeds stay: a sweep may go on on another machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vapo.config import FitConfig, resolve
from vapo.config.loading import load_config
from vapo.intervals import interval_text
from vapo.sweep.report.estimates import MeanOfSeeds, PromptMeans, compare, estimate
from vapo.sweep.report.tables import markdown_table
from vapo.tracking.prompt_scores import SCORES_NAME, history_of

OUTPUT = Path(__file__).parent / "results.json"
PAGES = (
    Path(__file__).parents[2] / "docs/language_model.md",
    Path(__file__).parent / "comparisons.md",
)
PAGE_OF_RUNS = Path(__file__).parent / "README.md"
END = "<!-- end of results -->"
EXPLAINED, ACCURACY = "critic/explained_variance", "rollout/accuracy"
FRESH_BATCHES = 8  # their prompts are new to the policy, and the same for all rows of a seed
SCORE = "eval/avg_at_k"  # of the start, of policies on the way if any, of the last
WITHIN, RECALL = "truth/explained_within", "truth/mistake_recall"
Series = dict[str, list[tuple[int, float]]]  # of each metric (step, value)


def recorded(run: Path) -> Series:
    """Each metric's values in the order in which the run recorded them."""
    series: Series = {}
    for line in (run / "tracking/journal.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "metrics":
            for name, value, _, step in record["payload"]:
                series.setdefault(name, []).append((int(step), float(value)))
    return series


def seconds(series: Series) -> float:
    """The seconds of all iterations, including those before an interruption."""
    return sum(value for _, value in series.get("time/iteration_s", []))


def at(series: Series, name: str, step: int) -> float | None:
    """The metric at a step. None if it was not recorded there."""
    return dict(series.get(name, [])).get(step)


def row_of(run: Path, system: str, pretraining: Path | None) -> dict[str, Any]:
    """The row of a run. `pretraining` is the run whose critic it started from, if another's."""
    config = load_config(FitConfig, [run / "config.yaml"], [])
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    series, numbers = recorded(run), resolve(config)
    total = seconds(series)
    first = numbers.value_pretraining_iterations  # of a run that pretrains its own critic
    iterations = first + config.training.num_iterations
    if pretraining is not None:
        total += seconds(recorded(pretraining))
        its_config = load_config(FitConfig, [pretraining / "config.yaml"], [])
        iterations += resolve(its_config).value_pretraining_iterations
    steps = [step for step, _ in series[ACCURACY]]
    start, end = steps[first], steps[-1]
    low, high = summary["score_after_ci"]
    return {
        "system": system,
        "seed": config.seed,
        "before": summary["score_before"],
        "before_low": summary["score_before_ci"][0],
        "before_high": summary["score_before_ci"][1],
        "after": summary["score_after"],
        "after_low": low,
        "after_high": high,
        "responses": iterations * numbers.num_prompts * numbers.group_size,
        "hours": round(total / 3600, 3),
        "explained_variance_after_pretraining": at(series, EXPLAINED, start),
        "truth_explained_within": at(series, WITHIN, start),
        "truth_explained_within_at_the_end": at(series, WITHIN, end),
        "truth_mistake_recall": at(series, RECALL, start),
        "truth_mistake_recall_at_the_end": at(series, RECALL, end),
        "accuracy": [round(value, 4) for _, value in series[ACCURACY]],
        "scores": [round(value, 4) for _, value in series.get(SCORE, [])],
        **heldout_scores(run),
    }


def heldout_scores(run: Path) -> dict[str, Any]:
    """How many responses of the last policy to each held-out prompt are correct, as digits.

    Runs with the same `heldout_prompts` were asked the same ones, equally often. There is nothing
    of a run that did not record them, or that has more than nine responses to a prompt.
    """
    path = run / SCORES_NAME
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    evaluation = history_of(text).evaluated("evaluation")
    numbers = {score.num_responses for score in evaluation.scores} if evaluation else set()
    if evaluation is None or len(numbers) != 1 or max(numbers) > 9:
        return {}
    scores = sorted(evaluation.scores)
    prompts = "\n".join(score.prompt for score in scores)
    return {
        "heldout_prompts": hashlib.sha256(f"{numbers}{prompts}".encode()).hexdigest()[:12],
        "heldout_responses": max(numbers),
        "heldout_correct": "".join(str(score.num_correct) for score in scores),
    }


def prompt_means(row: Mapping[str, Any]) -> PromptMeans:
    """The share of correct responses to each held-out prompt; empty where it is not recorded."""
    return {
        f"{row['heldout_prompts']} {place}": int(digit) / row["heldout_responses"]
        for place, digit in enumerate(row.get("heldout_correct", ""))
    }


def finished(sweep: Path) -> Iterator[tuple[Path, str, Path | None]]:
    """Each finished run of the sweep, its row's name, and the run of its value pretraining."""
    record = json.loads((sweep / "sweep.json").read_text(encoding="utf-8"))
    pretrainings = {
        run_record["identity"]: run_record["run_dir"] for run_record in record["value_pretrainings"]
    }
    for run_record in record["runs"]:
        if run_record["state"] == "finished":
            pretraining_dir = pretrainings.get(run_record["needs"])
            yield (
                Path(run_record["run_dir"]),
                run_record["row"],
                None if pretraining_dir is None else Path(pretraining_dir),
            )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown, scores in per cent; a system without a critic has no figures of one."""

    def score(row: Mapping[str, Any], name: str) -> str:
        limits = 100 * row[f"{name}_low"], 100 * row[f"{name}_high"]
        return interval_text(100 * row[name], limits)

    def figure(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    titles = ["system", "seed", "before", "after", "responses", "hours", "explained variance"]
    titles += ["of the truth, within", "first mistake named"]
    lines = []
    for row in rows:
        cells = [
            *(row["system"], str(row["seed"]), score(row, "before"), score(row, "after")),
            *(f"{row['responses']:,}", f"{row['hours']:.2f}"),
            figure(row["explained_variance_after_pretraining"]),
            figure(row["truth_explained_within"]),
            figure(row["truth_mistake_recall"]),
        ]
        lines.append(cells)
    return markdown_table(titles, lines) + "\n"


def means(rows: Sequence[Mapping[str, Any]], *, against: str | None = None) -> str:
    """Each system's mean over its seeds, and its difference from another's on the same seeds.

    The other one is the first whose name begins with GRPO, unless `against` names it.

    Intervals are 95 %. Those of "after" and of its difference are over seeds and held-out prompts
    together where the runs recorded each prompt's score, and else over seeds alone, as the others
    are: the held-out prompts and the first policy are the same for all runs. There is no interval
    over seeds of a single one, and where the seeds differ by much the median and the seeds
    themselves stand in its place. The last column compares the accuracies of training batches,
    each sampled before it is trained on: their prompts are the same for all systems of a seed that
    have groups of the same size, and others for each seed. They are the last ones that every run
    has. (A run that starts from another run's critic begins with the first batch and has only those
    of its policy, so the same place of two runs' lists is the same batch.)
    """
    if against is None:
        against = next((r["system"] for r in rows if r["system"].startswith("GRPO")), "GRPO")
    end = min(len(row["accuracy"]) for row in rows)
    start = max(end - FRESH_BATCHES, 0)
    systems = dict.fromkeys(row["system"] for row in rows)
    after = {name: scores_by_seed(rows, name, lambda row: row["after"]) for name in systems}
    gain = {
        name: scores_by_seed(rows, name, lambda r: r["after"] - r["before"]) for name in systems
    }
    fresh = {
        name: scores_by_seed(rows, name, lambda r: statistics.fmean(r["accuracy"][start:end]))
        for name in systems
    }
    prompts = {
        name: {row["seed"]: prompt_means(row) for row in rows if row["system"] == name}
        for name in systems
    }
    titles = ["system", "seeds", "after", "points gained", f"difference from {against}"]
    titles.append(f"the same on fresh prompts, batches {start + 1} to {end}")
    lines = []
    for system in systems:
        cells = [
            *(system, str(len(after[system]))),
            shown(estimate([*after[system].values()], [*prompts[system].values()])),
            shown(estimate([*gain[system].values()])),
        ]
        common = after[system].keys() & after.get(against, {}).keys()
        if common and system != against:
            mine, theirs = (
                [{seed: scores[name][seed] for seed in common} for scores in (after, fresh)]
                for name in (system, against)
            )
            both = prompts[system], prompts[against]
            cells.append(shown(compare(mine[0], theirs[0], both)[0], "+"))
            cells.append(shown(compare(mine[1], theirs[1])[0], "+"))
        else:
            cells += ["", ""]
        lines.append(cells)
    return markdown_table(titles, lines) + "\n"


def scores_by_seed(
    rows: Sequence[Mapping[str, Any]], system: str, score: Callable[[Mapping[str, Any]], float]
) -> dict[int, float]:
    """A score of a system's runs in per cent, by their seeds."""
    return {row["seed"]: 100 * score(row) for row in rows if row["system"] == system}


def shown(value: MeanOfSeeds, sign: str = "") -> str:
    """The mean with its interval, or with the median and each seed where an interval misleads."""
    if value.seeds:
        seeds = ", ".join(f"{score:{sign}.1f}" for score in value.seeds)
        return f"{value.text(sign)}, median {statistics.median(value.seeds):{sign}.1f} ({seeds})"
    return MeanOfSeeds(value.mean).text(sign) if value.over == "prompts" else value.text(sign)


def with_table(page: str, lines: str, *, name: str = OUTPUT.stem) -> str:
    """The page with this table in the place of the one that it has of the file of this name."""
    start = mark(name)
    head, opening, rest = page.partition(start)
    _, end, after = rest.partition(END)
    if not (opening and end):
        raise SystemExit(f"the page has no {start.strip()!r} with {END!r} after it")
    return f"{head}{start}\n{lines}\n{END}{after}"


def mark(name: str) -> str:
    """The line before the table of the file of this name."""
    return f"<!-- {name}: experiments/smollm2/collect.py writes this table -->\n"


def write_rows(rows: Sequence[Mapping[str, Any]], output: Path) -> None:
    """Write a row in each line; a reader of the file never sees half of it."""
    lines = ",\n".join(map(json.dumps, rows))
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(".partial")
    partial.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    partial.replace(output)


def show_on_pages(
    rows: Sequence[Mapping[str, Any]],
    name: str,
    pages: Sequence[Path] = PAGES,
    page_of_runs: Path = PAGE_OF_RUNS,
) -> None:
    """Put means and runs in the places of the file of this name that the pages have."""
    lines_of_pages = [*((page, means(rows)) for page in pages), (page_of_runs, table(rows))]
    for path, lines in lines_of_pages:
        text = path.read_text(encoding="utf-8")
        if mark(name) in text:
            path.write_text(with_table(text, lines, name=name), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", type=Path, nargs="?", help="none: print what the file has")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--page", type=Path, nargs="+", default=PAGES)
    parser.add_argument("--page_of_runs", type=Path, default=PAGE_OF_RUNS)
    options = parser.parse_args()
    rows_by_key: dict[tuple[str, int], dict[str, Any]] = {}
    if options.output.exists():
        for row in json.loads(options.output.read_text(encoding="utf-8")):
            rows_by_key[row["system"], row["seed"]] = row
    new = [row_of(*run) for run in finished(options.sweep)] if options.sweep else []
    new_rows = {(row["system"], row["seed"]): row for row in new}
    rows = sorted((rows_by_key | new_rows).values(), key=lambda row: (row["system"], row["seed"]))
    write_rows(rows, options.output)
    show_on_pages(rows, options.output.stem, options.page, options.page_of_runs)
    print(f"{options.output}: {len(new_rows)} new or known runs, {len(rows)} rows\n")
    print(means(rows))
    print(table(rows), end="")


if __name__ == "__main__":
    main()
