"""Every extended attribute that TurboFS documents: who may set or read it, where, and since when. Pure.

The order of questions for a name that the kernel hands over: `attribute_to_set` (or `_to_read`, `_to_remove`) says
which documented attribute it is, or refuses it from memory; `parse_hint` reads its value; `format_status` keeps a
derived document below the size that a derived value may have.

Refusals: ENODATA to get or remove a name outside `user.` (the kernel asks for `security.capability` and POSIX ACLs on
its own, and must hear that there is none), ENOTSUP to set one; ENOTSUP for every `user.` name that is not documented
or comes with a later version; EINVAL for what a documented one does not take.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass

from turbofs.errors import InvalidRequestError, NoSuchAttributeError, NotSupportedError
from turbofs.fs.hints import (
    AckHint,
    DatasetHint,
    GroupHint,
    Hint,
    PrefetchHint,
    PriorityHint,
    ReplicasHint,
    ReplicateHint,
    TensorsHint,
)

PREFIX = "user.turbofs."
VALUE_LIMIT_BYTES = 64 << 10
"""The kernel's own limit of one value (XATTR_SIZE_MAX)."""
DERIVED_LIMIT_BYTES = 60 << 10
"""Derived values stay below it: at 64 KiB exactly, tools that add a terminating NUL fail."""


class Attribute(enum.StrEnum):
    """The documented names."""

    PREFETCH = "user.turbofs.prefetch"
    TENSORS = "user.turbofs.tensors"
    REPLICAS = "user.turbofs.replicas"
    REPLICATE = "user.turbofs.replicate"
    PRIORITY = "user.turbofs.priority"
    GROUP = "user.turbofs.group"
    ACK = "user.turbofs.ack"
    DATASET = "user.turbofs.dataset"
    DURABILITY = "user.turbofs.durability"
    LAST_ERROR = "user.turbofs.last_error"
    SERVED_FROM = "user.turbofs.served_from"
    BLAKE3 = "user.turbofs.blake3"
    FORMAT = "user.turbofs.format"
    STATUS = "user.turbofs.status"


@dataclass(frozen=True, slots=True)
class AttributeSpec:
    """What may be done with one attribute. `hint` is the class of its value where it can be set."""

    attribute: Attribute
    works: bool
    hint: type[Hint] | None = None
    directory_only: bool = False

    @property
    def settable(self) -> bool:
        return self.hint is not None


CATALOGUE: Mapping[Attribute, AttributeSpec] = {
    spec.attribute: spec
    for spec in (
        AttributeSpec(Attribute.PREFETCH, works=True, hint=PrefetchHint),
        AttributeSpec(Attribute.TENSORS, works=False, hint=TensorsHint, directory_only=True),
        AttributeSpec(Attribute.REPLICAS, works=False, hint=ReplicasHint),
        AttributeSpec(Attribute.REPLICATE, works=False, hint=ReplicateHint, directory_only=True),
        AttributeSpec(Attribute.PRIORITY, works=False, hint=PriorityHint),
        AttributeSpec(Attribute.GROUP, works=False, hint=GroupHint, directory_only=True),
        AttributeSpec(Attribute.ACK, works=True, hint=AckHint),
        AttributeSpec(Attribute.DATASET, works=False, hint=DatasetHint, directory_only=True),
        AttributeSpec(Attribute.DURABILITY, works=True),
        AttributeSpec(Attribute.LAST_ERROR, works=True),
        AttributeSpec(Attribute.SERVED_FROM, works=True),
        AttributeSpec(Attribute.BLAKE3, works=True),
        AttributeSpec(Attribute.FORMAT, works=False),
        AttributeSpec(Attribute.STATUS, works=True),
    )
}


def attribute_to_read(name: str) -> AttributeSpec:
    """The documented attribute that getxattr of *name* asks for.

    Raises NoSuchAttributeError outside `user.`, NotSupportedError for what is not documented or not there yet.
    """
    if not name.startswith("user."):
        raise NoSuchAttributeError(f"{name!r} is not set: TurboFS keeps attributes in {PREFIX} only")
    return _documented(name)


def attribute_to_set(name: str) -> AttributeSpec:
    """The documented attribute that setxattr of *name* means.

    Raises NotSupportedError for what is not documented or not there yet, InvalidRequestError for a derived one.
    """
    spec = _documented(name)
    if not spec.settable:
        raise InvalidRequestError(
            f"{name} is derived: it can be read, not set", advice="`getfattr -n` reads it; docs/INTERFACE.md lists all"
        )
    return spec


def attribute_to_remove(name: str) -> AttributeSpec:
    """The documented attribute that removexattr of *name* means. Raises as the two above."""
    if not name.startswith("user."):
        raise NoSuchAttributeError(f"{name!r} is not set: TurboFS keeps attributes in {PREFIX} only")
    return attribute_to_set(name)


def parse_hint(spec: AttributeSpec, value: bytes, *, size_bytes: int | None) -> Hint:
    """Read the value of a settable attribute; *size_bytes* is the file's size, None for a directory.

    Raises InvalidRequestError for what cannot be parsed or cannot apply there, NotSupportedError for a form that comes
    with a later version.
    """
    if spec.hint is None:
        raise InvalidRequestError(f"{spec.attribute} is derived: it can be read, not set")
    if spec.directory_only and size_bytes is not None:
        raise InvalidRequestError(
            f"{spec.attribute} holds for directories, and this is a file", advice="set it on the directory above"
        )
    hint = spec.hint.parse(_text(spec, value))
    if isinstance(hint, PrefetchHint):
        if hint.tensors is not None:
            raise NotSupportedError(
                f"{spec.attribute}: tensors=… comes with a later version of TurboFS",
                advice="use `all`, or ranges=offset+length;…",
            )
        if size_bytes is not None:
            hint.validate(size_bytes)
    if isinstance(hint, AckHint) and hint.level == "replicated":
        raise NotSupportedError(
            f"{spec.attribute}: `replicated` needs other nodes, which comes with a later version of TurboFS",
            advice="use `persisted` or `staged`",
        )
    return hint


def format_status(document: Mapping[str, object], shrinkable: str, limit: int = DERIVED_LIMIT_BYTES) -> bytes:
    """*document* as JSON of at most *limit* bytes.

    Where it is longer, the list under the key *shrinkable* loses entries from its end, and `"KEY_omitted"` says how
    many: the result stays one valid document. Raises ValueError where it is too long even without them.
    """
    encoded = _json(document)
    if len(encoded) <= limit:
        return encoded
    entries = document[shrinkable]
    if not isinstance(entries, (list, tuple)):
        raise TypeError(f"{shrinkable!r} is not a list")
    low, high = 0, len(entries)  # entries[:low] fits (checked at the end), entries[:high] does not
    while high - low > 1:
        middle = (low + high) // 2
        fits = len(_json(_shortened(document, shrinkable, entries[:middle], len(entries)))) <= limit
        low, high = (middle, high) if fits else (low, middle)
    encoded = _json(_shortened(document, shrinkable, entries[:low], len(entries)))
    if len(encoded) > limit:
        raise ValueError(f"a status document of {len(encoded)} bytes is too long even without {shrinkable!r}")
    return encoded


def _documented(name: str) -> AttributeSpec:
    try:
        spec = CATALOGUE[Attribute(name)]
    except ValueError:
        working = ", ".join(each.attribute for each in CATALOGUE.values() if each.works)
        raise NotSupportedError(
            f"{name!r} is not an attribute of TurboFS, which keeps no others", advice=f"the attributes are: {working}"
        ) from None
    if not spec.works:
        raise NotSupportedError(
            f"{name} comes with a later version of TurboFS", advice="docs/INTERFACE.md says which attributes work now"
        )
    return spec


def _text(spec: AttributeSpec, value: bytes) -> str:
    example = spec.hint.example if spec.hint else ""
    advice = f"an accepted value is: {example}"
    if len(value) > VALUE_LIMIT_BYTES:
        raise InvalidRequestError(
            f"{spec.attribute}: the value has {len(value)} bytes; at most {VALUE_LIMIT_BYTES} are allowed",
            advice="name fewer ranges, or larger ones",
        )
    try:
        text = value.decode("utf-8").strip(" \t\r\n")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{spec.attribute}: the value is not UTF-8 at byte {error.start}", advice=advice
        ) from None
    if not text:
        raise InvalidRequestError(f"{spec.attribute}: the value is empty", advice=advice)
    return text


def _shortened(
    document: Mapping[str, object], key: str, kept: list[object] | tuple[object, ...], total: int
) -> dict[str, object]:
    return {**document, key: kept, f"{key}_omitted": total - len(kept)}


def _json(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, separators=(",", ":"), default=str).encode("utf-8")
