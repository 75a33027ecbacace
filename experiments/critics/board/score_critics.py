"""Scores critics on the board's rollouts, whatever framework made their values.

    python experiments/critics/board/score_critics.py CRITIC [CRITIC ...] [--output results.json]

A critic is a Parquet file with a column `values`, a list for each row of `test.parquet`: of each
token of the response, the value of the state before it. If it has a column `row` (counted from 1)
it may have another order; with columns `critic` and `seed` it holds several critics and seeds, as
the `values.parquet` of `vapo critics` does. Or a critic is FILE.py:FUNCTION, a function as those of
`small_critics.py` are. With `--output`, the results are added to the file, in place of those of the
same names, and the table of the README is written anew if the file is the board's own.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import parquet
from rollout_set import HERE, STEP_ENDS, TEST, TRAINING, Response, RolloutSet, read_set
from small_critics import ridge_on_logprobs  # beside this file

from vapo.diagnostics.value_truth.figures import truth_figures
from vapo.files.whole_files import write_text
from vapo.intervals import Figure, decimals, quote, t_quantile
from vapo.user_code.user_functions import import_function

Values = Sequence[np.ndarray]

RESULTS, PAGE = HERE / "results.json", HERE / "README.md"
START, END = "<!-- results -->\n", "<!-- end of results -->\n"
CHECKED_GROUPS = 4
TOLERANCE = (
    0.02  # of the rewards' range: a network's values of a state depend a little on the batch
)
READS_MORE_ABOVE = 0.1  # of the values' standard deviation


@dataclass(frozen=True)
class Scored:
    """A critic's values of the test responses, by seed.

    `processor_s` are the seconds of a processor for training and values, the mean over seeds.
    """

    name: str
    values_by_seed: Sequence[Values]
    processor_s: float | None = None


def read_values(path: Path, rollouts: RolloutSet) -> list[Scored]:
    """Read all critics of a Parquet file. Raises: SystemExit, which names file, row and column."""
    table = parquet.read_table(path)
    if "values" not in table.column_names:
        raise SystemExit(f"{path}: no column values; it has {', '.join(table.column_names)}")
    num = len(rollouts.test)
    seeds: dict[str, dict[int, dict[int, Any]]] = {}
    seconds: dict[str, dict[int, float]] = {}
    for place, row in enumerate(table.to_pylist()):
        critic, seed = str(row.get("critic", path.stem)), int(row.get("seed", 0))
        values_by_row = seeds.setdefault(critic, {}).setdefault(seed, {})
        number = int(row["row"]) if "row" in row else len(values_by_row) + 1
        where = f"{path}: row {place + 1} ({critic}, seed {seed})"
        if not 1 <= number <= num or number in values_by_row:
            raise SystemExit(f"{where}: row {number} is a second one, or not from 1 to {num}")
        values, length = row["values"], len(rollouts.test[number - 1].response_ids)
        if values is None or len(values) != length:
            has = "none" if values is None else len(values)
            raise SystemExit(f"{where}: the response has {length} tokens, and {has} values")
        if not all(value is not None and math.isfinite(value) for value in values):
            raise SystemExit(f"{where}: a value is not a finite number")
        values_by_row[number] = np.array(values)
        if "processor_s" in row:
            seconds.setdefault(critic, {})[seed] = row["processor_s"]
    for critic, by_seed in seeds.items():
        for seed, values_by_row in by_seed.items():
            if len(values_by_row) < num:
                raise SystemExit(
                    f"{path}: {critic}, seed {seed}: {len(values_by_row)} of {num} responses"
                )
    return [
        Scored(
            critic,
            [[by_row[number] for number in range(1, num + 1)] for by_row in by_seed.values()],
            statistics.fmean(seconds[critic].values()) if critic in seconds else None,
        )
        for critic, by_seed in seeds.items()
    ]


def run_function(function: Callable[..., Any], name: str, rollouts: RolloutSet) -> Scored:
    """Train a critic that is a function, check it, and compute its values."""
    start = time.process_time()
    values_of = function(rollouts.training)
    values = [np.asarray(row, dtype=float) for row in values_of(rollouts.test)]
    seconds = time.process_time() - start
    lengths = [len(response.response_ids) for response in rollouts.test]
    if [row.shape for row in values] != [(length,) for length in lengths]:
        raise SystemExit(f"{name}: its values are not one for each token of each response")
    check_honest(values_of, name, rollouts)
    return Scored(name, [values], seconds)


def check_honest(values_of: Callable[..., Any], name: str, rollouts: RolloutSet) -> None:
    """Check on a few groups that a value knows neither its response's reward nor what comes later.

    Raises: SystemExit: it changes with one of them.
    """
    groups = list(dict.fromkeys(response.group for response in rollouts.test))[:CHECKED_GROUPS]
    rows = [response for response in rollouts.test if response.group in groups]
    changed = [next(i for i, r in enumerate(rows) if r.group == group) for group in groups]
    worst, best = rollouts.outcomes

    def other_reward(response: Response) -> Response:
        return response._replace(reward=worst + best - response.reward)

    def first_half(response: Response) -> Response:
        half = (len(response.response_ids) + 1) // 2
        ids, logprobs = response.response_ids[:half], response.logprobs[:half]
        return response._replace(response_ids=ids, logprobs=logprobs)

    before = values_of(rows)
    for change, text in ((other_reward, "its own response's reward"), (first_half, "later tokens")):
        after = values_of([change(r) if i in changed else r for i, r in enumerate(rows)])
        for i in changed:
            num = len(after[i])
            difference = np.abs(np.asarray(after[i]) - np.asarray(before[i])[:num]).max()
            if difference > TOLERANCE * (best - worst):
                raise SystemExit(
                    f"{name}: a value of the response of row {i + 1} changes by {difference:.3g} "
                    f"with {text}, which the policy's state does not have"
                )


def difference_at_shared_states(values: Values, responses: Sequence[Response]) -> float:
    """Return how far values differ where two responses to one prompt are still in one state.

    It is the root mean square over neighbours in a group, at their last shared state, as a share of
    the values' standard deviation. A critic that knows the state alone has 0 but for rounding.
    """
    squares = []
    pairs = zip(responses, responses[1:], values, values[1:], strict=False)
    for one, other, one_values, other_values in pairs:
        if one.group == other.group:
            same = [a == b for a, b in zip(one.response_ids, other.response_ids, strict=False)]
            place = same.index(False) if False in same else len(same) - 1
            squares.append((one_values[place] - other_values[place]) ** 2)
    spread = float(np.concatenate(list(values)).std())
    return math.sqrt(statistics.fmean(squares)) / spread if spread > 0 else 0.0


def over_seeds(figures: Sequence[Figure]) -> Figure:
    """Return the mean over seeds, with an interval over prompts and seeds.

    The half-widths over prompts (their mean) and over seeds (Student's) are added as squares. With
    one seed it is over prompts alone.
    """
    num = len(figures)
    value, low, high = (statistics.fmean(limits) for limits in zip(*figures, strict=True))
    spread = 0.0
    if num > 1:
        deviation = statistics.stdev(figure.value for figure in figures)
        spread = t_quantile(num - 1) * deviation / math.sqrt(num)
    return Figure(
        value, value - math.hypot(value - low, spread), value + math.hypot(high - value, spread)
    )


def score(scored: Scored, rollouts: RolloutSet, baseline_s: float) -> dict[str, Any]:
    """Return a critic's row of the results."""
    by_seed = [rollouts.judge.measure(values) for values in scored.values_by_seed]
    figures = {name: over_seeds([row[name] for row in by_seed]) for name in by_seed[0]}
    continued = [_by_continuations(values, rollouts) for values in scored.values_by_seed]
    figures |= {name: over_seeds([row[name] for row in continued]) for name in continued[0]}
    differences = (difference_at_shared_states(v, rollouts.test) for v in scored.values_by_seed)
    seconds = scored.processor_s
    return {
        "num_seeds": len(by_seed),
        **{name: [_rounded(x) for x in figure] for name, figure in figures.items()},
        "difference_at_shared_states": _rounded(statistics.fmean(differences)),
        "processor_s": None if seconds is None else _rounded(seconds),
        "times_ridge": None if seconds is None else _rounded(seconds / baseline_s),
    }


def _by_continuations(values: Values, rollouts: RolloutSet) -> dict[str, Figure]:
    """Return what the values explain of what continuations earn, without their noise."""
    if not rollouts.points:
        return {}
    points = [replace(p, value=float(values[p.row][p.num_tokens])) for p in rollouts.points]
    figures = truth_figures(points, outcomes=rollouts.outcomes, seed=0)
    return {
        "continuations": figures.explained,
        "continuations_within_responses": figures.explained_within,
    }


def _rounded(x: float) -> float | None:
    return float(f"{x:.4g}") if math.isfinite(x) else None


COSTS = ("processor_s", "times_ridge")
COLUMNS = {
    "explained_variance": "explained variance of returns",
    "truth_within_prompts": "truth within prompts",
    "truth_within_responses": "within responses",
    "mistakes_named": "first mistakes named",
    "continuations_within_responses": "within responses, by continuations",
}


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the results as Markdown, those that explain most of the returns first.

    A measure that no critic has is left out.
    """
    columns = {
        name: text for name, text in COLUMNS.items() if any(name in r for r in results.values())
    }
    lines = [
        f"| critic | seeds | {' | '.join(columns.values())} | processor s | times the ridge |",
        f"|---|{'---:|' * (len(columns) + 3)}",
    ]
    for name, row in sorted(results.items(), key=lambda x: -x[1]["explained_variance"][0]):
        mark = "\\*" if row["difference_at_shared_states"] > READS_MORE_ABOVE else ""
        cells = [_shown(row.get(column)) for column in columns]
        cost = ["" if (x := row[key]) is None else decimals(x) for key in COSTS]
        lines.append(f"| {name}{mark} | {row['num_seeds']} | {' | '.join([*cells, *cost])} |")
    return "\n".join(lines)


def _shown(figure: Sequence[float | None] | None) -> str:
    if figure is None or figure[0] is None:
        return ""
    value, low, high = (math.inf if x is None else x for x in figure)
    return quote(Figure(value, low, high))


def with_table(page: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page with the results' table in the place of the one that it has."""
    head, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{head}{START}\n{table(results)}\n\n{END}{after}"


def all_scored(names: Sequence[str], rollouts: RolloutSet) -> Iterator[Scored]:
    for name in names:
        if name.endswith(".parquet"):
            yield from read_values(Path(name), rollouts)
        else:
            function = import_function(name, key="CRITIC", folder=str(HERE))
            yield run_function(function, name.rpartition(":")[2].replace("_", " "), rollouts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("critics", nargs="*", metavar="CRITIC")
    parser.add_argument("--output", type=Path, help="JSON file to which results are added")
    parser.add_argument("--training", type=Path, default=TRAINING)
    parser.add_argument("--test", type=Path, default=TEST)
    parser.add_argument(
        "--step_ends", default=",".join(map(str, STEP_ENDS)), help="tokens that end a step"
    )
    options = parser.parse_args()
    ends = {int(token) for token in options.step_ends.split(",")}
    rollouts = read_set(options.training, options.test, ends)
    results: dict[str, Any] = {}
    if options.output is not None and options.output.exists():
        results = json.loads(options.output.read_text(encoding="utf-8"))
    ridge = run_function(ridge_on_logprobs, "ridge on logprobs", rollouts)
    assert ridge.processor_s is not None
    oracle = Scored("oracle", [[response.oracle for response in rollouts.judge.responses]])
    for scored in (oracle, ridge, *all_scored(options.critics, rollouts)):
        results[scored.name] = score(scored, rollouts, ridge.processor_s)
    if options.output is not None:
        write_text(options.output, json.dumps(results, indent=1, sort_keys=True) + "\n")
    if options.output is not None and options.output.resolve() == RESULTS:
        write_text(PAGE, with_table(PAGE.read_text(encoding="utf-8"), results))
    print(table(results))


if __name__ == "__main__":
    main()
