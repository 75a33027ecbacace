"""Rules that decide from measured figures which effects of the paper's ablation a setting can
show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vapo.intervals import interval_text, t_interval

Word = Literal["can show", "cannot show", "open"]
Condition = tuple[bool | None, str]  # whether it holds (None: unknown), and its figures as text

MAX_FIRST_TOKEN_WEIGHT = 1e-2
MAX_HORIZON_SHARE = 0.1
MIN_WEIGHT_FACTOR = 10.0
MIN_HORIZON_FACTOR = 2.0
MIN_CLIP_FRACTION = 0.01
MIN_LENGTH_VARIATION = 0.2
RIGHT_SHARE = (0.05, 0.8)
MIN_EXPLAINED_VARIANCE = 0.3


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval. Limits that cannot be estimated are -inf and inf."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return interval_text(self.mean, (self.low, self.high), ".3f")


@dataclass(frozen=True)
class GateFigures:
    """The figures that `vapo gates` measures and the rules read.

    Values and explained variances are measured on held-out responses of the start policy, values at
    the middle token. The last fields describe the first policy iterations of a run.

    Attributes:
        mean_reward, mean_length: of the held-out responses.
        start_length: the mean length of the start policy's training responses.
        guess: the mean reward of responses that are made to answer at their middle; None without
            --answer_now.
        value_start, explained_variance_start: of the critic before it is trained.
        value_pretrained, explained_variance_pretrained: after value pretraining; None if it is off.
        explained_variance_oracle: of the true values; None without hidden states.
        num_iterations: the most iterations of a trial run.
        unlearned_after: the iterations until the critic's value is above the guess's mean; None if
            it stays below.
        unlearned_between: the iterations until it is above each limit of the guess's interval.
        collapsed_after: the iterations until responses are half as long; None if they stay longer.
        weight_adaptive, weight_constant: the reward's weight at the first token, with the
            length-adaptive lambda and with `algorithm.lambda_policy`; means over responses.
        horizon_adaptive, horizon_constant: 1 / (1 - lambda) with either lambda, in tokens.
        clip_fraction_high: the share of tokens that are clipped at the upper bound.
        share_right: the share of responses that are right.
        length_variation: the coefficient of variation of response lengths.
        share_returned: the share of groups whose prompt had another group before.
        prompt_visits: how often the whole run takes each training prompt.
    """

    mean_reward: float
    mean_length: float
    start_length: float
    guess: Interval | None
    value_start: float
    value_pretrained: float | None
    explained_variance_start: float
    explained_variance_pretrained: float | None
    explained_variance_oracle: float | None
    num_iterations: int
    unlearned_after: int | None
    unlearned_between: tuple[int | None, int | None]
    collapsed_after: int | None
    weight_adaptive: float
    weight_constant: float
    horizon_adaptive: float
    horizon_constant: float
    clip_fraction_high: float
    share_right: float
    length_variation: float
    share_returned: float
    prompt_visits: float

    def iterations_text(self, iterations: int | None) -> str:
        """Return a number of iterations as text, or `> N` for None: more than the trial runs' N."""
        return f"> {self.num_iterations}" if iterations is None else str(iterations)


@dataclass(frozen=True)
class GateCurves:
    """Curves by iteration. The first point of each is before the first update.

    Attributes:
        explained_variance: of the critic in value pretraining.
        value_pretraining: the critic's value at the middle token in value pretraining.
        value_unlearning: that value while the critic alone is trained; empty without a guess.
        response_length: the mean length while the policy alone is trained.
    """

    explained_variance: tuple[float, ...]
    value_pretraining: tuple[float, ...]
    value_unlearning: tuple[float, ...]
    response_length: tuple[float, ...]


@dataclass(frozen=True)
class Gate:
    """A verdict of `vapo gates`: whether runs of its config can show the effect of one component.

    Attributes:
        component: a part of VAPO that the paper's ablation switches off, such as `clip-higher`, or
            a comparison, such as `vanilla PPO`.
        word: the verdict; it is `open` if the measured figures do not decide.
        reasons: the measured figures that decide it, as text.
    """

    component: str
    word: Word
    reasons: tuple[str, ...]


def clustered_interval(prompt_means: Sequence[float]) -> Interval:
    """Return the mean of the prompts' means with Student's 95 % interval over the prompts.

    The responses to one prompt are not independent, so the sample is the prompts. With fewer than 4
    prompts the interval is unbounded. Source: Miller 2024 (arXiv 2411.00640).
    """
    num = len(prompt_means)
    mean = sum(prompt_means) / num
    variance = sum((x - mean) ** 2 for x in prompt_means) / max(num - 1, 1)
    return Interval(mean, *t_interval(mean, math.sqrt(variance / num), num))


def judge(figures: GateFigures) -> list[Gate]:
    """Return a verdict for each component of VAPO, for vanilla PPO and for having a critic at all.

    The verdict says whether runs of the measured config can show the component's effect. It follows
    from one or more conditions. If one does not hold, they cannot; else if one is unknown, the
    verdict is open; else they can.

    **Value pretraining** and **vanilla PPO**: without a pretrained critic the policy collapses
    to short responses. It needs all four of these conditions:
    - the reward's weight at the first token is below 1e-2: above it the reward itself corrects
      early tokens within some hundred updates, and a critic however wrong is only a baseline. The
      paper's alpha of 0.05 gives 2e-9, the constant 0.95 on 100 tokens 6e-3.
    - the critic begins with less at the middle of a response than answering there is worth: then
      answering has a positive advantage, and stopping is reinforced.
    - answering there is worth less than going on: else shorter responses are not a collapse.
    - the policy collapses no later than the critic has unlearned: else the bias is gone in time.
      Up to twice as late it is open: in a run both move at once. It is open, too, where the
      limits of the guess's interval decide differently.

    **Decoupled GAE**: a shared constant lambda carries the truth 1/(1 - lambda) tokens a sweep.
    With less than a tenth of the response ten sweeps and more are needed, and early tokens stay
    biased; with more the shared lambda sees the end directly.

    **Length-adaptive GAE**: it has to change the weight at the first token by a factor of 10, or
    the horizon by a factor of 2 (the paper's horizon goes from 20 to between 45 and 320 tokens).

    **Clip-higher**: the upper bound acts on the tokens that are clipped there, so at 1 % of them
    and less no score can tell the bounds apart.

    **Token-level loss**: responses of one length have the same weight in either loss. With a
    coefficient of variation of 0.2 a token's weight differs by a fifth, about the least to see.

    **LM loss on right responses**: below 5 % right there is nothing to imitate in most
    minibatches, and above 80 % the policy gradient has hardly anything left to be helped with.

    **Group sampling**: more prompts with fewer responses each cost the same, so groups can only
    pay where prompts come back, which new ones would not.

    **A critic against groups** (GRPO, DAPO): a critic takes away the noise of what follows a
    decision; with an explained variance under 0.3 it leaves most of it, and a group's mean, which
    knows the prompt, does as well.
    """
    collapse = _collapse_conditions(figures)
    single_conditions = _single_conditions(figures).items()
    return [
        _gate("value pretraining", [_weight(figures.weight_adaptive, "adaptive"), *collapse]),
        _gate("vanilla PPO", [_weight(figures.weight_constant, "constant"), *collapse]),
        *(_gate(component, [condition]) for component, condition in single_conditions),
    ]


def _gate(component: str, conditions: Sequence[Condition]) -> Gate:
    """Make the verdict on a component from its conditions, each with its figures as text.

    It is `cannot show` if a condition fails, else `open` if one is unknown, else `can show`. Its
    reasons are the texts of the conditions that decide: the failed ones, else the unknown ones,
    else all.
    """
    kinds = {holds for holds, _ in conditions}
    kind = False if False in kinds else None if None in kinds else True
    words: dict[bool | None, Word] = {False: "cannot show", None: "open", True: "can show"}
    return Gate(component, words[kind], tuple(text for holds, text in conditions if holds is kind))


def _weight(weight: float, kind: str) -> Condition:
    holds = weight < MAX_FIRST_TOKEN_WEIGHT
    return holds, (
        f"the reward's mean weight at the first token ({kind} lambda) is {weight:.2g}, "
        f"{'below' if holds else 'not below'} {MAX_FIRST_TOKEN_WEIGHT:g}"
    )


def _collapse_conditions(figures: GateFigures) -> list[Condition]:
    guess, start, going_on = figures.guess, figures.value_start, figures.mean_reward
    if guess is None:
        unknown = "the value of a guess is not known: give what ends a response as --answer_now"
        return [(None, unknown)]
    worth = f"a guess's {guess}"
    sides = {True: "below", False: "above", None: "within the interval of"}
    lower, upper = _is_below(start, guess), _is_below(going_on, guess)
    pays = None if upper is None else not upper
    below, above = "" if lower else " (below it needed)", "" if pays else " (above it needed)"
    return [
        (lower, f"the critic's start gives the middle {start:.3f}, {sides[lower]} {worth}{below}"),
        (pays, f"going on is worth {going_on:.3f}, {sides[upper]} {worth}{above}"),
        _race(figures),
    ]


def _is_below(value: float, interval: Interval) -> bool | None:
    """Whether a value is below an interval. None if it lies in the interval or is NaN."""
    if math.isnan(value) or interval.low <= value <= interval.high:
        return None
    return value < interval.low


def _race(figures: GateFigures) -> Condition:
    collapse, (earliest, latest) = figures.collapsed_after, figures.unlearned_between
    text = (
        f"T_collapse {figures.iterations_text(collapse)} iterations, "
        f"T_unlearn {figures.iterations_text(figures.unlearned_after)} "
        f"[{figures.iterations_text(earliest)}, {figures.iterations_text(latest)}] iterations"
    )
    if collapse is None and figures.unlearned_after is None:
        return None, f"{text}: give --num_iterations more"
    first, second = _collapses_in_time(collapse, earliest), _collapses_in_time(collapse, latest)
    holds = first if first is second else None
    rule = (
        " (the policy has to collapse no later than the critic has unlearned; up to twice as late "
        "is open)"
    )
    return holds, text if holds else text + rule


def _collapses_in_time(collapse: int | None, unlearn: int | None) -> bool | None:
    """Whether the policy collapses no later than the critic unlearns. False if over twice as late.

    None if it is between the two, or if neither happened. What never happened (None) counts as
    later.

    Args:
        collapse: the iterations until the policy collapsed.
        unlearn: the iterations until the critic unlearned.
    """
    if collapse is None or unlearn is None:
        return None if collapse is unlearn else unlearn is None
    return None if unlearn < collapse <= 2 * unlearn else collapse <= unlearn


def _single_conditions(f: GateFigures) -> dict[str, Condition]:
    """Return what the figures say of each component whose verdict takes a single comparison.

    The keys are the components' names, such as `clip-higher`. A value is a pair: whether the
    measured figures are within the limits where the component's effect can show, or None if that is
    unknown, and the figures as text. `judge` explains the limits.
    """
    has_short_horizon = f.horizon_constant < MAX_HORIZON_SHARE * f.mean_length
    weights = _factor(f.weight_adaptive, f.weight_constant)
    horizons = _factor(f.horizon_adaptive, f.horizon_constant)
    adapts = weights >= MIN_WEIGHT_FACTOR or horizons >= MIN_HORIZON_FACTOR
    factors = (
        f" (a factor of {MIN_WEIGHT_FACTOR:g} in the weight, or of {MIN_HORIZON_FACTOR:g} in the "
        "horizon, needed)"
    )
    knowledge: Condition = (
        None,
        "value pretraining is off: components.value_pretraining.enabled=true measures",
    )
    if (explained := f.explained_variance_pretrained) is not None:
        best = f.explained_variance_oracle
        oracle_text = "" if best is None else f", an oracle's {best:.3f}"
        knowledge = (
            None if math.isnan(explained) else explained >= MIN_EXPLAINED_VARIANCE,
            f"explained variance after pretraining {explained:.3f}{oracle_text} (0.3 needed)",
        )
    return {
        "decoupled GAE": (
            has_short_horizon,
            f"the constant lambda sees {f.horizon_constant:.4g} tokens ahead, "
            f"{'below' if has_short_horizon else 'not below'} a tenth of the mean length, "
            f"{f.mean_length:.1f}",
        ),
        "length-adaptive GAE": (
            adapts,
            f"adaptive against constant lambda: weight at the first token {f.weight_adaptive:.2g} "
            f"and {f.weight_constant:.2g}, horizon {f.horizon_adaptive:.4g} and "
            f"{f.horizon_constant:.4g} tokens{'' if adapts else factors}",
        ),
        "clip-higher": (
            None if math.isnan(f.clip_fraction_high) else f.clip_fraction_high > MIN_CLIP_FRACTION,
            f"{100 * f.clip_fraction_high:.2f} % of the tokens are clipped above (1 % needed)",
        ),
        "token-level loss": (
            f.length_variation > MIN_LENGTH_VARIATION,
            f"response lengths have a coefficient of variation of {f.length_variation:.2f} "
            "(0.2 needed)",
        ),
        "LM loss on right responses": (
            RIGHT_SHARE[0] <= f.share_right <= RIGHT_SHARE[1],
            f"{100 * f.share_right:.1f} % of the responses are right (5 to 80 % needed)",
        ),
        "group sampling": (
            f.prompt_visits > 1,
            f"a training prompt is visited {f.prompt_visits:.2f} times in the run (more than once "
            "needed)",
        ),
        "critic against groups": knowledge,
    }


def _factor(a: float, b: float) -> float:
    """Return the larger of two numbers divided by the smaller. Both are at least 0."""
    small, large = sorted((a, b))
    if small == large:
        return 1.0
    return large / small if small > 0 else math.inf
