"""Rollouts from a file in place of sampled ones: training and held-out groups, and batches."""

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
from vapo.files.whole_files import sha256
from vapo.networks.end_tokens import folder_end_tokens
from vapo.networks.model_configs import read_model_config
from vapo.prompts.critic_prompts import critic_prompt_adder
from vapo.prompts.fingerprint import fingerprint
from vapo.rollouts.batch import configured_batch
from vapo.rollouts.rollout_file import read_table
from vapo.rollouts.rollout_rows import RowReader, StoredRollout
from vapo.rollouts.stored_columns import check_truth, with_truth
from vapo.system.process import derive_seed
from vapo.types import RolloutBatch

KEY = "components.value_pretraining.data"


class RolloutDataset:
    """The rollouts of a file, from which value pretraining takes its batches.

    A unit is a group, or with group size 1 a row. The units of a share of the prompts, drawn with
    the seed, are held out: training and held-out units never have a prompt in common. The training
    units are read pass after pass, each in an order of its own that depends on the seed; iteration
    i takes the units [i * num_prompts, (i + 1) * num_prompts) of this sequence.

    The `num_failed` units with an episode whose environment failed are left out, because its reward
    is not known. If the critic reads other prompts than the policy, they are made of the rows'
    prompts, answers and records.

    Args:
        heldout_rows: rollouts of other prompts, which are held out in place of a share of `rows`.

    Raises: UserError: the rows do not fill groups, leave nothing to train on, or lack what the
        critic's prompt is made of; or `heldout_rows` have a prompt of `rows`.
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
        heldout_rows: Sequence[StoredRollout] | None = None,
    ) -> None:
        self.config = config
        self.name, self.digest, self.other_policy = name, digest, other_policy
        numbers = resolve(config)
        self.num_prompts, self.group_size = numbers.num_prompts, numbers.group_size
        units, self.num_failed = self._whole_units(rows, tokenizer)
        if heldout_rows is not None:
            self.training = units
            self.heldout, _ = self._whole_units(heldout_rows, tokenizer)
            check_other_prompts(rows, heldout_rows, name)
        else:
            self.training, self.heldout = self._split(units)
        self._order = lru_cache(maxsize=4)(self._permutation)
        self._states: dict[int, Tensor] = {}  # by the row's identity

    def _whole_units(
        self, rows: Sequence[StoredRollout], tokenizer: PreTrainedTokenizerBase
    ) -> tuple[list[list[StoredRollout]], int]:
        """Group rows into units, and leave out units with an episode whose environment failed.

        Returns: the units that are left, and how many are left out.
        Raises: UserError: the rows do not fill groups, or lack what the critic's prompt is made of.
        """
        units = self._units(with_stored_critic_prompts(rows, self.config, tokenizer, self.name))
        whole = [unit for unit in units if not any(row.rollout.is_lost for row in unit)]
        return whole, len(units) - len(whole)

    def _split(
        self, units: Sequence[list[StoredRollout]]
    ) -> tuple[list[list[StoredRollout]], list[list[StoredRollout]]]:
        """Divide units into training and held-out units, so that they share no prompt.

        The config has the share of the prompts that are held out; the seed draws them.

        Raises: UserError: nothing would be left to train on.
        """
        prompts = sorted({unit[0].rollout.prompt.prompt_ids for unit in units})
        Random(derive_seed(self.config.seed, "held-out rollouts")).shuffle(prompts)
        share = self.config.components.value_pretraining.heldout_share
        count = max(1, round(share * len(prompts))) if share > 0 else 0
        heldout_prompts = set(prompts[:count])
        training: list[list[StoredRollout]] = []
        heldout: list[list[StoredRollout]] = []
        for unit in units:
            is_heldout = unit[0].rollout.prompt.prompt_ids in heldout_prompts
            (heldout if is_heldout else training).append(unit)
        if not training:
            raise UserError(
                f"{KEY} {self.name}: {len(prompts)} prompts, of which "
                f"{KEY.rpartition('.')[0]}.heldout_share {share} leaves none to train on"
            )
        return training, heldout

    def compute_states(self, states_of: Callable[[RolloutBatch], list[Tensor]]) -> None:
        """Compute the actor's states of all rows once, so that every batch has `actor_states`.

        `states_of` computes those of a batch. They are computed in the file's order, whichever
        iteration is next, so that a resumed run has the same bits. They stay in the host's memory
        until `free_states`.
        """
        self.free_states()  # else the batches below would have those of another critic
        units, states_by_row = [*self.training, *self.heldout], dict[int, Tensor]()
        for first in range(0, len(units), self.num_prompts):
            part = units[first : first + self.num_prompts]
            unit_states = states_of(self.batch_of(part))
            rows = (row for unit in part for row in unit)
            states_by_row |= {
                id(row): states for row, states in zip(rows, unit_states, strict=True)
            }
        self._states = states_by_row

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
        """Return the batch of the iteration `index`, counted from 0, and its metrics.

        They depend on the index and the run's seed alone.
        """
        size = len(self.training)
        places = range(index * self.num_prompts, (index + 1) * self.num_prompts)
        units = [self.training[self._order(place // size)[place % size]] for place in places]
        metrics = {"rollout/stored_passes": (index + 1) * self.num_prompts / size}
        return self.batch_of(units), metrics

    def passes(self, num_iterations: int) -> int:
        """Return how often the given number of iterations reads all training units."""
        return num_iterations * self.num_prompts // len(self.training)

    def heldout_batch(self) -> RolloutBatch:
        return self.batch_of(self.heldout)

    def batch_of(self, units: Sequence[Sequence[StoredRollout]]) -> RolloutBatch:
        """Make a rollout batch of units, with the punishment of overlong responses in the rewards
        as the config says, and with measured values if these are the value targets."""
        rows = [row for unit in units for row in unit]
        rollouts = [row.rollout for row in rows]
        batch = configured_batch(rollouts, self.config, group_size=self.group_size)
        if self._states:
            batch = replace(batch, actor_states=[self._states[id(row)] for row in rows])
        has_truth = self.config.components.value_pretraining.targets == "truth"
        return with_truth(batch, [row.truth for row in rows]) if has_truth else batch

    def describe(self) -> str:
        """Return a line for the console: how many rollouts there are to train on and held out."""
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


def check_other_prompts(
    training: Sequence[StoredRollout], heldout: Sequence[StoredRollout], name: str
) -> None:
    """Check that no held-out rollout has a prompt that a training rollout has. `name` is the file.

    Raises: UserError: some have; the error says how many, and names one of the prompts.
    """
    prompts = {row.rollout.prompt.prompt_ids for row in training}
    shared = [row for row in heldout if row.rollout.prompt.prompt_ids in prompts]
    if shared:
        raise UserError(
            f"{name}: {len(shared)} of the {len(heldout)} held-out rollouts are of prompts that "
            f"the training rollouts have, too, as {shared[0].rollout.prompt.text!r}: a critic "
            "would be measured on prompts that it has seen; leave them out"
        )


def _check_scale(config: FitConfig, metadata: Mapping[str, Any], path: Path) -> None:
    """Check that right and wrong responses have the same rewards in a file as in the config.

    This is not checked if the file does not say its rewards, or if verifiers give others than the
    config's.

    Raises: UserError: the rewards differ.
    """
    file_scale, rewards = metadata.get("reward"), config.rewards
    config_scale = [rewards.correct, rewards.incorrect]
    if file_scale is None or not gives_configured_rewards(config):
        return
    if list(file_scale) != config_scale:
        raise UserError(
            f"{KEY} {path}: its rewards of a correct and an incorrect response are "
            f"{file_scale[0]:g} and {file_scale[1]:g}, and rewards.correct and rewards.incorrect "
            f"are {config_scale[0]:g} and {config_scale[1]:g}: a critic would learn another scale "
            "than the policy's; set them to the file's, or sample the rollouts again with "
            "`vapo rollouts`"
        )


def read_rollouts(
    config: FitConfig,
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    needs_logprobs: bool | None = None,
) -> tuple[list[StoredRollout], str]:
    """Read and check all rows of a file of rollouts.

    Return them with the fingerprint of the policy that sampled them, which is empty if that is the
    config's policy, or is not known.

    Args:
        needs_logprobs: whether a critic reads the tokens' log-probs, so that all rows must have
            them; None: the config's critic decides.

    Raises: UserError: something in the file is wrong; the error names the row and the column.
    """
    table, metadata = read_table(path, key=KEY)
    _check_scale(config, metadata, path)
    rows = row_reader(config, path, tokenizer, needs_logprobs=needs_logprobs).read(table, metadata)
    check_truth(config, (row.truth for row in rows), metadata, path)
    file_policy, config_policy = metadata.get("policy"), fingerprint(config.actor.path)
    is_other = file_policy and config_policy and file_policy != config_policy
    return rows, str(file_policy) if is_other else ""


def row_reader(
    config: FitConfig,
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    needs_logprobs: bool | None = None,
) -> RowReader:
    """Return a reader of a file's rows as responses of the config's policy (`read_rollouts`)."""
    model = read_model_config(config.actor.path).get_text_config()
    if needs_logprobs is None:
        needs_logprobs = config.critic.sampled_logprobs is not None
    return RowReader(
        path,
        tokenizer,
        int(model.vocab_size),
        config.rollouts.max_response_tokens,
        needs_logprobs=needs_logprobs,
        read_ends=lambda: folder_end_tokens(config.actor.path, tokenizer, data=config.data),
    )


def open_stored(config: FitConfig, tokenizer: PreTrainedTokenizerBase) -> RolloutDataset | None:
    """Open the file of rollouts that value pretraining reads; None if it samples its rollouts.

    Raises: UserError: something in the file is wrong.
    """
    name = config.components.value_pretraining.data
    if name is None or resolve(config).value_pretraining_iterations == 0:
        return None
    rows, other = read_rollouts(config, Path(name), tokenizer)
    digest = sha256(Path(name))[:12]
    return RolloutDataset(config, rows, tokenizer, name=name, digest=digest, other_policy=other)


def with_stored_critic_prompts(
    rows: Sequence[StoredRollout], config: FitConfig, tokenizer: PreTrainedTokenizerBase, name: str
) -> Sequence[StoredRollout]:
    """Return the rows with `critic_prompt_ids` in their prompts, if the critic reads other prompts
    than the policy; else return them unchanged. `name` is the file.

    Raises: UserError: the file lacks what the template reads, or a prompt does not fit the critic.
    """
    add_critic_prompts, prompt_config = critic_prompt_adder(config, tokenizer), config.critic.prompt
    if add_critic_prompts is None or not isinstance(prompt_config, PrivilegedPrompt):
        return rows
    prompts = [row.rollout.prompt for row in rows]
    for column in ("prompt", "answer"):  # other programs' files may lack them
        texts = (prompt.text if column == "prompt" else prompt.answer for prompt in prompts)
        if f"{{{column}}}" not in prompt_config.template or all(texts):
            continue
        raise UserError(
            f"{KEY} {name}: critic.prompt.template has {{{column}}}, and the file has rows "
            f"without a text in the column {column}: add it to the file, or set "
            "critic.prompt.kind=policy"
        )
    try:
        new_prompts = add_critic_prompts(prompts, config.rollouts.max_response_tokens)
    except UserError as error:
        raise UserError(f"{KEY} {name}: {error}") from None
    return [
        replace(row, rollout=replace(row.rollout, prompt=prompt))
        for row, prompt in zip(rows, new_prompts, strict=True)
    ]
