"""Sizes, times and byte ranges as people write them: "4GiB", "500ms", "4096+65536".

Only binary units are taken: "GB" means two different numbers to two readers, so it is refused with the spelling
that is meant.
"""

from __future__ import annotations

import re

from turbofs.errors import InvalidRequestError
from turbofs.model import ByteRange

_SIZE_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE_SHORT = {"k": "kib", "m": "mib", "g": "gib", "t": "tib"}
_TIME_UNITS = {"ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_OFFSET_LIMIT = 1 << 63


def parse_size(text: str) -> int:
    """Bytes that *text* names: "4GiB", "512 MiB", "1.5GiB", "64M", "4096". Raises InvalidRequestError."""
    number, unit = _split(text, "a size such as 512MiB or 4GiB")
    unit = _SIZE_SHORT.get(unit, unit)
    if unit not in _SIZE_UNITS:
        hint = f"; write {unit[0].upper()}iB" if unit in {"kb", "mb", "gb", "tb"} else ""
        raise InvalidRequestError(f"{text!r}: unknown unit{hint}", advice="sizes take KiB, MiB, GiB or TiB")
    size_bytes = float(number) * _SIZE_UNITS[unit] if "." in number else int(number) * _SIZE_UNITS[unit]
    if size_bytes >= _OFFSET_LIMIT:
        raise InvalidRequestError(f"{text!r}: more bytes than a file can have", advice="sizes are below 8 EiB")
    return int(size_bytes)


def parse_duration(text: str) -> float:
    """Seconds that *text* names: "500ms", "30s", "2m", "1h", "30". Raises InvalidRequestError."""
    number, unit = _split(text, "a time such as 500ms, 30s or 2m")
    if unit not in _TIME_UNITS:
        raise InvalidRequestError(f"{text!r}: unknown unit", advice="times take ms, s, m or h")
    return float(number) * _TIME_UNITS[unit]


def parse_range(text: str) -> ByteRange:
    """The range that "OFFSET+LENGTH" names; both take size units. Raises InvalidRequestError."""
    offset_text, plus, length_text = text.partition("+")
    if not plus:
        raise InvalidRequestError(f"{text!r} is not OFFSET+LENGTH", advice="for example 0+64MiB or 4096+65536")
    offset, length = parse_size(offset_text), parse_size(length_text)
    if length == 0 or offset + length >= _OFFSET_LIMIT:
        raise InvalidRequestError(f"{text!r}: the length must be at least 1, and the end below 8 EiB")
    return ByteRange(offset, offset + length)


def format_size(size_bytes: float) -> str:
    """A short text for people: "512 B", "1.5 GiB"."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value == int(value) else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _split(text: str, expected: str) -> tuple[str, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None or len(text) > 64:
        raise InvalidRequestError(f"{text[:64]!r} is not {expected}")
    return match[1], match[2].lower()
