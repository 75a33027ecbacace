"""Choose the responses of a group that a page shows. Imports no torch."""

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
    """Choose rows of a group; return row -> how many of its tokens are shown.

    Right and wrong responses alternate. If no response fits into `max_tokens`, the shortest is cut
    to it.

    Args:
        rows: the group's rows.
        measured: rows that come before others.
    """
    right = [i for i in range(len(rows)) if is_correct[i]]
    wrong = [i for i in range(len(rows)) if not is_correct[i]]
    order = [i for i in chain.from_iterable(zip_longest(right, wrong)) if i is not None]
    order.sort(key=lambda i: rows[i] not in measured)  # a stable sort: they still alternate
    num_tokens: dict[int, int] = {}
    for i in order:
        if len(num_tokens) < max_responses and lengths[i] <= max_tokens - sum(num_tokens.values()):
            num_tokens[rows[i]] = lengths[i]
    if not num_tokens and max_tokens > 0:
        shortest = min(order, key=lambda i: lengths[i])
        num_tokens[rows[shortest]] = max_tokens
    return dict(sorted(num_tokens.items()))
