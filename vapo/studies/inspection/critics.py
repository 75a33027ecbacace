"""The values that a critic of any framework gives to a stream of responses.

The value of a state is read at the last token before the one that is sampled next. Whether a file's
own values were, is asked by `agreement.ValueComparison`.
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

_BUDGET = 16_384  # tokens of a forward pass
_AT_ONCE = 256  # responses that are held, to be cut by their lengths


@dataclass(frozen=True)
class LoadedCritic:
    """A critic ready to read.

    Attributes:
        says: what kind of head the folder has.
        mean, std: what OpenRLHF subtracts from the head's output, and divides it by.
    """

    critic: Critic
    tokenizer: PreTrainedTokenizerBase
    says: str
    device: torch.device
    mean: float = 0.0
    std: float = 1.0

    @torch.no_grad()
    def values(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """The value of the state before each response token, of (prompt ids, response ids)."""
        lengths = [len(prompt) + len(response) for prompt, response in sequences]
        found: list[list[float]] = [[] for _ in sequences]
        rows = range(len(sequences))
        for chunk in cut_by_tokens(lengths, rows, max_tokens=_BUDGET, layout="padded"):
            inputs = token_inputs([sequences[row] for row in chunk], pad_id=0).to(self.device)
            columns = inputs.scatter(self.critic(inputs).values).cpu()
            for row, column in zip(chunk, columns, strict=True):
                values = (column[: len(sequences[row][1])] - self.mean) / self.std
                found[row] = values.tolist()
        return found


def load_critic(path: str, *, tokenizer: PreTrainedTokenizerBase | None = None) -> LoadedCritic:
    """A critic from a folder of whatever framework.

    Args:
        tokenizer: the policy's, for a folder without one.

    Raises: UserError: no folder, no head that gives one number, a pickle, or no tokenizer.
    """
    with about("--critic"):
        model, says, path = load_value_network(path)
        if tokenizer is None:
            tokenizer = load_tokenizer(path)
    device = pick_device(TrainerConfig())
    config: Any = model.config
    mean, std = 0.0, 1.0
    if getattr(config, "normalize_reward", False) and hasattr(config, "mean"):
        mean, std = float(config.mean), float(config.std)
        says += f", its output less {mean:g} and divided by {std:g}"
    return LoadedCritic(Critic(model).to(device).eval(), tokenizer, says, device, mean, std)


# ---- values of a stream ----------------------------------------------------------------------


def responses_with_values(
    responses: Iterable[InspectedResponse | BadRow],
    critic: LoadedCritic,
    *,
    notes: list[str],
    done: Callable[[int], None] | None = None,
) -> Iterator[InspectedResponse | BadRow]:
    """The responses, those without values with the critic's.

    The values that a file has stay, and are compared with the critic's.

    Args:
        notes: gets what was computed, and whether a file's values are this critic's.
        done: is told how many were.
    """
    compared, num, stream = ValueComparison(), 0, iter(responses)
    without_tokens = computed = 0
    while held := list(islice(stream, _AT_ONCE)):
        wanted = [
            place
            for place, one in enumerate(held)
            if isinstance(one, InspectedResponse) and one.prompt_ids and one.response_ids
        ]
        rows: list[Any] = [held[place] for place in wanted]
        values = critic.values([(one.prompt_ids, one.response_ids) for one in rows])
        num += len(rows)
        for place, one, own in zip(wanted, rows, values, strict=True):
            if one.values is None:
                computed += 1
                held[place] = check_lists(replace(one, values=tuple(own)))
            else:
                compared.add(one, own)
        without_tokens += sum(isinstance(one, InspectedResponse) for one in held) - len(rows)
        if done is not None:
            done(num)
        yield from held
    notes.append(f"the critic: {critic.says}")
    if computed:
        notes.append(
            f"the values of {computed:,} responses are the critic's, computed here at the state "
            "before each token"
        )
    if without_tokens:
        notes.append(f"{without_tokens:,} responses were not read by the critic (no tokens)")
    if num > computed:
        notes.append(f"the file's values beside the critic's: {compared.result().text}")
