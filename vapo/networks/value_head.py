"""The critic's head: what its outputs mean, which head a folder brings, and how a head starts.

The head is the linear layer `score` of a sequence classifier. config.json says under
`vapo_value_head` what is computed from its outputs, so that a saved critic describes itself. A
folder without that key has a scalar head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig

from vapo.config.critic import (
    BoundedHead,
    CategoricalHead,
    CriticConfig,
    GivenMeanReward,
    ProbeCritic,
)
from vapo.errors import UserError
from vapo.functional.logprob_columns import NUM_LOGPROB_COLUMNS
from vapo.functional.value_heads import (
    Support,
    bounded_bias,
    bounded_value,
    categorical_bias,
    categorical_centers,
    categorical_value,
    hl_gauss_targets,
    two_hot_targets,
)
from vapo.networks.probe import ProbeModelConfig, layer_numbers

KEY = "vapo_value_head"  # the key in config.json
LOGPROB_SCORE = (
    "logprob_score"  # the layer on `logprob_columns`, whose outputs are added to those of `score`
)
HEAD_LAYERS = ("score", LOGPROB_SCORE)
_MARGIN = 0.01  # share of the range at each end where no head starts: its gradient is near 0


@dataclass(frozen=True)
class ValueHead:
    """What the outputs of a critic's head mean, and what it reads besides the hidden state.

    `low`, `high`, `num_bins` and `support` are None where the kind of head has no such option.
    `num_logprob_columns` is None if the head reads no `logprob_columns`. `layers` are the actor's
    layers whose states it reads; None: it reads the last layer of the critic's own network.
    `target` is what the outputs predict; None: the return.
    """

    kind: Literal["scalar", "bounded", "categorical"] = "scalar"
    low: float | None = None
    high: float | None = None
    num_bins: int | None = None
    support: Support | None = None
    num_logprob_columns: int | None = None
    has_bias: bool = False
    layers: tuple[int, ...] | None = None
    target: Literal["residual"] | None = None

    def __post_init__(self) -> None:
        if self.layers is not None:  # a JSON file has a list
            object.__setattr__(self, "layers", tuple(self.layers))

    @property
    def num_outputs(self) -> int:
        return self.num_bins or 1

    @property
    def options(self) -> dict[str, Any]:
        """The options of a bounded or categorical head by name; empty for a scalar head."""
        by_name = {name: getattr(self, name) for name in ("low", "high", "num_bins", "support")}
        return {name: value for name, value in by_name.items() if value is not None}

    @property
    def centers(self) -> Float[Tensor, " K"]:
        """The value of each bin of a categorical head."""
        return categorical_centers(**self.options)

    def values(self, outputs: Float[Tensor, "n K"]) -> Float[Tensor, " n"]:
        """Turn the head's float32 outputs for n states into values."""
        if self.kind == "categorical":
            return categorical_value(outputs, self.centers)
        values = outputs.squeeze(-1)
        if self.kind == "bounded":
            values = bounded_value(values, **self.options)
        return values.clone()  # a view would warn under FSDP2

    def within(self, mean_reward: float) -> float:
        """Return the value nearest to a mean reward at which this head may start.

        A bounded or categorical head must start inside its range, away from the ends, where its
        gradient is near 0.
        """
        if self.kind == "scalar":
            return mean_reward
        is_bounded = self.kind == "bounded"
        ends: Any = (self.low, self.high) if is_bounded else self.centers[[0, -1]].tolist()
        low, high = ends
        margin = _MARGIN * (high - low)
        return float(min(max(mean_reward, low + margin), high - margin))

    def bias_at(self, mean_reward: float) -> Float[Tensor, " K"]:
        """Return the bias with which a head of weight 0 gives every state the value `mean_reward`.

        Raises: ValueError: `mean_reward` is not inside the head's range.
        """
        if self.kind == "categorical":
            return categorical_bias(mean_reward, self.centers)
        is_bounded = self.kind == "bounded"
        return torch.tensor(
            [bounded_bias(mean_reward, **self.options) if is_bounded else float(mean_reward)]
        )

    def describe(self) -> str:
        """Return the head in words, for example `bounded (low -1.1, high 1.1)`."""
        options = ", ".join(
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.options.items()
        )
        text = f"{self.kind} ({options})" if options else self.kind
        text += f" of the {self.target}" if self.target else ""
        where = self.layers and ", ".join(map(str, self.layers))
        return f"{text} on the actor's layers {where}" if where else text


@dataclass(frozen=True)
class HeadPlan:
    """A critic's head, and whether it keeps the weights of the folder that it starts from.

    If not `keeps_weights`, its weight is 0 and its bias gives the value `mean_reward`; None: the
    bias is 0. A part that the folder's head lacks starts at 0: the weights on log-probs, or the
    bias (`adds_bias`).
    """

    head: ValueHead
    keeps_weights: bool
    mean_reward: float | None = None
    adds_bias: bool = False


def configured_head(critic: CriticConfig) -> ValueHead:
    """Return the head that the run's config describes.

    It has a bias if it starts at a mean reward or is fitted by a regression, whatever its kind.
    """
    options = critic.head
    has_bias = critic.head.start != "as_loaded" or critic.ridge is not None
    reads: dict[str, Any] = {
        "num_logprob_columns": None if critic.sampled_logprobs is None else NUM_LOGPROB_COLUMNS,
        "layers": tuple(critic.probe.layers) if isinstance(critic, ProbeCritic) else None,
        "target": None if critic.target == "return" else critic.target,
    }
    if isinstance(options, CategoricalHead):
        low, high, bins, support = options.low, options.high, options.num_bins, options.support
        return ValueHead("categorical", low, high, bins, support, has_bias=True, **reads)
    if isinstance(options, BoundedHead):
        return ValueHead("bounded", options.low, options.high, has_bias=True, **reads)
    return ValueHead(has_bias=has_bias, **reads)


def plan_head(model: PreTrainedConfig, path: str, critic: CriticConfig | None) -> HeadPlan:
    """Decide which head a critic has that starts from a folder, and which weights it starts with.

    `model` is the folder's config.json. If `critic` is None, the folder's head is taken.

    The start `as_loaded` takes the folder's head, which must be the config's; the config's may
    also read log-probs. Any other start takes only the backbone. A folder without a head (a causal
    language model) gets a head of weight 0.

    Raises: UserError: the two heads differ, and the error names both. Without a config: the head
        needs log-probs or a target that a text alone does not have.
    """
    folder_head = saved_head(model, path) if has_classifier(model) else None
    if critic is None and folder_head is not None and folder_head.num_logprob_columns is not None:
        raise UserError(
            f"{path} cannot be a reward model: its value head reads the log-probs of sampled "
            "tokens (critic.sampled_logprobs), and a text alone has none"
        )
    if critic is None and folder_head is not None and folder_head.target is not None:
        raise UserError(
            f"{path} cannot be a reward model: its value head predicts what is left of a return "
            "after the mean reward of the prompt's other responses (critic.target residual), and "
            "a text alone has no other responses"
        )
    config_head = (folder_head or ValueHead()) if critic is None else configured_head(critic)
    if isinstance(model, ProbeModelConfig) and config_head.layers is not None:
        config_head = replace(
            config_head, layers=layer_numbers(config_head.layers, model.num_actor_layers)
        )
    if folder_head is None or (critic is not None and critic.head.start != "as_loaded"):
        has_mean_reward = critic is not None and isinstance(critic.head, GivenMeanReward)
        return HeadPlan(config_head, False, critic.head.mean_reward if has_mean_reward else None)  # type: ignore[union-attr]
    if folder_head.target != config_head.target:
        raise UserError(f"{path}: {_target_problem(folder_head, config_head, critic)}")
    if folder_head.num_logprob_columns is None:
        folder_head = replace(folder_head, num_logprob_columns=config_head.num_logprob_columns)
    if folder_head.num_logprob_columns is not None and config_head.num_logprob_columns is None:
        raise UserError(
            f"{path}: its value head reads the log-probs of sampled tokens, and "
            "critic.sampled_logprobs is null: set critic.sampled_logprobs={}"
        )
    if folder_head.layers != config_head.layers:
        raise UserError(
            f"{path}: its probe is {folder_head.describe()}, and critic.probe.layers is "
            f"{list(config_head.layers or ())}: set it as the folder has it, or critic.init=policy"
        )
    if replace(folder_head, has_bias=False) != replace(config_head, has_bias=False):
        raise UserError(
            f"{path}: its value head is {folder_head.describe()}, and critic.head is "
            f"{config_head.describe()}: set critic.head as the folder has it; or take the backbone "
            "alone, with a head of weight 0: name the folder as critic.reward_model_path (with "
            "critic.init=reward_model), and set critic.head.start=first_batch or mean_reward"
        )
    adds_bias = critic is not None and critic.ridge is not None and not folder_head.has_bias
    return HeadPlan(
        replace(folder_head, has_bias=folder_head.has_bias or adds_bias), True, adds_bias=adds_bias
    )


def _target_problem(
    folder_head: ValueHead, config_head: ValueHead, critic: CriticConfig | None
) -> str:
    """Return an error's text: the folder's head predicts another target than the config's, and how
    to fix that."""
    start = "first_batch" if config_head.target is None else "mean_reward critic.head.mean_reward=0"
    anew = (
        "name the folder as critic.reward_model_path, with critic.init=reward_model and "
        f"critic.head.start={start}, which takes the backbone alone"
    )
    if critic is not None and critic.kind != "network":
        anew = "set critic.init=policy"
    return (
        f"its value head predicts the {folder_head.target or 'return'}, and critic.target is "
        f"{config_head.target or 'return'}: set critic.target={folder_head.target or 'return'}, or "
        f"{anew}"
    )


def has_classifier(model: PreTrainedConfig) -> bool:
    """Whether a model folder's config describes a sequence classifier, which has a head."""
    return (model.architectures or [""])[0].endswith("ForSequenceClassification")


def saved_head(model: PreTrainedConfig, path: str) -> ValueHead:
    """Return the head that the config.json of a sequence classifier's folder describes.

    Raises: UserError: the head has several labels and no key says what they mean, or that key is
        damaged.
    """
    entry: Any = getattr(model, KEY, None)
    if entry is None:
        if model.num_labels != 1:
            raise UserError(
                f"{path}: the head has {model.num_labels} labels; a reward model or critic has one"
            )
        return ValueHead()
    head = _parse_head(entry)
    if head is None or head.num_outputs != model.num_labels:
        raise UserError(
            f"{path}: {KEY} in config.json does not describe a value head with {model.num_labels} "
            f"outputs: {entry}"
        )
    return head


def _parse_head(entry: Any) -> ValueHead | None:
    """Return the head that an entry of config.json describes; None: the entry is invalid."""
    if not isinstance(entry, Mapping) or not entry.keys() <= {f.name for f in fields(ValueHead)}:
        return None
    try:
        head = ValueHead(**entry)
        if head.kind not in ("scalar", "bounded", "categorical"):
            return None
        if head.num_logprob_columns not in (None, NUM_LOGPROB_COLUMNS):
            return None
        if head.target not in (None, "residual"):
            return None
        if not all(isinstance(layer, int) for layer in head.layers or ()):
            return None
        if head.kind != "scalar":
            head.bias_at(head.within((head.low or 0.0) / 2 + (head.high or 0.0) / 2))
    except (TypeError, ValueError):
        return None
    return head


def head_from_config(model: PreTrainedConfig) -> ValueHead:
    """Return the head that `write_head` wrote into a model's config; without one, a scalar head."""
    entry = getattr(model, KEY, None)
    return ValueHead() if entry is None else ValueHead(**entry)


def write_head(model: PreTrainedConfig, head: ValueHead) -> None:
    """Write a description of the head into a model's config. A plain scalar head needs none."""
    model.num_labels = head.num_outputs
    if head != ValueHead():
        setattr(model, KEY, {k: v for k, v in asdict(head).items() if v is not None})
    elif hasattr(model, KEY):
        delattr(model, KEY)


def distributions(
    value_targets: Float[Tensor, "b T"], critic: CriticConfig
) -> Float[Tensor, "b T K"]:
    """Turn value targets into distributions over the K bins of the run's categorical head."""
    head, bins = critic.head, configured_head(critic)
    assert isinstance(head, CategoricalHead), "a rule: cross-entropy needs a categorical head"
    if head.targets == "two_hot":
        return two_hot_targets(value_targets, bins.centers)
    return hl_gauss_targets(value_targets, **bins.options, sigma_ratio=head.sigma_ratio)
