"""From files, `-o` options and flags to one `Config`: flags win over `-o`, that over files, those over defaults.

A key is a field of a room's dataclass without its unit (`attribute_timeout_s` is `attribute_timeout`), in the table
of that room. What `turbofs mount` has a flag for is also a key of `[mount]`: `memory`, `client`, `staging_dir`,
`staging_size`. Values carry their unit: sizes "4GiB", times "500ms". Unknown tables and keys are refused with the nearest
one that exists.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from turbofs.config import Config, FsConfig, MountConfig, ReadConfig, SourceConfig, WriteConfig
from turbofs.errors import ConfigError, InvalidRequestError
from turbofs.limits import default_memory_bytes
from turbofs.units import format_size, parse_duration, parse_size

SYSTEM_FILE = Path("/etc/turbofs/turbofs.toml")
_ROOMS: dict[str, type] = {
    "mount": MountConfig,
    "source": SourceConfig,
    "read": ReadConfig,
    "write": WriteConfig,
    "fs": FsConfig,
}
_ALIASES = {
    ("mount", "memory"): ("read", "memory"),
    ("mount", "client"): ("source", "client"),
    ("mount", "staging_dir"): ("write", "staging_dir"),
    ("mount", "staging_size"): ("write", "staging_size"),
}
_SUFFIXES = {"_bytes": "size", "_s": "time", "_kib": "kib"}
_CHOICES = {
    ("source", "client"): ("native", "libhdfs"),
    ("mount", "log_format"): ("auto", "json", "console"),
    ("mount", "log_level"): ("debug", "info", "warning", "error"),
}
_MAY_BE_ZERO = {
    ("fs", "attribute_timeout"),
    ("fs", "owner_timeout"),
    ("fs", "space_refresh"),
    ("mount", "wait"),
    ("write", "stall"),
    ("write", "drain"),
}
_LEAST = {
    ("write", "staging_size"): 16 << 20,
    ("read", "memory"): 32 << 20,
    ("read", "extent"): 64 << 10,
    ("read", "first_extent"): 4 << 10,
}

_LEAST_EXTENTS = 4  # a demanded one beside what is read ahead; see read/memory_budget.py

# What mount(8), fstab and systemd add to every mount: not ours to act on, and no mistake either.
# fmt: off
_GENERIC_OPTIONS = frozenset({
    "defaults", "rw", "auto", "noauto", "user", "nouser", "users", "owner", "group", "nofail", "_netdev", "dev",
    "nodev", "suid", "nosuid", "exec", "noexec", "atime", "noatime", "diratime", "nodiratime", "relatime",
    "norelatime", "strictatime", "async", "sync", "remount",
})
# fmt: on

Values = dict[tuple[str, str], object]
"""(room, key) → a value of the field's type."""


@dataclass(frozen=True, slots=True)
class _Key:
    room: str
    name: str
    field: str
    kind: str
    """`str`, `path`, `bool`, `int`, `size`, `time`, `kib`"""


def _keys() -> Iterator[_Key]:
    for room, room_class in _ROOMS.items():
        hints = typing.get_type_hints(room_class)
        for field in dataclasses.fields(room_class):
            kinds = typing.get_args(hints[field.name]) if isinstance(hints[field.name], types.UnionType) else ()
            plain = next((kind for kind in kinds if kind is not type(None)), hints[field.name])
            suffix = next((suffix for suffix in _SUFFIXES if field.name.endswith(suffix)), "")
            kind = _SUFFIXES[suffix] if suffix else {Path: "path"}.get(plain, plain.__name__)
            yield _Key(room, field.name.removesuffix(suffix), field.name, kind)


_KEYS = {(key.room, key.name): key for key in _keys()}


def default_files() -> list[Path]:
    """The files read without being named: the system's, then the user's; later ones win."""
    import platformdirs  # costs 10 ms, and only `turbofs mount` and `doctor` need it

    files = [SYSTEM_FILE, platformdirs.user_config_path("turbofs") / "turbofs.toml"]
    return [file for file in files if file.is_file()]


def load_file(path: Path) -> Values:
    """The settings of one TOML file. Raises ConfigError naming the file, the key and what would be right."""
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", advice="name a readable TOML file with --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}", advice="see docs/INTERFACE.md for an example") from error
    values: Values = {}
    for room, table in document.items():
        if room not in _ROOMS:
            raise ConfigError(f"{path}: unknown table [{room}]{_nearest(room, _ROOMS)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {room} must be a table: write [{room}] on a line of its own")
        for name, value in table.items():
            key = _key(room, name, str(path))
            _put(values, key, _typed(key, value, f"{path}: [{room}] {name}"), str(path))
    return values


def parse_options(options: Iterable[str]) -> Values:
    """The settings in `-o` texts such as "memory=4GiB,allow_other,fs.attribute_timeout=0s".

    A bare key stands for `[mount]`; keys of other rooms are written with the room. Options that belong to mount(8)
    (rw, nodev, x-…) are passed over; `ro` is `read_only`.
    """
    values: Values = {}
    for option in (part.strip() for text in options for part in text.split(",")):
        name, equals, value = option.partition("=")
        if not option or name in _GENERIC_OPTIONS or name.startswith(("x-", "X-", "comment")):
            continue
        name = "read_only" if name == "ro" else name
        room, dot, bare = name.rpartition(".")
        key = _key(room if dot else "mount", bare, "-o")
        if not equals and key.kind != "bool":
            raise ConfigError(f"-o {name}: needs a value, as in {name}=…")
        _put(values, key, _typed(key, value if equals else True, f"-o {name}"), "-o")
    return values


def flag_values(**flags: object) -> Values:
    """Settings from command-line flags by their `[mount]` names; None means that the flag was not given."""
    values: Values = {}
    for name, value in flags.items():
        if value is not None:
            key = _key("mount", name, "flags")
            _put(values, key, _typed(key, value, f"--{name.replace('_', '-')}"), "flags")
    return values


def build_config(*layers: Values) -> Config:
    """One Config from *layers*, later ones winning. Raises ConfigError where no source or directory is named.

    The memory budget is made definite here, and must hold four of the largest extents.
    """
    merged: Values = {}
    for layer in layers:
        merged.update(layer)
    for name, what in (("source", "no source is named"), ("mountpoint", "no directory is named")):
        if ("mount", name) not in merged:
            raise ConfigError(what, advice="use `turbofs mount SOURCE DIR`, or set it under [mount]")
    merged.setdefault(("read", "memory"), default_memory_bytes())
    config = _assemble(merged)
    memory_bytes, extent_bytes = config.read.memory_bytes or 0, config.read.extent_bytes
    if memory_bytes < _LEAST_EXTENTS * extent_bytes:
        raise ConfigError(
            f"a memory budget of {format_size(memory_bytes)} does not hold {_LEAST_EXTENTS} extents of "
            f"{format_size(extent_bytes)}",
            advice="raise memory (or the cgroup's limit, of which it is a quarter by default), or lower read.extent",
        )
    soft_bytes, hard_bytes = config.write.staging_soft_bytes, config.write.staging_size_bytes
    if soft_bytes is not None and hard_bytes is not None and soft_bytes > hard_bytes:
        raise ConfigError(
            f"write.staging_soft ({format_size(soft_bytes)}) is above staging_size ({format_size(hard_bytes)})",
            advice="writers are slowed from staging_soft on and refused beyond staging_size: it must be the smaller one",
        )
    return config


def with_mountpoint(config: Config, mountpoint: Path) -> Config:
    """*config* for the mount point as it was resolved."""
    return dataclasses.replace(config, mount=dataclasses.replace(config.mount, mountpoint=mountpoint))


def to_document(config: Config) -> dict[str, dict[str, object]]:
    """*config* as a JSON document, for the daemon's child process. `from_document` reads it back."""
    return {
        room: {name: str(value) if isinstance(value, Path) else value for name, value in fields.items()}
        for room, fields in dataclasses.asdict(config).items()
    }


def from_document(document: Mapping[str, Mapping[str, object]]) -> Config:
    """The Config that `to_document` wrote."""
    values: Values = {}
    for key in _KEYS.values():
        value = document[key.room][key.field]
        values[key.room, key.name] = Path(value) if key.kind == "path" and isinstance(value, str) else value
    return _assemble(values)


def _assemble(values: Values) -> Config:
    fields: dict[str, dict[str, typing.Any]] = {room: {} for room in _ROOMS}
    for place, value in values.items():
        fields[place[0]][_KEYS[place].field] = value
    return Config(**{room: room_class(**fields[room]) for room, room_class in _ROOMS.items()})


def _key(room: str, name: str, where: str) -> _Key:
    if room not in _ROOMS:
        raise ConfigError(f"{where}: unknown table {room!r}{_nearest(room, _ROOMS)}")
    place = (room, name.replace("-", "_"))
    place = _ALIASES.get(place, place)
    if place not in _KEYS:
        names = [key.name for key in _KEYS.values() if key.room == room]
        names += [alias for alias_room, alias in _ALIASES if alias_room == room]
        elsewhere = [key.room for key in _KEYS.values() if key.name == place[1]]
        hint = f"; it belongs in [{elsewhere[0]}]" if elsewhere else _nearest(name, names)
        raise ConfigError(f"{where}: unknown key {name!r} in [{room}]{hint}")
    return _KEYS[place]


def _put(values: Values, key: _Key, value: object, where: str) -> None:
    place = (key.room, key.name)
    if place in values and values[place] != value:
        raise ConfigError(f"{where}: {key.name} is set twice, to different values")
    values[place] = value


def _nearest(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def _typed(key: _Key, value: object, where: str) -> object:
    """*value* as the field's type, from TOML (typed) or from text. Raises ConfigError."""
    try:
        result = _CONVERT[key.kind](value)
    except InvalidRequestError as error:
        raise ConfigError(f"{where}: {error}", advice=error.advice) from error
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: {value!r} is not {_EXPECTED[key.kind]}") from None
    place = (key.room, key.name)
    if place in _CHOICES and result not in _CHOICES[place]:
        raise ConfigError(f"{where}: {value!r} is not one of {', '.join(_CHOICES[place])}")
    if isinstance(result, int | float) and not isinstance(result, bool) and place not in _MAY_BE_ZERO:
        least = _LEAST.get(place)
        if least is not None and result < least:
            raise ConfigError(f"{where}: {value!r} is too small; at least {least >> 10} KiB")
        if result <= 0:
            raise ConfigError(f"{where}: {value!r} must be above 0")
    return result


def _to_str(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError
    return value


def _to_path(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise TypeError
    path = Path(value).expanduser()
    if not path.is_absolute():
        raise ValueError
    return path


def _to_bool(value: object) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise TypeError


def _to_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError
    return int(value)


def _to_size(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return parse_size(_to_str(value))


def _to_time(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    return parse_duration(_to_str(value))


_CONVERT: dict[str, typing.Callable[[object], object]] = {
    "str": _to_str,
    "path": _to_path,
    "bool": _to_bool,
    "int": _to_int,
    "size": _to_size,
    "time": _to_time,
    "kib": lambda value: _to_size(value) // 1024 if isinstance(value, str) else _to_int(value),
}
_EXPECTED = {
    "str": "a text",
    "path": "an absolute path",
    "bool": "true or false",
    "int": "a whole number",
    "size": "a size such as 512MiB or 4GiB",
    "time": "a time such as 500ms, 30s or 2m",
    "kib": "a size such as 4MiB",
}
