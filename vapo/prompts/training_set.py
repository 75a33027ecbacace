"""The training set: sources with weights, each with stages; chooses the prompts of each iteration.

Everything is a function of counters, so that a resumed run continues where it stopped.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd
from random import Random

from vapo.system.process import derive_seed
from vapo.types import Prompt


@dataclass(frozen=True)
class StagePrompts:
    """The prompts of a source from an iteration on. A source without a curriculum has one stage."""

    prompts: Sequence[Prompt]
    from_iteration: int = 0


@dataclass(frozen=True)
class TrainingSource:
    """A source of training prompts, in stages. Its name is empty outside a mixture."""

    stages: tuple[StagePrompts, ...]
    name: str = ""
    weight: int = 1

    def stage_at(self, iteration: int) -> int:
        """Return the index of the stage that an iteration (counted from 0) belongs to."""
        starts = [stage.from_iteration for stage in self.stages]
        return bisect_right(starts, iteration) - 1


@dataclass(frozen=True)
class TrainingSet:
    """All training prompts, as sources that take turns by their weights."""

    sources: tuple[TrainingSource, ...]

    @classmethod
    def of(cls, prompts: Sequence[Prompt]) -> TrainingSet:
        """Make a training set of prompts that all belong to one source with one stage."""
        return cls((TrainingSource((StagePrompts(prompts),)),))

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts of all sources and stages, in one list."""
        return [p for source in self.sources for stage in source.stages for p in stage.prompts]

    @cached_property
    def turns(self) -> Turns:
        return Turns(tuple(source.weight for source in self.sources))

    @cached_property
    def _permutation(self) -> Callable[[int, int, int], tuple[int, ...]]:
        """The module's function `_permutation` with a cache of two results for each source.

        An iteration may need two of a source's permutations.
        """
        return lru_cache(maxsize=2 * len(self.sources))(_permutation)

    def at(self, place: int, *, iteration: int, num_prompts: int, seed: int) -> Prompt:
        """Return the prompt at position `place` of the order, where iteration i begins at i *
        num_prompts.

        A source goes through seeded permutations of its stage's prompts, one after the other, from
        the position where the stage begins. So no prompt is repeated before all were used.
        """
        index = self.turns.source(place)
        source = self.sources[index]
        number = source.stage_at(iteration)
        stage = source.stages[number]
        begin = self.turns.count(index, stage.from_iteration * num_prompts)
        epoch, nth = divmod(self.turns.count(index, place) - begin, len(stage.prompts))
        is_plain = not source.name and number == 0
        seed = seed if is_plain else derive_seed(seed, "source", source.name, number)
        return stage.prompts[self._permutation(len(stage.prompts), seed, epoch)[nth]]


class Turns:
    """The endless order in which a mixture's sources take turns, with period sum(weights).

    Among the first p positions source s has n_s(p) turns with
        |n_s(p) - p * w_s / sum(w)| < 1
    for every p: the k-th turn of s (from 0) lies in the window floor(k W / w) <= p <
    ceil((k + 1) W / w). Giving each position to the open window that ends first fills all windows
    whenever that is possible, and evenly spread turns show that it is.

    Source: Liu and Layland 1973 (earliest deadline first), on the windows of Baruah et al. 1996
    (proportionate progress).
    """

    def __init__(self, weights: tuple[int, ...]) -> None:
        divisor = gcd(*weights)
        self.weights = tuple(weight // divisor for weight in weights)
        self.period = sum(self.weights)
        self.order = _order(self.weights)
        self._places: list[list[int]] = [[] for _ in weights]
        for place, source in enumerate(self.order):
            self._places[source].append(place)

    def source(self, place: int) -> int:
        """Return the index of the source whose turn is at position `place`."""
        return self.order[place % self.period]

    def count(self, source: int, place: int) -> int:
        """Return the number of turns that a source has before position `place` of the order."""
        cycle, rest = divmod(place, self.period)
        return cycle * self.weights[source] + bisect_left(self._places[source], rest)


@lru_cache(maxsize=8)
def _order(weights: tuple[int, ...]) -> tuple[int, ...]:
    """Return one period of the turns of sources with these weights (see `Turns`)."""
    total, counts, order = sum(weights), [0] * len(weights), []
    for place in range(total):
        open_windows = [
            (-(-(count + 1) * total // weight), source)
            for source, (count, weight) in enumerate(zip(counts, weights, strict=True))
            if count * total // weight <= place and count < weight
        ]
        _, source = min(open_windows)
        counts[source] += 1
        order.append(source)
    return tuple(order)


def _permutation(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Return a permutation of 0 ... size - 1, which depends on the seed and the epoch."""
    order = list(range(size))
    Random(f"group_sampling/{seed}/{epoch}").shuffle(order)
    return tuple(order)


def group_sampling(
    prompts: Sequence[Prompt] | TrainingSet,
    *,
    num_prompts: int,
    seed: int,
    iteration: int,
    rank: int = 0,
    world_size: int = 1,
) -> list[Prompt]:
    """Return this rank's prompts of one iteration. It is a pure function of its arguments.

    `num_prompts` should be a multiple of `world_size`; a remainder is left out.

    Iterations go through seeded permutations of the whole set, one after the other: iteration i
    takes positions [i * num_prompts, (i + 1) * num_prompts) of this sequence, so no prompt is
    repeated before all were used. In a mixture the sources take turns by their weights, and each
    source has a sequence of its own. Rank r gets the r-th of `world_size` equal slices. The sampler
    makes each prompt's group of G responses.

    Source: VAPO section 4.3 (fewer prompts, each sampled G times); off is N * G prompts, G = 1.
    """
    training = prompts if isinstance(prompts, TrainingSet) else TrainingSet.of(prompts)
    share = num_prompts // world_size
    first = iteration * num_prompts + rank * share
    return [
        training.at(place, iteration=iteration, num_prompts=num_prompts, seed=seed)
        for place in range(first, first + share)
    ]
