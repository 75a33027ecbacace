"""Choose the prompts that an iteration trains on."""

from __future__ import annotations

from collections.abc import Sequence

from vapo.errors import UserError
from vapo.prompts.training_set import TrainingSet
from vapo.types import Prompt


def group_sampling(
    prompts: Sequence[Prompt] | TrainingSet,
    *,
    num_prompts: int,
    seed: int,
    iteration: int,
    rank: int = 0,
    world_size: int = 1,
) -> list[Prompt]:
    """Choose this rank's prompts of one iteration: a pure function of its arguments.

    Iterations go through seeded permutations of the whole set, one after the other: iteration i
    takes positions [i * num_prompts, (i + 1) * num_prompts) of this sequence, so no prompt is
    repeated before all were used. In a mixture the sources take turns by their weights, and each
    source has a sequence of its own. Rank r has the r-th of `world_size` equal slices. The sampler
    makes each prompt's group of G responses.

    Source: VAPO section 4.3 (fewer prompts, each sampled G times); off is N * G prompts, G = 1.

    Raises:
        UserError: `num_prompts` cannot be split evenly over the ranks.
    """
    if num_prompts % world_size:
        raise UserError(
            f"components.group_sampling.num_prompts is {num_prompts}, which {world_size} "
            f"processes cannot share evenly: use a multiple of {world_size}"
        )
    training = prompts if isinstance(prompts, TrainingSet) else TrainingSet.of(prompts)
    share = num_prompts // world_size
    first = iteration * num_prompts + rank * share
    return [
        training.at(place, iteration=iteration, num_prompts=num_prompts, seed=seed)
        for place in range(first, first + share)
    ]
