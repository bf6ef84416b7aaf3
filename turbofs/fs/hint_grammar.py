"""How the value of a hint is read: `key=value` pairs joined by commas, or one bare word. Pure.

The small parsers (`size_bytes`, `duration_s`, …) raise ValueError with what is wrong; `Pairs` adds the attribute's
name, the place in the value and an accepted example, and raises InvalidRequestError. For every parser there is the
inverse that writes the canonical text (`format_size`, `format_duration`, `format_fraction`, `format_ranges`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from turbofs.errors import InvalidRequestError
from turbofs.model import ByteRange

T = TypeVar("T")

LARGEST_OFFSET = (1 << 63) - 1
"""The kernel's loff_t: no file reaches further."""
LONGEST_DURATION_MS = 366 * 24 * 3_600_000
"""A year: what a job asks for longer than that is a slip of the unit."""
LONGEST_WORD = 128

_NUMBER = re.compile(r"([+-]?)([0-9]+)([A-Za-z]*)")
_FRACTION = re.compile(r"([01]|0?\.[0-9]{1,9}|1\.0{1,9})")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]*")
_SIZE_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_TIME_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
_LONGEST_NUMBER = 19  # digits of LARGEST_OFFSET; int() of thousands of digits would be slow, then refused oddly


def refusal(attribute: str, problem: str, example: str) -> InvalidRequestError:
    """The error that a wrong value of *attribute* becomes."""
    return InvalidRequestError(f"{attribute}: {problem}", advice=f"an accepted value is: {example}")


class Pairs:
    """The pairs of one value, taken by key. `finish` refuses what nobody took.

    Raises InvalidRequestError for a piece that is no pair, for a key that comes twice, is unknown or missing, and for
    a value that its parser refuses.
    """

    def __init__(self, attribute: str, text: str, example: str) -> None:
        self._attribute = attribute
        self._example = example
        self._values: dict[str, tuple[str, int]] = {}
        self._known: list[str] = []
        place = 0
        for piece in text.split(","):
            self._add(piece, place)
            place += len(piece) + 1

    def required(self, key: str, parse: Callable[[str], T]) -> T:
        """The value of *key*, read by *parse*."""
        if key not in self._values:
            raise self._refusal(f"{key!r} is missing")
        return self._take(key, parse)

    def optional(self, key: str, parse: Callable[[str], T]) -> T | None:
        """The value of *key*, read by *parse*; None where it is not given."""
        if key not in self._values:
            self._known.append(key)
            return None
        return self._take(key, parse)

    def finish(self) -> None:
        """Call last: refuses the keys that were neither required nor optional."""
        for key, (_, place) in self._values.items():
            if key not in self._known:
                raise self._refusal(f"unknown key {key!r} at character {place}; known: {', '.join(self._known)}")

    def _add(self, piece: str, place: int) -> None:
        key, equals, value = piece.partition("=")
        key = key.strip()
        if not equals or not key:
            found = repr(piece.strip()) if piece.strip() else "nothing"
            raise self._refusal(f"expected key=value at character {place}, found {found}")
        if key in self._values:
            raise self._refusal(f"{key!r} is given twice, again at character {place}")
        self._values[key] = (value.strip(), place)

    def _take(self, key: str, parse: Callable[[str], T]) -> T:
        self._known.append(key)
        text, place = self._values[key]
        try:
            return parse(text)
        except ValueError as error:
            raise self._refusal(f"{key!r} at character {place}: {error}") from None

    def _refusal(self, problem: str) -> InvalidRequestError:
        return refusal(self._attribute, problem, self._example)


# --- numbers


def whole(minimum: int, maximum: int) -> Callable[[str], int]:
    """A parser of whole numbers in [minimum, maximum]."""

    def parse(text: str) -> int:
        number = _scaled(text, {"": 1}, "a whole number")
        if not minimum <= number <= maximum:
            raise ValueError(f"{number} is not between {minimum} and {maximum}")
        return number

    return parse


def size_bytes(text: str) -> int:
    """Bytes: `4096`, `4KiB`, `16MiB`, `1GiB`; at most LARGEST_OFFSET."""
    size = _scaled(text, _SIZE_UNITS, "a size")
    if size > LARGEST_OFFSET:
        raise ValueError(f"{text!r} is more than the largest file offset, {LARGEST_OFFSET}")
    return size


def format_size(size: int) -> str:
    """The shortest exact text: `4MiB`, not `4194304`."""
    for unit in ("GiB", "MiB", "KiB"):
        if size and size % _SIZE_UNITS[unit] == 0:
            return f"{size // _SIZE_UNITS[unit]}{unit}"
    return str(size)


def duration_s(text: str) -> float:
    """Seconds: `250ms`, `30s`, `10m`, `2h`; more than nothing and at most a year."""
    milliseconds = _scaled(text, _TIME_UNITS_MS, "a time")
    if not 0 < milliseconds <= LONGEST_DURATION_MS:
        raise ValueError(f"{text!r} is not between 1ms and {format_duration(LONGEST_DURATION_MS / 1000)}")
    return milliseconds / 1000


def format_duration(seconds: float) -> str:
    """The shortest exact text, to the millisecond."""
    milliseconds = round(seconds * 1000)
    for unit in ("h", "m", "s"):
        if milliseconds % _TIME_UNITS_MS[unit] == 0:
            return f"{milliseconds // _TIME_UNITS_MS[unit]}{unit}"
    return f"{milliseconds}ms"


def fraction(text: str) -> float:
    """A decimal number in [0, 1] with at most nine decimals, without sign or exponent."""
    if not _FRACTION.fullmatch(text):
        raise ValueError(f"{_shown(text)} is not a decimal number between 0 and 1 (at most nine decimals)")
    return float(text)


def format_fraction(number: float) -> str:
    """The shortest text, to the ninth decimal, and never an exponent."""
    return f"{number:.9f}".rstrip("0").removesuffix(".")


def _scaled(text: str, units: dict[str, int], kind: str) -> int:
    found = _NUMBER.fullmatch(text)
    known = ", ".join(unit for unit in units if unit)
    if not found:
        raise ValueError(f"{_shown(text)} is not {kind}" + (f" (a number and one of {known})" if known else ""))
    sign, digits, unit = found.groups()
    if sign == "-":
        raise ValueError(f"{_shown(text)} is negative")
    if sign or unit not in units:
        raise ValueError(f"{_shown(text)} is not {kind}" + (f": the units are {known}" if known else ""))
    digits = digits.lstrip("0") or "0"
    if len(digits) > _LONGEST_NUMBER:
        raise ValueError(f"{_shown(text)} is too large")
    return int(digits) * units[unit]


# --- words


def word(text: str) -> str:
    """A name: letters, digits and `_ . : @ -`, not starting with a sign or a dot."""
    if len(text) > LONGEST_WORD:
        raise ValueError(f"{_shown(text)} has {len(text)} characters; at most {LONGEST_WORD} are allowed")
    if not _WORD.fullmatch(text):
        raise ValueError(f"{_shown(text)} is not a name (letters, digits and _ . : @ -)")
    return text


def glob(text: str) -> str:
    """A pattern with `*`, `?` and `[…]`. Commas separate pairs, so a pattern has none: `?` stands in for one."""
    if not text:
        raise ValueError("the pattern is empty; `*` means everything")
    if "," in text:
        raise ValueError(f"{_shown(text)} contains a comma; write `?` in its place")
    if not text.isprintable():
        raise ValueError(f"{_shown(text)} contains characters that cannot be shown")
    return text


def one_of(*words: str) -> Callable[[str], str]:
    """A parser that takes exactly these words."""

    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"{_shown(text)} is none of: {', '.join(words)}")
        return text

    return parse


# --- ranges


def byte_ranges(text: str) -> tuple[ByteRange, ...]:
    """`offset+length` joined by semicolons, both as sizes; in the order given. No range is empty."""
    return tuple(_byte_range(piece.strip(), number) for number, piece in enumerate(text.split(";"), start=1))


def format_ranges(ranges: tuple[ByteRange, ...]) -> str:
    return ";".join(f"{format_size(each.start)}+{format_size(each.length)}" for each in ranges)


def _byte_range(text: str, number: int) -> ByteRange:
    start_text, plus, length_text = text.partition("+")
    if not plus:
        raise ValueError(f"range {number}, {_shown(text)}, is not offset+length")
    try:
        start, length = size_bytes(start_text.strip()), size_bytes(length_text.strip())
    except ValueError as error:
        raise ValueError(f"range {number}, {_shown(text)}: {error}") from None
    if length == 0:
        raise ValueError(f"range {number}, {_shown(text)}, is empty")
    if start + length > LARGEST_OFFSET:
        raise ValueError(f"range {number}, {_shown(text)}, ends after the largest file offset, {LARGEST_OFFSET}")
    return ByteRange(start, start + length)


def _shown(text: str) -> str:
    """*text* as it fits into a message."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
