"""Values of stored rollouts that train no network: other responses' returns, weighed.

    python experiments/smollm2/estimates.py --rollouts ROLLOUTS.parquet --output estimates.json \
        [--config conf/worked_sums/vapo.yaml] [--number 512] [--heldout 512] [--step_ends ';.'] \
        [--layers 10,20,-1] [KEY=VALUE ...]

`milestones` (of `vapo.functional.milestones`) and `kernel` are our own readings of Numca and Hista
(arXiv 2605.29782), of which we could read no more than the abstract: numbers as milestones, and a
kernel on hidden states. Every value of a response is made of the returns of others alone. The
settings of each are those that explain most of the first groups' returns; the last groups judge
it, as in `critic_curve.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from critic_curve import Heldout, split
from kernel import By, kernel_values
from transformers import PreTrainedTokenizerBase

from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.files.whole_files import write_text
from vapo.functional.milestones import milestone_values
from vapo.networks.build import make_actor
from vapo.networks.forward_passes import cut_rollouts
from vapo.networks.loading import load_tokenizer
from vapo.networks.token_inputs import rollout_inputs, token_inputs
from vapo.rollouts.milestones import numbered_milestones, token_texts
from vapo.rollouts.rollout_rows import StoredRollout
from vapo.rollouts.stored_rollouts import RolloutDataset, read_rollouts
from vapo.system.libraries import set_threads

CONFIG = Path(__file__).parents[2] / "conf/worked_sums/vapo.yaml"
POLICY = "models/worked_sums/policy"
Values = list[np.ndarray]  # of each response, of the state before each token
ESTIMATES = ("group_mean", "milestones", "kernel")
MILESTONES: tuple[Literal["nth", "all"], ...] = ("nth", "all")
SHRINKAGES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
KERNELS: tuple[By, ...] = ("states", "responses")
TEMPERATURES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


class Responses(NamedTuple):
    """The group, reward and text of each response, and its states before each token [tokens, H] by
    layer. `texts` has what each token but the last adds to the text."""

    groups: Sequence[str]
    rewards: np.ndarray
    texts: Sequence[Sequence[str]]
    states: dict[int, Sequence[np.ndarray]]


def group_means(responses: Responses) -> np.ndarray:
    """The mean reward of the other responses to a response's prompt, for each response."""
    groups, rewards = np.array(responses.groups), responses.rewards
    rows_of_others = [
        (groups == group) & (np.arange(len(groups)) != i) for i, group in enumerate(groups)
    ]
    return np.array([rewards[rows].mean() for rows in rows_of_others])


def values_by_milestones(
    responses: Responses, *, kind: Literal["nth", "all"], shrinkage: float
) -> Values:
    """The values that `vapo.functional.milestones.milestone_values` gives each group."""
    groups, values = np.array(responses.groups), dict[int, np.ndarray]()
    for group in dict.fromkeys(responses.groups):
        rows = np.flatnonzero(groups == group).tolist()
        texts = [responses.texts[row] for row in rows]
        lengths = torch.tensor([len(tokens) + 1 for tokens in texts])
        row_values, _ = milestone_values(
            torch.from_numpy(responses.rewards[rows]).double(),
            numbered_milestones(texts, kind=kind),
            torch.arange(int(lengths.max())) < lengths[:, None],
            group_size=len(rows),
            shrinkage=shrinkage,
        )
        values |= {r: v[:n].numpy() for r, v, n in zip(rows, row_values, lengths, strict=True)}
    return [values[row] for row in range(len(groups))]


def candidates(name: str, responses: Responses) -> Iterator[tuple[dict[str, Any], Values]]:
    """The settings that an estimate may have, and its values by each."""
    if name == "group_mean":
        means = group_means(responses)
        yield {}, [np.full(len(t) + 1, m) for t, m in zip(responses.texts, means, strict=True)]
    elif name == "milestones":
        for kind, weight in product(MILESTONES, SHRINKAGES):
            values = values_by_milestones(responses, kind=kind, shrinkage=weight)
            yield {"kind": kind, "shrinkage": weight}, values
    else:
        for layer, kernel, in_group in product(responses.states, KERNELS, (True, False)):
            about: dict[str, Any] = {"layer": layer, "kernel": kernel, "in_group": in_group}
            by_temperature = kernel_values(
                [torch.from_numpy(states) for states in responses.states[layer]],
                torch.from_numpy(responses.rewards),
                temperatures=TEMPERATURES,
                by=kernel,
                groups=responses.groups if in_group else None,
            )
            for temperature, tensors in by_temperature.items():
                yield {**about, "temperature": temperature}, [v.numpy() for v in tensors]


def explained(values: Values, rewards: np.ndarray) -> float:
    """1 - Var(R - V) / Var(R) over all tokens."""
    returns = np.repeat(rewards, [len(v) for v in values])
    return float(1 - (returns - np.concatenate(values)).var() / returns.var())


def choose(name: str, responses: Responses) -> tuple[float, dict[str, Any]]:
    """The settings that explain most, and how much."""
    every = candidates(name, responses)
    scored = [(explained(values, responses.rewards), about) for about, values in every]
    return max(scored, key=lambda pair: pair[0])


def read_responses(
    config: FitConfig,
    rows: Sequence[StoredRollout],
    tokenizer: PreTrainedTokenizerBase,
    layers: Sequence[int],
) -> Responses:
    states = states_of(config, rows, tokenizer, layers)
    center = np.concatenate(states).mean(axis=0)
    texts = [token_texts(row.rollout.response_ids[:-1], tokenizer) for row in rows]
    return Responses(
        [row.group for row in rows],
        np.array([row.rollout.reward for row in rows]),
        texts,
        {layer: [x[:, i] - center[i] for x in states] for i, layer in enumerate(layers)},
    )


@torch.no_grad()
def states_of(
    config: FitConfig,
    rows: Sequence[StoredRollout],
    tokenizer: PreTrainedTokenizerBase,
    layers: Sequence[int],
) -> list[np.ndarray]:
    """The actor's states before each response token [tokens, L, H]."""
    actor = make_actor(config, None, trained=False)
    batch = RolloutDataset(config, rows, tokenizer, name="").batch_of([rows])
    states_by_row: dict[int, np.ndarray] = {}
    budget = config.training.first_microbatch_tokens
    for chunk in cut_rollouts(batch, range(len(rows)), max_tokens=budget, layout="padded"):
        inputs = rollout_inputs(batch, chunk, pad_id=int(tokenizer.pad_token_id))
        states = actor(inputs, temperature=None, layers=layers).states.float()
        parts = states.split(inputs.response_mask.sum(dim=1).tolist())
        states_by_row |= dict(zip(chunk, (part.numpy() for part in parts), strict=True))
    return [states_by_row[index] for index in range(len(rows))]


def of_board(responses: Sequence[Any]) -> Responses:
    """Read responses of the critics' board (`experiments/critics/board`); they have no states."""
    tokenizer = load_tokenizer(POLICY, key="POLICY")
    texts = [token_texts(response.response_ids[:-1], tokenizer) for response in responses]
    rewards = np.array([response.reward for response in responses], dtype=float)
    return Responses([str(response.group) for response in responses], rewards, texts, {})


def milestones(training: Sequence[Any]) -> Callable[[Sequence[Any]], Values]:
    """A critic of the board: milestones, with the settings that explain most of its training."""
    _, settings = choose("milestones", of_board(training))
    return lambda responses: values_by_milestones(of_board(responses), **settings)


def kernel(training: Sequence[Any]) -> Callable[[Sequence[Any]], Values]:
    """A critic of the board: the kernel on the last layer's states, of all the other responses.

    Form and temperature are those that `experiments/critics/for_nothing/README.md` chose.
    """
    config = load_config(FitConfig, [CONFIG], [])
    set_threads(config.trainer)
    actor = make_actor(config, None, trained=False)

    @torch.no_grad()
    def values(responses: Sequence[Any]) -> Values:
        states = []
        for response in responses:
            inputs = token_inputs([(response.prompt_ids, response.response_ids)], pad_id=0)
            states.append(actor(inputs, temperature=None, layers=[-1]).states[:, 0].float())
        center = torch.cat(states).mean(dim=0)
        by_temperature = kernel_values(
            [row_states - center for row_states in states],
            torch.tensor([response.reward for response in responses]),
            temperatures=[0.01],
            by="states",
        )
        return [row_values.numpy() for row_values in by_temperature[0.01]]

    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", required=True)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--config", default="conf/worked_sums/vapo.yaml")
    parser.add_argument("--number", type=int, default=512, help="rollouts to choose settings by")
    parser.add_argument("--heldout", type=int, default=512, help="rollouts held out")
    parser.add_argument("--step_ends", default=";.", help="tokens that end a step of a response")
    parser.add_argument("--layers", default="-1", help="that the kernel may read, as a probe's")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    data = [
        f"components.value_pretraining.data={options.rollouts}",
        "components.value_pretraining.heldout_share=0",
    ]
    config = load_config(FitConfig, [Path(options.config)], [*data, *options.overrides])
    set_threads(config.trainer)
    tokenizer = load_tokenizer(config.actor.path, key="actor.path")
    rows, _ = read_rollouts(config, Path(options.rollouts), tokenizer)
    training_rows, heldout = split(rows, options.heldout)
    judge = Heldout.of(training_rows, heldout, tokenizer, options.step_ends)
    layers = [int(layer) for layer in options.layers.split(",")]
    sides = [
        read_responses(config, side, tokenizer, layers)
        for side in (training_rows[: options.number], heldout)
    ]
    about = {"num_rollouts": options.number, "num_heldout": options.heldout, "layers": layers}
    results: dict[str, Any] = {**about, "oracle": asdict(judge.judge(judge.oracle))}
    for name in ESTIMATES:
        best, best_settings = choose(name, sides[0])
        values = next(v for settings, v in candidates(name, sides[1]) if settings == best_settings)
        results[name] = {
            "chosen": best_settings,
            "where_chosen": best,
            **asdict(judge.judge(values)),
        }
        print(name, results[name], flush=True)
    write_text(options.output, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
