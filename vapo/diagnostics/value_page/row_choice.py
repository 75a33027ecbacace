"""Which responses of a group a page shows. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain, zip_longest


def rows_to_show(
    rows: Sequence[int],
    *,
    is_correct: Sequence[bool],
    lengths: Sequence[int],
    max_responses: int,
    max_tokens: int,
    measured: Collection[int] = (),
) -> dict[int, int]:
    """Choose rows and how many tokens of each are shown: right and wrong ones alternate.

    Those in `measured` come before others. Where none fits, the shortest is cut to the budget.
    """
    right = [i for i in range(len(rows)) if is_correct[i]]
    wrong = [i for i in range(len(rows)) if not is_correct[i]]
    by_turns = [i for i in chain.from_iterable(zip_longest(right, wrong)) if i is not None]
    by_turns.sort(key=lambda i: rows[i] not in measured)  # keeps the turns
    shown: dict[int, int] = {}
    for i in by_turns:
        if len(shown) < max_responses and lengths[i] <= max_tokens - sum(shown.values()):
            shown[rows[i]] = lengths[i]
    if not shown and max_tokens > 0:
        shortest = min(by_turns, key=lambda i: lengths[i])
        shown[rows[shortest]] = max_tokens
    return dict(sorted(shown.items()))
