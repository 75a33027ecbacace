"""Rollouts from a file in the place of sampled ones: training and held-out groups, and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vapo.config import FitConfig, resolve
from vapo.config.critic import PrivilegedPrompt
from vapo.config.critic_rules import gives_configured_rewards
from vapo.errors import UserError
from vapo.networks.end_tokens import folder_end_tokens
from vapo.networks.model_configs import read_model_config
from vapo.prompts.critic_prompts import critic_prompt_adder
from vapo.prompts.fingerprint import fingerprint
from vapo.rollouts.batch import make_rollout_batch
from vapo.rollouts.rollout_file import read_table
from vapo.rollouts.rollout_rows import RowReader, StoredRollout
from vapo.rollouts.stored_columns import check_truth, with_truth
from vapo.system.files import sha256
from vapo.system.process import derive_seed
from vapo.types import RolloutBatch

KEY = "components.value_pretraining.data"


class StoredRollouts:
    """The rollouts of a file, as value pretraining takes them.

    A unit is a group, or with group size 1 a row. The units of a share of the prompts, drawn
    with the seed, are held out: no prompt is on both sides, whatever its groups are called. Pass
    after pass goes through seeded permutations of the other units; iteration i takes positions
    [i * num_prompts, (i + 1) * num_prompts) of this sequence.

    Units with an episode whose environment failed are left out, `num_failed` of them: what it would
    have earned is not known.

    A privileged critic's own prompts are made of the rows' prompts, answers and records.

    Raises: UserError: the rows do not fill groups, leave nothing to train on, or lack what the
        critic's prompt is made of.
    """

    def __init__(
        self,
        config: FitConfig,
        rows: Sequence[StoredRollout],
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        digest: str = "",
        other_policy: str = "",
    ) -> None:
        self.config = config
        self.name, self.digest, self.other_policy = name, digest, other_policy
        numbers = resolve(config)
        self.num_prompts, self.group_size = numbers.num_prompts, numbers.group_size
        units = self._units(with_stored_critic_prompts(rows, config, tokenizer, name))
        whole = [u for u in units if not any(row.rollout.is_lost for row in u)]
        self.num_failed = len(units) - len(whole)
        units = whole
        prompts = sorted({unit[0].rollout.prompt.prompt_ids for unit in units})
        Random(derive_seed(config.seed, "held-out rollouts")).shuffle(prompts)
        share = config.components.value_pretraining.heldout_share
        count = max(1, round(share * len(prompts))) if share > 0 else 0
        chosen = set(prompts[:count])
        self.heldout = [u for u in units if u[0].rollout.prompt.prompt_ids in chosen]
        self.training = [u for u in units if u[0].rollout.prompt.prompt_ids not in chosen]
        if not self.training:
            raise UserError(
                f"{KEY} {name}: {len(prompts)} prompts, of which "
                f"{KEY.rpartition('.')[0]}.heldout_share {share} leaves none to train on"
            )
        self._order = lru_cache(maxsize=4)(self._permutation)
        self._states: dict[int, Tensor] = {}  # by the row's identity

    def compute_states(self, states_of: Callable[[RolloutBatch], list[Tensor]]) -> None:
        """Let every batch have `actor_states`, which are computed here, once.

        In the file's order, whatever iteration comes next, so that a resumed run has the same bits.
        They stay in the host's memory until `free_states`.
        """
        self.free_states()  # of another critic: the batches below would have them
        units, known = [*self.training, *self.heldout], dict[int, Tensor]()
        for first in range(0, len(units), self.num_prompts):
            part = units[first : first + self.num_prompts]
            found = states_of(self.batch_of(part))
            rows = (row for unit in part for row in unit)
            known |= {id(row): states for row, states in zip(rows, found, strict=True)}
        self._states = known

    def free_states(self) -> None:
        self._states = {}

    def _units(self, rows: Sequence[StoredRollout]) -> list[list[StoredRollout]]:
        if self.group_size == 1:
            return [[row] for row in rows]
        groups: dict[str, list[StoredRollout]] = {}
        for row in rows:
            groups.setdefault(row.group, []).append(row)
        for name, group in groups.items():
            if len(group) != self.group_size:
                raise UserError(
                    f"{self.name}: group {name} has {len(group)} rollouts, and "
                    f"components.group_sampling.group_size is {self.group_size}: set it to the "
                    "file's, or components.group_sampling.enabled=false where groups differ in "
                    "size"
                )
            if len({row.rollout.prompt.prompt_ids for row in group}) > 1:
                raise UserError(f"{self.name}: group {name} has more than one prompt")
        return list(groups.values())

    def batch(self, index: int) -> tuple[RolloutBatch, dict[str, float]]:
        """The rollouts of the iteration with this index, a function of it and the seed."""
        size = len(self.training)
        places = range(index * self.num_prompts, (index + 1) * self.num_prompts)
        units = [self.training[self._order(place // size)[place % size]] for place in places]
        metrics = {"rollout/stored_passes": (index + 1) * self.num_prompts / size}
        return self.batch_of(units), metrics

    def passes(self, num_iterations: int) -> int:
        """Whole passes over the training units that so many iterations make."""
        return num_iterations * self.num_prompts // len(self.training)

    def heldout_batch(self) -> RolloutBatch:
        return self.batch_of(self.heldout)

    def batch_of(self, units: Sequence[Sequence[StoredRollout]]) -> RolloutBatch:
        """A rollout batch, with the rewards shaped as the config says."""
        rows = [row for unit in units for row in unit]
        batch = make_rollout_batch(
            [row.rollout for row in rows],
            group_size=self.group_size,
            rewards=self.config.rewards,
            max_response_tokens=self.config.rollouts.max_response_tokens,
            critic_truncated=self.config.critic.truncated,
        )
        if self._states:
            batch = replace(batch, actor_states=[self._states[id(row)] for row in rows])
        is_taught = self.config.components.value_pretraining.targets == "truth"
        return with_truth(batch, [row.truth for row in rows]) if is_taught else batch

    def describe(self) -> str:
        """One line for the console."""
        size = self.group_size
        each = len(self.training) / self.num_prompts
        unit = "rollouts" if size == 1 else f"groups of {size}"
        text = (
            f"value pretraining reads {self.name}: {len(self.training)} {unit} to train on, "
            f"{len(self.heldout)} held out; a pass is {each:.3g} iterations"
        )
        if self.num_failed:
            text += f"; {self.num_failed} {unit} are left out, whose environment failed"
        if self.other_policy:
            text += (
                f"; another policy than actor.path's sampled them ({self.other_policy}): the "
                "critic learns that one's values"
            )
        return text

    def _permutation(self, number: int) -> list[int]:
        order = list(range(len(self.training)))
        Random(derive_seed(self.config.seed, "stored rollouts", number)).shuffle(order)
        return order


def _check_scale(config: FitConfig, metadata: Mapping[str, Any], path: Path) -> None:
    """Raises: UserError where the file's rewards are of other numbers than the config's."""
    written, rewards = metadata.get("reward"), config.rewards
    own = [rewards.correct, rewards.incorrect]
    if gives_configured_rewards(config) and written is not None and list(written) != own:
        raise UserError(
            f"{KEY} {path}: its rewards of a correct and an incorrect response are "
            f"{written[0]:g} and {written[1]:g}, and rewards.correct and rewards.incorrect are "
            f"{own[0]:g} and {own[1]:g}: a critic would learn another scale than the policy's; "
            "set them to the file's, or sample the rollouts again with `vapo rollouts`"
        )


def read_rollouts(
    config: FitConfig,
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    needs_logprobs: bool | None = None,
) -> tuple[list[StoredRollout], str]:
    """All rows of a file, and the fingerprint of the policy that sampled them where it is known
    to be another one than the config's, else an empty text.

    `needs_logprobs`: whether a critic reads the tokens' log-probs; None: as the config's does.

    Raises: UserError naming the file, the row and the column.
    """
    table, metadata = read_table(path, key=KEY)
    _check_scale(config, metadata, path)
    model = read_model_config(config.actor.path).get_text_config()
    if needs_logprobs is None:
        needs_logprobs = config.critic.sampled_logprobs is not None
    reader = RowReader(
        path,
        tokenizer,
        int(model.vocab_size),
        config.rollouts.max_response_tokens,
        needs_logprobs=needs_logprobs,
        read_ends=lambda: folder_end_tokens(config.actor.path, tokenizer, data=config.data),
    )
    rows = reader.read(table, metadata)
    check_truth(config, (row.truth for row in rows), metadata, path)
    written, own = metadata.get("policy"), fingerprint(config.actor.path)
    return rows, str(written) if written and own and written != own else ""


def open_stored(config: FitConfig, tokenizer: PreTrainedTokenizerBase) -> StoredRollouts | None:
    """The rollouts that the config's value pretraining reads; None where it samples.

    Raises: UserError, before anything expensive.
    """
    name = config.components.value_pretraining.data
    if name is None or resolve(config).value_pretraining_iterations == 0:
        return None
    rows, other = read_rollouts(config, Path(name), tokenizer)
    digest = sha256(Path(name))[:12]
    return StoredRollouts(config, rows, tokenizer, name=name, digest=digest, other_policy=other)


def with_stored_critic_prompts(
    rows: Sequence[StoredRollout], config: FitConfig, tokenizer: PreTrainedTokenizerBase, name: str
) -> Sequence[StoredRollout]:
    """Add the critic's own prompts to the rows' prompts; unchanged where it reads the policy's.

    Raises: UserError: what the template has is not in the file, or does not fit the critic.
    """
    added, own = critic_prompt_adder(config, tokenizer), config.critic.prompt
    if added is None or not isinstance(own, PrivilegedPrompt):
        return rows
    prompts = [row.rollout.prompt for row in rows]
    for column in ("prompt", "answer"):  # other programs' files may lack them
        texts = (prompt.text if column == "prompt" else prompt.answer for prompt in prompts)
        if f"{{{column}}}" not in own.template or all(texts):
            continue
        raise UserError(
            f"{KEY} {name}: critic.prompt.template has {{{column}}}, and the file has rows "
            f"without a text in the column {column}: add it to the file, or set "
            "critic.prompt.kind=policy"
        )
    try:
        made = added(prompts, config.rollouts.max_response_tokens)
    except UserError as error:
        raise UserError(f"{KEY} {name}: {error}") from None
    return [
        replace(row, rollout=replace(row.rollout, prompt=prompt))
        for row, prompt in zip(rows, made, strict=True)
    ]
