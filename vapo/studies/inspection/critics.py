"""Compute the values of a stream of responses with a critic of any framework.

The value of a state is the critic's output at its last token, before the next one is sampled.
`agreement.ValueComparison` tests whether the values in a file were computed in this way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from transformers import (
    PreTrainedTokenizerBase,
)

from vapo.config.schema import TrainerConfig
from vapo.errors import about
from vapo.networks.actor_critic import Critic
from vapo.networks.forward_passes import cut_by_tokens
from vapo.networks.loading import (
    load_tokenizer,
)
from vapo.networks.token_inputs import token_inputs
from vapo.studies.inspection.agreement import ValueComparison
from vapo.studies.inspection.critic_loading import load_value_network
from vapo.studies.inspection.fields import check_lists
from vapo.studies.inspection.responses import BadRow, InspectedResponse
from vapo.system.libraries import pick_device

_BUDGET = 16_384  # most tokens in a forward pass
_CHUNK_SIZE = 256  # responses that are sorted by length into forward passes


@dataclass(frozen=True)
class LoadedCritic:
    """A critic that is ready to compute values, with its tokenizer.

    Attributes:
        description: the kind of its value head, for people.
        mean, std: as in OpenRLHF, a value is (the head's output - mean) / std.
    """

    critic: Critic
    tokenizer: PreTrainedTokenizerBase
    description: str
    device: torch.device
    mean: float = 0.0
    std: float = 1.0

    @torch.no_grad()
    def values(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Return, for each response, the value of the state before each of its tokens.

        Args:
            sequences: (prompt ids, response ids) of each response.
        """
        lengths = [len(prompt) + len(response) for prompt, response in sequences]
        results: list[list[float]] = [[] for _ in sequences]
        rows = range(len(sequences))
        for chunk in cut_by_tokens(lengths, rows, max_tokens=_BUDGET, layout="padded"):
            inputs = token_inputs([sequences[row] for row in chunk], pad_id=0).to(self.device)
            columns = inputs.scatter(self.critic(inputs).values).cpu()
            for row, column in zip(chunk, columns, strict=True):
                values = (column[: len(sequences[row][1])] - self.mean) / self.std
                results[row] = values.tolist()
        return results


def load_critic(path: str, *, tokenizer: PreTrainedTokenizerBase | None = None) -> LoadedCritic:
    """Load a critic from a folder of any framework.

    Args:
        tokenizer: the policy's. If None, the critic's folder must have one.

    Raises: UserError: no folder, no head with one output, a pickle, or no tokenizer.
    """
    with about("--critic"):
        model, description, path = load_value_network(path)
        if tokenizer is None:
            tokenizer = load_tokenizer(path)
    device = pick_device(TrainerConfig())
    config: Any = model.config
    mean, std = 0.0, 1.0
    if getattr(config, "normalize_reward", False) and hasattr(config, "mean"):
        mean, std = float(config.mean), float(config.std)
        description += f", its output less {mean:g} and divided by {std:g}"
    return LoadedCritic(Critic(model).to(device).eval(), tokenizer, description, device, mean, std)


# ---- values of a stream ----------------------------------------------------------------------


def responses_with_values(
    responses: Iterable[InspectedResponse | BadRow],
    critic: LoadedCritic,
    *,
    notes: list[str],
    on_progress: Callable[[int], None] | None = None,
) -> Iterator[InspectedResponse | BadRow]:
    """Yield the responses, with the critic's values where the file has none.

    Values in the file stay, and are compared with the critic's. Bad rows pass through.

    Args:
        notes: sentences on what was computed, and on whether the file's values are this critic's,
            are appended at the end.
        on_progress: called with the number of responses that the critic has read.
    """
    comparison, num_read, stream = ValueComparison(), 0, iter(responses)
    num_without_tokens = num_computed = 0
    while chunk := list(islice(stream, _CHUNK_SIZE)):
        places = [
            place
            for place, item in enumerate(chunk)
            if isinstance(item, InspectedResponse) and item.prompt_ids and item.response_ids
        ]
        rows: list[Any] = [chunk[place] for place in places]
        values = critic.values([(row.prompt_ids, row.response_ids) for row in rows])
        num_read += len(rows)
        for place, row, row_values in zip(places, rows, values, strict=True):
            if row.values is None:
                num_computed += 1
                chunk[place] = check_lists(replace(row, values=tuple(row_values)))
            else:
                comparison.add(row, row_values)
        num_responses = sum(isinstance(item, InspectedResponse) for item in chunk)
        num_without_tokens += num_responses - len(rows)
        if on_progress is not None:
            on_progress(num_read)
        yield from chunk
    notes.append(f"the critic: {critic.description}")
    if num_computed:
        notes.append(
            f"the values of {num_computed:,} responses are the critic's, computed here at the "
            "state before each token"
        )
    if num_without_tokens:
        notes.append(f"{num_without_tokens:,} responses were not read by the critic (no tokens)")
    if num_read > num_computed:
        notes.append(f"the file's values beside the critic's: {comparison.result().text}")
