"""The verdict in words: sentences on what a critic knows, decided by the figures' intervals.

A sentence is part of the verdict if the whole interval of its figure lies on one side of a
threshold. If the interval contains the threshold, the question is listed at the end instead: there
are too few continuations to decide it. docs/value_page.md explains the thresholds and has a row of
its table for every sentence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from vapo.diagnostics.value_truth.figures import TruthFigures
from vapo.intervals import SHIFTED_ABOVE, Figure, quote

EXPLAINS_MUCH = 0.5  # share of the truth's variance above which the critic follows it
EXPLAINS_LITTLE = 0.1  # share of the truth's variance below which the critic does not know it
FLAT_BELOW = 0.25  # spread of the values within a response / that of the truth
DAMPED_BELOW = 0.8  # that ratio, below which the values move less than the truth
EXTREME_ABOVE = 1.25  # that ratio, above which the values move more than the truth
IN_ORDER_ABOVE = 0.5  # share of pairs of steps in the truth's order that chance gives
BARELY_IN_ORDER_BELOW = 0.65  # that share, below which it is hardly better than chance
NAMES_ABOVE = 0.5  # share of responses whose first mistake the critic names
MISTAKES_NEEDED = 6  # responses with a mistake; with fewer the verdict on mistakes stays open

TRUTH_ROWS = {
    "truth-follows": "the verdict: follows the truth",
    "truth-in-part": "the verdict: follows the truth in part",
    "truth-flat": "the verdict: does not see what happens within a response",
    "truth-prompt-only": "the verdict: tells prompts apart and sees no mistakes",
    "truth-nothing": "the verdict: knows nothing",
    "truth-extreme": "the verdict: too extreme",
    "truth-noisy": "the verdict: moves, but not with the truth",
    "truth-shifted": "the verdict: too high or too low on average",
    "truth-centred": "the verdict: right on average",
    "truth-baseline-better": "the verdict: nearer to the truth than the other responses' mean",
    "truth-baseline-worse": "the verdict: further from the truth than the other responses' mean",
    "truth-mistakes-named": "the verdict: names the first mistake",
    "truth-mistakes-missed": "the verdict: does not name the first mistake",
    "truth-too-few": "the verdict: not enough continuations to say",
    "truth-no-critic": "the verdict: there is no critic",
}
"""Anchor -> the first words of its row in the table "When value training fails"."""


class Sentence(NamedTuple):
    """A sentence of the verdict. `anchor` leads to its row in docs/value_page.md."""

    text: str
    anchor: str

    @property
    def row(self) -> str:
        """Return the name of the documentation's row that explains the sentence.

        It takes the place of a link, because a page that is opened offline cannot link anywhere.
        """
        return f'docs/value_page.md, "When value training fails", row "{TRUTH_ROWS[self.anchor]}"'


Sentences = Iterator[Sentence | str]  # a str is a question that the intervals leave open


def verdict(figures: TruthFigures) -> list[Sentence]:
    """Return at least one sentence on what the critic knows, the most important first.

    If the intervals are too wide for some questions, the last sentence lists these. Without a
    critic the only sentence says so.
    """
    if figures.mse.is_unknown and figures.bias.is_unknown:
        text = "There is no critic here: only the true values are shown."
        return [Sentence(text, "truth-no-critic")]
    statements = [
        *_what_it_knows(figures),
        *_on_average(figures),
        *_beside_the_baseline(figures),
        *_on_mistakes(figures),
    ]
    sentences = [sentence for sentence in statements if isinstance(sentence, Sentence)]
    undecided = [question for question in statements if isinstance(question, str)]
    if undecided:
        text = f"Not enough continuations to say {'; '.join(undecided)}."
        sentences.append(Sentence(text, "truth-too-few"))
    return sentences


def _explains(figure: Figure) -> Literal["much", "in part", "little"] | None:
    """Return how much of the variance a figure explains; None if its interval contains a
    threshold.
    """
    if figure.low > EXPLAINS_MUCH:
        return "much"
    if figure.high < EXPLAINS_LITTLE:
        return "little"
    return "in part" if figure.low > EXPLAINS_LITTLE else None


def _what_it_knows(figures: TruthFigures) -> Sentences:
    """Yield sentences, or open questions, on what the critic knows of prompts and of steps."""
    flattening, within = figures.flattening, figures.explained_within
    if flattening.is_unknown and within.is_unknown:
        yield from _of_all_prefixes(figures)
        return
    critic, between = "The critic", f"explained between {quote(figures.explained_between)}"
    if (prompts := _explains(figures.explained_between)) is not None:
        tells = "does not tell" if prompts == "little" else "tells"
        apart = "apart in part" if prompts == "in part" else "apart"
        critic += f" {tells} prompts {apart} ({between}) and"
    elif not figures.explained_between.is_unknown:
        yield f"whether the critic tells prompts apart ({between})"
    numbers = f"flattening {quote(flattening)}, explained within {quote(within)}"
    order, steps = figures.rank_agreement, _explains(within)
    is_extreme = flattening.low > EXTREME_ABOVE and not order.high < BARELY_IN_ORDER_BELOW
    if flattening.high < FLAT_BELOW or (steps == "little" and not is_extreme):
        yield _blind(figures, critic, numbers)
    elif is_extreme:  # another figure decides whether the values move with the truth
        sees = within.low > 0 or order.low > IN_ORDER_ABOVE
        if not sees:
            yield f"whether its values move with the truth (rank agreement {quote(order)})"
        yield Sentence(
            f"{critic} {'sees what happens within a response but ' if sees else ''}is too extreme: "
            f"its values move {flattening.value:.1f} times as much as the truth ({numbers}).",
            "truth-extreme",
        )
    elif steps == "much":
        is_damped = flattening.high < DAMPED_BELOW
        yield Sentence(
            f"{critic} follows the truth within a response"
            f"{' but moves less than it' if is_damped else ''} ({numbers}).",
            "truth-in-part" if is_damped else "truth-follows",
        )
    elif steps == "in part":
        text = f"{critic} follows the truth within a response in part ({numbers})."
        yield Sentence(text, "truth-in-part")
    else:
        yield f"whether the critic sees what happens within a response ({numbers})"


def _blind(figures: TruthFigures, critic: str, numbers: str) -> Sentence:
    """Return the sentence on a critic whose values do not follow a response's steps.

    They stand still, or are noise.

    Args:
        critic: how the sentence begins.
        numbers: the figures for the sentence.
    """
    prompts = _explains(figures.explained_between)
    if prompts == "little":
        return Sentence(
            "The critic knows nothing: it does not tell prompts apart (explained between "
            f"{quote(figures.explained_between)}) and does not see mistakes within a response "
            f"({numbers}).",
            "truth-nothing",
        )
    if figures.flattening.low > FLAT_BELOW:
        return Sentence(
            f"{critic} moves within a response, but not with the truth: a value that stood still "
            f"would be about as near or nearer to it ({numbers}).",
            "truth-noisy",
        )
    knows_prompts = prompts == "much"
    return Sentence(
        f"{critic} does not see {'mistakes' if knows_prompts else 'what happens'} within a "
        f"response: its values hardly move with the truth there ({numbers}).",
        "truth-prompt-only" if knows_prompts else "truth-flat",
    )


def _of_all_prefixes(figures: TruthFigures) -> Sentences:
    """Yield a sentence or an open question on what the critic knows of prompts and steps together.

    It stands for the figures within responses, if they are unknown: no response was continued from
    every step, or the true values within responses do not move beyond the noise.
    """
    if figures.num_responses > 0:
        yield (
            "whether the critic sees mistakes: the truth within a response does not change beyond "
            f"the continuations' noise (variance {quote(figures.within_variance)})"
        )
    knows, numbers = _explains(figures.explained), f"explained {quote(figures.explained)}"
    if knows is not None:
        text, anchor = {
            "much": ("follows the truth over all prefixes", "truth-follows"),
            "in part": ("follows the truth over all prefixes in part", "truth-in-part"),
            "little": ("knows nothing of the truth over all prefixes", "truth-nothing"),
        }[knows]
        yield Sentence(f"The critic {text} ({numbers}).", anchor)
    elif not figures.explained.is_unknown:
        yield f"whether the critic follows the truth ({numbers})"


def _on_average(figures: TruthFigures) -> Sentences:
    """Yield a sentence or an open question on whether the values are too high or too low on
    average. Yield nothing if the bias is unknown.
    """
    bias = figures.bias
    if bias.is_unknown:
        return
    variance = figures.variance.value  # a unit to measure in: its own error matters little
    margin = SHIFTED_ABOVE * math.sqrt(variance) if variance > 0 else 0.0
    if bias.low > margin or bias.high < -margin:
        side = "high" if bias.value > 0 else "low"
        yield Sentence(
            f"Its values are too {side} on average, by {abs(bias.value):.2f} (bias {quote(bias)}, "
            "in units of the reward).",
            "truth-shifted",
        )
    elif -margin <= bias.low and bias.high <= margin:
        yield Sentence(f"Its values are right on average (bias {quote(bias)}).", "truth-centred")
    else:
        yield f"whether its values are too high or too low (bias {quote(bias)})"


def _beside_the_baseline(figures: TruthFigures) -> Sentences:
    """Yield a sentence or an open question on whether the critic beats the other responses' mean.

    That mean reward is the baseline of methods without a critic. The one with the lower mean
    squared error is better. Nothing is yielded if one of the two errors is unknown.
    """
    mse, baseline = figures.mse, figures.baseline_mse
    if mse.is_unknown or baseline.is_unknown:
        return
    numbers = f"mean squared error {quote(mse)}, the mean's {quote(baseline)}"
    if mse.high < baseline.low:
        yield Sentence(
            "It is nearer to the truth than the mean reward of the other responses to the prompt "
            f"({numbers}).",
            "truth-baseline-better",
        )
    elif mse.low > baseline.high:
        yield Sentence(
            "It is further from the truth than the mean reward of the other responses to the "
            f"prompt ({numbers}): that mean would be the better baseline.",
            "truth-baseline-worse",
        )
    else:
        yield f"whether it is nearer to the truth than the mean of the other responses ({numbers})"


def _on_mistakes(figures: TruthFigures) -> Sentences:
    """Yield a sentence or an open question on whether the critic names a response's first
    mistake.

    With fewer than `MISTAKES_NEEDED` mistakes the question is open. Nothing is yielded if no
    measured response has a mistake.
    """
    recall, ceiling = figures.mistake_recall, figures.mistake_recall_ceiling
    if recall.is_unknown:
        return
    numbers = (
        f"recall {quote(recall)} of {figures.num_mistakes} mistakes ({figures.mistakes}), "
        f"an exact critic's {quote(ceiling)}; precision {quote(figures.mistake_precision)}"
    )
    result = (
        f"{recall.value:.0%} of the responses that have one, its value falls most where the truth "
        f"first falls ({numbers})."
    )
    are_enough = figures.num_mistakes >= MISTAKES_NEEDED
    if are_enough and recall.low > NAMES_ABOVE:
        yield Sentence(f"It names the first mistake: in {result}", "truth-mistakes-named")
    elif are_enough and recall.high < NAMES_ABOVE < ceiling.value:
        text = f"It does not name the first mistake: in only {result}"
        yield Sentence(text, "truth-mistakes-missed")
    else:
        yield f"whether it names the first mistake ({numbers})"
