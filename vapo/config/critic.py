"""The block `critic`: where the value model starts, its head, loss, targets and schedule.

The options are independent of each other; `critic_rules` refuses the pairs that contradict one
another. The defaults are VAPO's. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from omegaconf import MISSING

from vapo.config.kinds import FOLDER_DOC, choice, kind_options, make, option, section
from vapo.config.networks import LoraConfig, OptimizerConfig
from vapo.config.rewards import REWARD_RANGE


@dataclass
class BoundedHead:
    """Options of a head whose values lie between two bounds (BPCO).

    V = low + (high - low) (1/2 + atan(z) / pi), where z is the output of a linear layer.
    """

    low: float = option(-1.0, "the least value; at most the least value target", **REWARD_RANGE)
    high: float = option(
        1.0, "the largest value; at least the largest value target", **REWARD_RANGE
    )


@dataclass
class CategoricalHead:
    """Options of a head with logits over bins, whose expectation is the value (HL-Gauss)."""

    low: float = option(
        -1.1, "the support's lower end, somewhat below the least value target", **REWARD_RANGE
    )
    high: float = option(
        1.1, "the support's upper end, somewhat above the largest value target", **REWARD_RANGE
    )
    num_bins: int = option(101, "logits of the head", ge=2)
    support: Literal["midpoint", "inclusive"] = option(
        "midpoint", "bin centers: midpoints of equal bins, or points from low to high inclusive"
    )
    targets: Literal["hl_gauss", "two_hot"] = option(
        "hl_gauss", "a value target as a distribution: Gaussian over bins, or its two neighbours"
    )
    sigma_ratio: float = option(0.75, "hl_gauss: the Gaussian's sigma in bin widths", gt=0)


@dataclass
class GivenMeanReward:
    mean_reward: float = option(
        MISSING, "the value of every state before the first update", **REWARD_RANGE
    )


@dataclass
class HeadConfig:
    kind: Literal["scalar", "bounded", "categorical"] = choice(
        "scalar",
        "what the critic's head computes; bounded and categorical: docs/critic_options.md",
        bounded=BoundedHead,
        categorical=CategoricalHead,
    )
    start: Literal["as_loaded", "mean_reward", "first_batch"] = choice(
        "as_loaded",
        "the head before the first update: as_loaded; or weight 0 and a bias at a given mean "
        "reward, or at the mean reward of the first rollout batch",
        mean_reward=GivenMeanReward,
    )


def as_loaded(head: HeadConfig) -> HeadConfig:
    """Return a copy of a head's options with `start` as_loaded, so that its weights are not
    replaced.
    """
    loaded_head: HeadConfig = make(HeadConfig, **kind_options(head, "kind"))
    return loaded_head


@dataclass
class PrivilegedPrompt:
    """The option of critic.prompt.kind privileged: what the critic reads as the prompt."""

    template: str = option(
        MISSING,
        "text with {prompt}, {answer} and any {column} of the row; the policy never sees it",
    )


@dataclass
class CriticPromptConfig:
    kind: Literal["policy", "privileged"] = choice(
        "policy",
        "the prompt that the critic reads: the policy's own, or one with more in it",
        privileged=PrivilegedPrompt,
    )


@dataclass
class SampledLogprobs:
    """Options of ten more inputs of the critic's head, made of the sampled tokens' log-probs."""

    lr: float = option(
        1e-2, "learning rate of the columns' own weights, which start at 0 and are few", gt=0
    )


@dataclass
class RidgeConfig:
    """Options of a ridge regression that sets a linear head's weights from the last batches."""

    penalty: float = option(
        1e-3,
        "shrinks the weights: added to the diagonal of the correlations between what the head "
        "reads, so it depends neither on scales nor on the number of tokens",
        ge=1e-8,
    )
    window_batches: int = option(
        4, "rollout batches that the regression is on, the newest among them", ge=1
    )


@dataclass
class ProbeConfig:
    layers: list[int] = option(
        [-1],
        "whose states the head reads, one after another: 0 is the embedding, n the n-th decoder "
        "layer, -1 the last one, after the model's last norm; each once",
    )
    hidden_size: int | None = option(
        None, "units of a hidden layer before the head; null: the head is linear", ge=1
    )
    lr: float = option(
        1e-2,
        "learning rate, in place of critic.optimizer.lr and components.value_pretraining.lr, which "
        "are a network's",
        gt=0,
    )


@dataclass
class ProbeCritic:
    """Options of critic.kind probe: a value head on the actor's hidden states.

    Its gradients do not reach the actor.
    """

    probe: ProbeConfig = section(ProbeConfig, "what the head reads of the actor")


@dataclass
class CriticConfig:
    kind: Literal["network", "probe", "adapters"] = choice(
        "network",
        "a network of its own; a head on the actor's hidden states, which costs next to nothing; "
        "or adapters (critic.lora) and a head on the actor's frozen base "
        "(docs/critics_without_a_network.md)",
        probe=ProbeCritic,
    )
    init: str = option(
        "reward_model",
        "where the critic starts: `reward_model` (paper), `policy` (backbone of actor.path, "
        "zero value head), or the folder of a saved critic",
    )
    reward_model_path: str | None = option(
        None, "Hugging Face folder of the reward model, read when init is `reward_model`"
    )
    layers: int | None = option(
        None,
        "the first so many decoder layers of the folder are the critic's, which makes it cheaper; "
        "null: all",
        ge=1,
    )
    head_function: str | None = option(
        None,
        "your own value head, as package.module:function or folder/file.py:function, which is "
        "called with hidden_size and returns the module (docs/extending.md); null: one linear "
        "layer",
    )
    head_function_folder: str | None = option(None, FOLDER_DOC)
    optimizer: OptimizerConfig = section(
        lambda: OptimizerConfig(lr=2e-6),
        "the critic's optimizer; it must keep pace with the policy",
    )
    lora: LoraConfig | None = option(
        None,
        "train low-rank adapters and the head instead of all weights; null: off; critic.kind "
        "adapters: those on the actor's base",
    )
    frozen: list[str] = option(
        [], "parameters whose names contain one of these texts are not trained, as self_attn."
    )
    head: HeadConfig = section(HeadConfig, "the critic's head")
    sampled_logprobs: SampledLogprobs | None = option(
        None,
        "the head reads how likely the response's earlier tokens were when they were sampled, too "
        "(docs/critic_options.md); null: off",
    )
    ridge: RidgeConfig | None = option(
        None,
        "a probe's head, or beside a network the weights of critic.sampled_logprobs and the "
        "head's bias, are a ridge regression that is refitted in each iteration, in place of "
        "optimizer steps (docs/critic_options.md); null: off",
    )
    target: Literal["return", "residual"] = option(
        "return",
        "what the critic predicts; residual: what is left of the return after the mean reward of "
        "the prompt's other responses, which the value has added again (docs/critic_training.md)",
    )
    loss: Literal["squared_error", "cross_entropy"] = option(
        "squared_error",
        "of the value (half the squared error), or of the categorical head's distribution",
    )
    value_clip: float | None = option(
        None, "clip value updates to this range; null: off (paper: not stated)", gt=0
    )
    weights: Literal["none", "prompt_noise"] = option(
        "none",
        "of the responses in the value loss; prompt_noise: one over the spread of the prompt's "
        "returns (EasyPPO)",
    )
    anchors: list[float] = option(
        [],
        "the policy phase's value loss is on these places of each response alone, as shares of its "
        "length (SP3O: 0.3, 0.6, 0.9); empty: on every token",
    )
    late_anchor: float | None = option(
        None, "one more anchor in responses of late_anchor_tokens or more; null: none", ge=0, le=1
    )
    late_anchor_tokens: int = option(6144, "from this length on there is a late anchor", ge=1)
    reward: Literal["shaped", "unshaped"] = option(
        "shaped",
        "the reward in the value targets: with rewards.overlong.soft_punishment, or without it",
    )
    truncated: Literal["as_policy", "train", "leave_out"] = option(
        "as_policy",
        "whether truncated responses carry value loss; as_policy: unless "
        "rewards.overlong.filter_truncated takes them from the policy's",
    )
    bootstrap_truncated: bool = option(
        False, "the value after a truncated response is that of its last token, not 0 (T-PPO)"
    )
    epochs: int = option(1, "passes over the rollout batch in each iteration", ge=1)
    minibatch_size: int | None = option(
        None, "responses per optimizer step of the critic; null: training.minibatch_size", ge=1
    )
    num_minibatches: int | None = option(
        None,
        "optimizer steps of the critic in a pass, in place of minibatch_size (EasyPPO: 4); null: "
        "minibatch_size decides",
        ge=1,
    )
    prompt: CriticPromptConfig = section(
        CriticPromptConfig, "what the critic reads before the response"
    )
    count: int = option(
        1, "critics on disjoint prompts, whose mean is the value and whose spread is logged", ge=1
    )
    dtype: Literal["float32", "bfloat16"] = option("float32", "parameter dtype")
    gradient_checkpointing: bool | Literal["auto"] = option(
        False,
        "recompute activations in the backward; auto: only where the memory of one GPU is too "
        "small for them; elsewhere they are recomputed",
    )
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] = option(
        "auto", "attention kernel; auto takes what transformers chooses, or eager for capped scores"
    )

    @property
    def reads_actor(self) -> bool:
        """Whether the critic reads the actor's hidden states instead of tokens."""
        return isinstance(self, ProbeCritic)


_TOLERANCE = 1e-6  # of a range's width, for sums of rounded numbers


class ValueRange(NamedTuple):
    """The lowest and the highest value target that a critic's head can learn."""

    low: float
    high: float

    def holds(self, low: float, high: float) -> bool:
        slack = _TOLERANCE * (self.high - self.low)
        return self.low - slack <= low and high <= self.high + slack


def value_range(critic: CriticConfig) -> ValueRange | None:
    """Return the lowest and highest value target that the critic's head can learn.

    The result is None for a scalar head, which has no limits. For a bounded head, and for HL-Gauss
    targets, these are `low` and `high`. For any other categorical head (two-hot targets, or a loss
    on the expectation) they are the centers of the outer bins.
    """
    head = critic.head
    if isinstance(head, BoundedHead):
        return ValueRange(head.low, head.high)
    if not isinstance(head, CategoricalHead):
        return None
    smears = critic.loss == "cross_entropy" and head.targets == "hl_gauss"
    return ValueRange(head.low, head.high) if smears else centers_of_bins(head)


def centers_of_bins(head: CategoricalHead) -> ValueRange:
    inset = 0.0 if head.support == "inclusive" else (head.high - head.low) / head.num_bins / 2
    return ValueRange(head.low + inset, head.high - inset)
