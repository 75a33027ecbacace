"""Converts values of data rows to text or to JSON's types, and refuses values that cannot be used.

A row is pickled for the processes of verifiers and environments, written as JSON beside rollouts,
and its texts are written as UTF-8. A value that one of these refuses is refused when it is read.
"""

from __future__ import annotations

import math
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from multiprocessing.reduction import ForkingPickler
from typing import Any
from uuid import UUID

from vapo.errors import UserError

MOST_LEVELS = 100
"""How deep a row may be nested: pickle and JSON descend by recursion, which Python limits."""

_MOST_DIGITS = 4000
"""The most digits of a number as text. Python's own limit for whole numbers is 4300."""

_WIDTHS: dict[str, Callable[[float], float]] = {
    "float16": lambda number: float(struct.unpack("e", struct.pack("e", number))[0]),
    "float32": lambda number: float(struct.unpack("f", struct.pack("f", number))[0]),
    "bfloat16": lambda number: _bfloat16(number),
}
"""Functions that round a number to a dtype that is narrower than Python's float."""

_NUMBERS = {int, float, bool, type(None)}
_CARRIED = (bool, int, float, bytes, Decimal, date, time, timedelta, UUID, type(None))
"""Types that can be pickled, and that JSON has or that have an obvious text."""


_DIGITS = {"bfloat16": range(2, 5), "float16": range(3, 6), "float32": range(6, 10)}
"""How many digits a number of each dtype may need. Any decimal with the fewest is kept exactly."""


class RefusedValue(ValueError):
    """Raised for a value that a row cannot have. The message is the reason, without the row."""


# ---- numbers as text ----------------------------------------------------------------------------


def number_text(number: float | Decimal) -> str:
    """Return a number in positional notation: `0.00005`, never `5e-05`.

    A float gets the fewest digits that identify it, and no point if it is whole. A decimal number
    keeps the digits that it was written with. Infinity and NaN are as Python writes them.

    Raises: RefusedValue: the text would have thousands of digits.

    >>> [number_text(x) for x in (5e-05, 1e16, 3.0, 0.5, Decimal("1.00E-8"), Decimal("1.50"))]
    ['0.00005', '10000000000000000', '3', '0.5', '0.0000000100', '1.50']
    """
    if isinstance(number, int):
        if number.bit_length() > 10 * _MOST_DIGITS // 3:
            raise RefusedValue(f"a whole number of more than {_MOST_DIGITS} digits")
        return str(int(number))
    is_decimal = isinstance(number, Decimal)
    exact = number if isinstance(number, Decimal) else Decimal(float.__repr__(number))
    if not exact.is_finite():
        return str(number)
    if abs(exact.adjusted()) + len(exact.as_tuple().digits) > _MOST_DIGITS:
        raise RefusedValue(f"a number of more than {_MOST_DIGITS} digits")
    text = format(exact, "f")
    if not is_decimal and "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def value_text(value: Any) -> str:
    """Return a value as text: a number by `number_text`, any other value by `str`.

    Raises: RefusedValue: what `number_text` raises.

    >>> value_text(5e-05), value_text(True), value_text("a")
    ('0.00005', 'True', 'a')
    """
    is_number = isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)
    return number_text(value) if is_number else str(value)


def shortest_float(number: float, width: str) -> float:
    """Return the float with the fewest digits that rounds to `number` in a narrower dtype.

    Args:
        width: the dtype in which the number was stored: float16, bfloat16 or float32.

    >>> shortest_float(0.10000000149011612, "float32"), shortest_float(0.300048828125, "float16")
    (0.1, 0.3)
    """
    if not math.isfinite(number):
        return number
    for digits in _DIGITS[width]:
        shorter = float(f"{number:.{digits}g}")
        try:
            if _WIDTHS[width](shorter) == number:
                return shorter
        except OverflowError:  # rounded up beyond the largest
            continue
    return number


def _bfloat16(number: float) -> float:
    """Round a number to bfloat16, the upper half of a float32. Ties go to the even one."""
    (bits,) = struct.unpack("I", struct.pack("f", number))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("f", struct.pack("I", bits & 0xFFFFFFFF))[0])


def shortest_floats(values: Any, width: str) -> Any:
    """Apply `shortest_float` to a float, or to each in nested lists; other values stay."""
    if isinstance(values, list):
        return [shortest_floats(item, width) for item in values]
    return shortest_float(values, width) if isinstance(values, float) else values


# ---- what a file's rows may have ----------------------------------------------------------------


def check_carried(value: Any, levels: int = MOST_LEVELS) -> None:
    """Check that a value can be pickled, and written as UTF-8 and JSON, as later stages do.

    `levels` is how deep it may still be nested.

    Raises: RefusedValue: it cannot.
    """
    kind = type(value)
    if kind in _NUMBERS:
        return
    if isinstance(value, str):
        _check_text(value)
    elif kind is dict or isinstance(value, Mapping):  # the second question takes its time
        _check_levels(levels)
        for name, item in value.items():
            check_carried(name, levels - 1)
            check_carried(item, levels - 1)
    elif isinstance(value, (list, tuple)):
        _check_levels(levels)
        for item in value:
            if type(item) not in _NUMBERS:  # there may be thousands
                check_carried(item, levels - 1)
    elif not isinstance(value, _CARRIED):
        try:
            ForkingPickler.dumps(value)  # as it is sent
        except Exception as error:  # an object raises what it likes
            raise RefusedValue(
                f"{type(value).__name__}, which cannot be sent to another process "
                f"({type(error).__name__}: {error!s:.100})"
            ) from None


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])[1:-1]
        raise RefusedValue(
            f"a text with {half}, half of a character, which UTF-8 cannot write"
        ) from None


def _check_levels(levels: int) -> None:
    if levels <= 0:
        raise RefusedValue(f"lists or objects nested more than {MOST_LEVELS} deep")


def check_names(names: Iterable[object], place: object) -> None:
    """Check that no two columns have the same name, since a dict would have either by chance.

    `place` is the file or source, for the message.

    Raises: UserError: two have; it names the column.
    """
    for name, num in Counter(names).items():
        if num > 1:
            raise UserError(f"{place}: the column {name!r} is there twice: rename one of them")


# ---- what a program's rows may have -------------------------------------------------------------


def plain_value(value: Any, levels: int = MOST_LEVELS) -> Any:
    """Convert a value from a Python program to JSON's types, if it has an obvious meaning there.

    Arrays, tensors and series become lists. Decimal numbers, fractions, times and paths become
    texts. Null values of tables (NaT, NA) become None. `levels` is how deep it may still be nested.

    Raises: RefusedValue: it has no such meaning, as bytes, a set or a complex number.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        _check_text(value)
        return str(value)
    if isinstance(value, int):
        number_text(value)  # it has a text
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        _check_levels(levels)
        return _plain_object(value, levels - 1)
    if isinstance(value, (list, tuple)):
        _check_levels(levels)
        return [plain_value(item, levels - 1) for item in value]
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, Decimal) and not value.is_infinite():
        return None if value.is_nan() else number_text(value)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, (timedelta, Fraction, UUID)):
        return str(value)
    if isinstance(value, os.PathLike):
        return plain_value(os.fspath(value), levels)
    if hasattr(value, "tolist"):
        return _plain_array(value, levels)
    raise RefusedValue(f"{type(value).__name__}, which JSON cannot hold")


def _plain_object(value: Mapping[Any, Any], levels: int) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, item in value.items():
        if not isinstance(key, (str, int)) or isinstance(key, bool):
            raise RefusedValue(f"an object with the key {key!r:.60}, which is not text")
        name = plain_value(str(key))
        if name in plain:
            raise RefusedValue(f"an object with the key {name!r:.60} twice")
        plain[name] = plain_value(item, levels)
    return plain


def _plain_array(value: Any, levels: int) -> Any:
    """Convert an array, tensor or series to lists of JSON's types (see `plain_value`)."""
    kind = str(getattr(value, "dtype", "")).lower()
    is_time = type(value).__module__ == "numpy" and kind.startswith(("datetime64", "timedelta64"))
    try:
        listed = (value.astype(str) if is_time else value).tolist()
    except Exception as error:  # as of a sparse tensor
        raise RefusedValue(
            f"{type(value).__name__}, which cannot be turned into a list ({type(error).__name__}: "
            f"{error!s:.100})"
        ) from None
    if type(listed) is type(value):
        if not hasattr(value, "__float__") or "complex" in kind:
            raise RefusedValue(f"{type(value).__name__}, which JSON cannot hold")
        return float(value)  # it is wider than Python's float
    if is_time:
        return _without_nat(listed)
    width = narrow_width(kind)
    return plain_value(listed if width is None else shortest_floats(listed, width), levels)


def _without_nat(times: Any) -> Any:
    if isinstance(times, list):
        return list(map(_without_nat, times))
    return None if times == "NaT" else times


def narrow_width(kind: str) -> str | None:
    """Return the name of a float dtype that is narrower than Python's, or None for other dtypes.

    >>> [narrow_width(x) for x in ("torch.bfloat16", "Float32", "float[pyarrow]", "float64")]
    ['bfloat16', 'float32', 'float32', None]
    """
    arrow = {"float[pyarrow]": "float32", "halffloat[pyarrow]": "float16"}
    kind = arrow.get(kind.lower(), kind.lower())
    return next((width for width in ("bfloat16", "float16", "float32") if width in kind), None)
