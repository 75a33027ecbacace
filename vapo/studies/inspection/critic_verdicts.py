"""Verdicts on a critic: the one fault that explains its figures, and notes beside it.

A remark is made only if the whole interval of its figure lies on one side of a threshold.
"""

from __future__ import annotations

from vapo.intervals import MIN_PROMPTS, SHIFTED_ABOVE, quote
from vapo.studies.inspection.figures import CriticFigures
from vapo.studies.inspection.findings import Findings
from vapo.studies.inspection.remarks import Remark, Remarks

CONSTANT_BELOW = 0.02  # sd of the values / that of the returns
UNRELATED_BELOW = 0.15  # correlation of values and returns
LOUD_ABOVE = 0.5  # sd of the values / that of the returns: far too much for unrelated values
LITTLE_BELOW = 0.1  # explained variance
NOISE_ABOVE = 0.02  # values' variance / that of the returns, from which noise does harm
BETWEEN_ABOVE = 0.9  # share of the variance of values, or of rewards, that lies between groups
LATER_ABOVE = 0.5  # share of the tokens that are not their response's first
SOME_ABOVE = 0.05  # explained variance, and that of length: enough to call reading length right
OF_LENGTH_ABOVE = 0.3  # explained variance / share of the returns' variance that length explains
LENGTH_ABOVE = 0.6  # share of the values' variance that position and length explain
ALL_LENGTH_ABOVE = 0.8  # the same share: the critic reads nothing but length
OUTSIDE_ABOVE = 0.02  # share of values that cannot be returns
FLAT_ABOVE, EXTREME_BELOW = 1.6, 0.6  # slope of the returns on the values
LEAKS_ABOVE = 0.1  # correlation of first value and return among the responses to a prompt
SCALE_ABOVE, SCALE_BELOW = 1.4, 0.6  # slope, if values are also shifted or cannot be returns


def main_diagnosis(critic: CriticFigures, findings: Findings) -> Remarks:
    """Yield a remark with the first diagnosis that is certain, or else a text on what is
    uncertain.
    """
    if critic.num_groups < MIN_PROMPTS:
        yield f"what the critic knows: its values are of {critic.num_groups} prompts"
        return
    if critic.spread.high < CONSTANT_BELOW:
        yield Remark(
            "inspect-constant",
            "wrong",
            "The critic is a constant",
            f"Its values hardly move: their standard deviation is {quote(critic.spread)} of the "
            f"returns', around {critic.value_mean:.2f}.",
            "Lower the critic's learning rate and warm it up, train it longer on a fixed policy, "
            "and check that gradients reach it.",
        )
    elif _is_length(critic):
        yield _length_remark(critic)
    elif _is_untrained(critic):
        yield _untrained_remark(critic)
    elif _is_noise(critic):
        yield _little_remark(critic, findings)
    elif _is_prompt_mean(critic, findings):
        yield _prompt_mean_remark(critic)
    elif critic.correlation.low > UNRELATED_BELOW:
        yield from _slope_remark(critic, findings)
    elif critic.correlation.high < -UNRELATED_BELOW:
        yield _wrong_sign_remark(critic)
    elif critic.explained.high < LITTLE_BELOW:
        yield _little_remark(critic, findings)
    else:
        yield (
            f"whether its values have to do with the returns (correlation "
            f"{quote(critic.correlation)}, explained variance {quote(critic.explained)})"
        )


def _is_length(critic: CriticFigures) -> bool:
    """Whether the values depend on token position and response length, and on little else."""
    if critic.by_length.value * critic.spread.value**2 < NOISE_ABOVE:
        return False
    if critic.by_length.low > ALL_LENGTH_ABOVE:
        return True
    reads_length = critic.by_length.low > LENGTH_ABOVE and not _is_untrained(critic)
    return reads_length and critic.explained_beyond_length.high < LITTLE_BELOW


def _is_noise(critic: CriticFigures) -> bool:
    """Whether the values are unrelated to the returns, and predict worse than a constant does."""
    is_unrelated = abs(critic.correlation.value) < UNRELATED_BELOW
    is_unrelated &= critic.correlation.high < 2 * UNRELATED_BELOW
    return is_unrelated and critic.explained.high < 0


def _is_untrained(critic: CriticFigures) -> bool:
    """Whether the values are noise with a standard deviation above half of the returns'."""
    return _is_noise(critic) and critic.spread.low > LOUD_ABOVE


def _is_prompt_mean(critic: CriticFigures, findings: Findings) -> bool:
    """Whether the values depend on the prompt alone, although the response would tell more.

    False if most tokens are the first of their response, where only the prompt is known, or if the
    prompt decides the reward.
    """
    if critic.later_share < LATER_ABOVE or findings.groups.prompt_share.value > BETWEEN_ABOVE:
        return False
    return critic.value_between.low > BETWEEN_ABOVE and critic.explained_within.high < LITTLE_BELOW


def _offset(critic: CriticFigures) -> str:
    if abs(critic.bias.value) <= critic.return_std * SHIFTED_ABOVE:
        return ""
    side = "above" if critic.bias.value > 0 else "below"
    return f", and lie {abs(critic.bias.value):.2f} {side} them on average"


def _untrained_remark(critic: CriticFigures) -> Remark:
    return Remark(
        "inspect-untrained",
        "wrong",
        "A value head that was never trained",
        f"The values have nothing to do with the returns (correlation {quote(critic.correlation)})"
        f", yet their standard deviation is {critic.spread.value:.1f} times the returns'"
        f"{_offset(critic)}. So explained variance is {quote(critic.explained)}, far below a "
        "constant's 0.",
        "Look in the log of loading for a value head that was newly initialized or a checkpoint "
        "whose head has another name; check that the critic's optimizer steps and its loss falls; "
        "then train the critic alone on a fixed policy first.",
    )


def _length_remark(critic: CriticFigures) -> Remark:
    """Return the remark on a critic whose values depend on response length.

    It is a note if the returns depend on length as well and the values explain them; else a fault.
    """
    return_share = critic.return_by_length
    is_right = min(critic.explained.low, return_share.low) > SOME_ABOVE
    is_right &= critic.explained.value > OF_LENGTH_ABOVE * return_share.value
    return Remark(
        "inspect-length",
        "note" if is_right else "wrong",
        f"The critic reads length{', and the rewards depend on it' if is_right else ''}",
        f"Token position and response length alone explain {quote(critic.by_length)} of the "
        f"values' variance and {quote(return_share)} of the returns'. Beyond them the values "
        f"explain {quote(critic.explained_beyond_length)} of the returns. A response's mean value "
        f"correlates with its length by {quote(critic.length_correlation)}, its reward by "
        f"{quote(critic.reward_length_correlation)}.",
        "Advantages of such a critic reward or punish length. Train it longer on a fixed policy, "
        "look for targets that depend on length (a length penalty, lambda below 1 for the critic), "
        "and until then use a policy's lambda so near 1 that the reward reaches every token.",
    )


def _prompt_mean_remark(critic: CriticFigures) -> Remark:
    between = ""
    if critic.explained_between.low > LITTLE_BELOW and critic.explained_between.is_bounded:
        between = f" It tells prompts apart (explained between {quote(critic.explained_between)})."
    return Remark(
        "inspect-prompt-mean",
        "wrong",
        "The critic is the prompt's mean",
        f"{quote(critic.value_between)} of the values' variance lies between prompts, and within a "
        f"prompt the values explain {quote(critic.explained_within)} of the returns: they do not "
        f"react to the response.{between}",
        "The mean reward of the other responses does as well and needs no network. Train longer on "
        "a fixed policy, with Monte-Carlo targets (lambda 1 for the critic), or a larger critic; "
        "else use a method without a critic.",
    )


def _slope_remark(critic: CriticFigures, findings: Findings) -> Remarks:
    """Yield one remark on values that correlate with the returns.

    They are in another scale than the returns, too extreme, too flat, or good.
    """
    slope, numbers = critic.slope, f"slope {quote(critic.slope)}"
    is_biased = _is_shifted(critic)
    is_outside = critic.outside.low > OUTSIDE_ABOVE
    line = f"return = {critic.intercept.value:.2f} + {slope.value:.3g} x value"
    too_wide = slope.high < SCALE_BELOW and (is_outside or is_biased)
    if too_wide or (slope.low > SCALE_ABOVE and is_biased):
        low, high = findings.sums.low, findings.sums.high
        where = ""
        if is_outside:
            where = f", and {quote(critic.outside)} of the values are no possible return"
        yield Remark(
            "inspect-scale",
            "wrong",
            "Values and rewards are in different scales",
            f"The values follow the returns (correlation {quote(critic.correlation)}), but in "
            f"another scale: {line} ({numbers}, 1 is right; bias {quote(critic.bias)}){where}. "
            f"Rewards go from {low:g} to {high:g}, values around {critic.value_mean:.2f} with a "
            f"standard deviation of {critic.value_std:.2f}.",
            "Check that the critic was trained on the rewards that are used now (0 and 1, or -1 "
            "and +1, penalties, a normalisation of returns that is not undone), and that value "
            "normalisation is inverted before advantages are computed.",
        )
    elif slope.high < EXTREME_BELOW:
        yield Remark(
            "inspect-extreme",
            "wrong",
            "The values are too extreme",
            f"Where the values differ by 1 the returns differ by {quote(slope)}: explained "
            f"variance is {quote(critic.explained)}.",
            "The critic has memorized its rollouts: lower its learning rate or epochs, use more "
            "rollouts per iteration.",
        )
    elif slope.low > FLAT_ABOVE:
        yield Remark(
            "inspect-flat",
            "wrong",
            "The values are flattened",
            f"The values move too little: where they differ by 1 the returns differ by "
            f"{quote(slope)}. They are right on average, so this is no shift.",
            "Train the critic longer, with Monte-Carlo targets (lambda 1 for the critic); "
            "advantages are too small by this factor.",
        )
    else:
        yield _good_remark(critic)


def _wrong_sign_remark(critic: CriticFigures) -> Remark:
    return Remark(
        "inspect-scale",
        "wrong",
        "The values have the wrong sign",
        f"Where they are high the returns are low: correlation {quote(critic.correlation)}, slope "
        f"{quote(critic.slope)}, explained variance {quote(critic.explained)}.",
        "Check whether the critic learned costs or penalties, and whether a sign is lost where "
        "rewards or values are written.",
    )


def _good_remark(critic: CriticFigures) -> Remark:
    parts = [f"explained variance {quote(critic.explained)}"]
    if critic.explained_between.is_bounded:
        parts.append(f"between prompts {quote(critic.explained_between)}")
    if critic.explained_within.is_bounded:
        parts.append(f"between the responses to a prompt {quote(critic.explained_within)}")
    return Remark(
        "inspect-follows",
        "good",
        "The critic follows the returns",
        f"{', '.join(parts).capitalize()}; slope {quote(critic.slope)}, where 1 is calibrated.",
    )


def _little_remark(critic: CriticFigures, findings: Findings) -> Remark:
    """Return the remark on a critic that explains little or nothing of the returns.

    It is a fault if the prompts decide much of the rewards, or if explained variance is clearly
    below 0; else a note.
    """
    share, could = findings.groups.prompt_share, ""
    if not share.is_unknown:
        could = f" The prompt alone decides {quote(share)} of the rewards' variance."
    is_noise = critic.explained.high < -NOISE_ABOVE
    return Remark(
        "inspect-little",
        "wrong" if is_noise or share.low > 2 * LITTLE_BELOW else "note",
        f"The critic knows {'nothing' if _is_noise(critic) else 'little'} of the returns (yet)",
        f"Explained variance is {quote(critic.explained)}, where a constant has 0; correlation "
        f"{quote(critic.correlation)}. The values' standard deviation is {quote(critic.spread)} of "
        f"the returns'{_offset(critic)}.{could}",
        "A value head before its training is like this: check that the trained one was loaded, and "
        "that the critic's loss falls. If prompts decide much, it is undertrained: train it longer "
        "on a fixed policy. If they do not, returns may hardly be predictable, and a constant is a "
        "fair baseline: compare with the truth by continuations (--value_truth).",
    )


def _is_shifted(critic: CriticFigures) -> bool:
    margin = SHIFTED_ABOVE * critic.return_std
    return critic.bias.low > margin or critic.bias.high < -margin


def shift_remark(critic: CriticFigures, diagnosis: list[Remark | str]) -> Remarks:
    """Yield a remark if all values are too high or too low by a constant.

    Nothing is yielded if a fault in `diagnosis` explains the shift.
    """
    remarks = [item for item in diagnosis if isinstance(item, Remark)]
    faults = {remark.anchor for remark in remarks if remark.severity == "wrong"}
    if faults & {"inspect-untrained", "inspect-scale", "inspect-little"}:
        return
    if _is_shifted(critic):
        side = "high" if critic.bias.value > 0 else "low"
        yield Remark(
            "inspect-shifted",
            "wrong",
            f"The values are too {side}",
            f"By {abs(critic.bias.value):.2f} on average (bias {quote(critic.bias)}, returns have "
            f"a standard deviation of {critic.return_std:.2f}). Explained variance does not count "
            f"a shift; with it, it would be {critic.explained_unshifted.value:.2f}.",
            "The first tokens' advantages are wrong by the shift. The policy has moved on since "
            "the critic learned, or its targets are made of its own values: more critic steps, "
            "lambda 1 for the critic, or value pretraining.",
        )


def leak_remark(critic: CriticFigures) -> Remarks:
    """Yield a remark if the values before the first token know how their response ends.

    All responses to a prompt have the same state there, so a critic gives them the same value.
    """
    if critic.start_correlation.low > LEAKS_ABOVE:
        yield Remark(
            "inspect-leak",
            "wrong",
            "The first values know the reward",
            "Before the first token all responses to a prompt are alike, but the file's values "
            f"differ there, and their correlation with the return is "
            f"{quote(critic.start_correlation)}. No critic can know that.",
            "Values that contain the reward, the answer or later tokens make advantages of noise: "
            "check that the file has the critic's outputs, not returns or advantages, and that the "
            "critic's attention is causal.",
        )


def siblings_remark(critic: CriticFigures, diagnosis: list[Remark | str]) -> Remarks:
    """Yield a note if a good critic predicts less than the mean reward of the other responses does.

    Args:
        diagnosis: what `main_diagnosis` yielded.
    """
    is_good = any(isinstance(item, Remark) and item.severity == "good" for item in diagnosis)
    if is_good and critic.siblings_ahead.low > 0:
        yield Remark(
            "inspect-siblings",
            "note",
            "The mean of the other responses predicts better",
            f"Over the same tokens it explains {quote(critic.siblings_ahead)} of the returns more "
            f"than the critic (explained variance {quote(critic.explained)}).",
            "A method without a critic subtracts that mean. The critic is worth its cost only "
            "where it sees single steps: see explained variance within prompts.",
        )
