r"""The points at which two expressions with symbols are compared.

A symbol's coordinates depend on its place, never on its name: renaming letters changes no verdict.
Every pattern of signs comes with sizes in one order and in its reverse, so that `|p - q|` differs
from `p - q`, and with large, small and very small sizes.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from itertools import product

from vapo.rewards.answer_numbers import Number, mp

MAX_SYMBOLS_WITH_ALL_SIGNS = 3
NUM_PATTERNS = 16
"""The number of sign patterns for more symbols: those with one sign, some with a single negative
one, and some that are drawn at random."""

SIZES = ((0, 0, False), (0, 0, True), (0, -4, False), (16, 40, True), (16, -20, False))
"""For each variant of a pattern: `least` and `exponent` of its sizes, which are
(least + 16 u) 2^exponent for u between 0 and 1, and whether their order is the reverse one."""

NUM_NEAR_VARIANTS = 3
"""The first variants, this many, have points near zero; the rest are far from it or very close."""


@lru_cache(maxsize=64)
def points(num_symbols: int) -> tuple[tuple[Number, ...], ...]:
    """Return the points at which expressions with this many symbols are compared.

    Each point has a number for each symbol. Points near zero come first.
    """
    patterns = sign_patterns(num_symbols)
    return tuple(
        _point(signs, variant, index)
        for variant in range(len(SIZES))
        for index, signs in enumerate(patterns)
    )


def smooth_places(num_symbols: int) -> tuple[int, ...]:
    """Return the indices of four `points` that are enough for expressions without cases.

    Cases come from absolute values and the like. At two of the points symbols are up to 16, and at
    two below 1: in `x^{300} + 1` the 1 is lost in rounding if x is 10, and the power if x is small.
    """
    small = 2 * len(sign_patterns(num_symbols))
    return (0, 1, small, small + 1)


def num_near_points(num_symbols: int) -> int:
    return NUM_NEAR_VARIANTS * len(sign_patterns(num_symbols))


def sign_patterns(num_symbols: int) -> tuple[tuple[int, ...], ...]:
    """Return tuples that have a sign, 1 or -1, for every symbol.

    For few symbols these are all patterns; for more they are `NUM_PATTERNS` of them.
    """
    if num_symbols <= MAX_SYMBOLS_WITH_ALL_SIGNS:
        return tuple(product((1, -1), repeat=num_symbols))
    places = range(num_symbols)
    patterns = [(1,) * num_symbols, (-1,) * num_symbols]
    patterns += [tuple(-1 if i == place else 1 for i in places) for place in places][
        : NUM_PATTERNS // 2
    ]
    patterns += [
        tuple(-1 if _pseudorandom("sign", index, i) < 0.5 else 1 for i in places)
        for index in range(NUM_PATTERNS - len(patterns))
    ]
    return tuple(patterns)


def _point(signs: tuple[int, ...], variant: int, pattern: int) -> tuple[Number, ...]:
    """Return a point: a number for each symbol. `signs` has their signs.

    `variant` chooses the range of sizes in `SIZES`. The sizes look random, and depend on `variant`
    and `pattern` alone.
    """
    least, exponent, is_reversed = SIZES[variant]
    num = len(signs)
    sizes = sorted(_pseudorandom(variant, pattern, i) for i in range(num))
    order = [(i + pattern + variant // 2) % num for i in range(num)]
    if is_reversed:
        order = [num - 1 - rank for rank in order]
    scale = mp.mpf(2) ** exponent
    return tuple(
        sign * (least + 16 * sizes[rank]) * scale for sign, rank in zip(signs, order, strict=True)
    )


def _pseudorandom(*place: object) -> Number:
    """Return a number between 0 and 1 that looks random, and depends on `place` alone."""
    digest = hashlib.sha256("/".join(map(str, place)).encode()).digest()
    return mp.mpf(int.from_bytes(digest[:16], "big") + 1) / 2**128
