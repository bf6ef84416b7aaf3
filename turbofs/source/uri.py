"""What a user may write as SOURCE, taken apart and checked. Knows no client."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass

from turbofs.errors import ConfigError

ACCEPTED = (
    "hdfs://HOST[:PORT]/PATH",
    "hdfs://NAMESERVICE/PATH",
    "file:///PATH",
    "s3://BUCKET/PREFIX",
    "gs://BUCKET/PREFIX",
    "memory:",
)
_WITH_AUTHORITY = {"hdfs": "a NameNode (HOST[:PORT]) or name service", "s3": "a bucket", "gs": "a bucket"}


@dataclass(frozen=True)
class SourceUri:
    """One source: `path` is absolute, decoded and without a trailing "/" ("/" for the top)."""

    scheme: str
    authority: str
    """HOST[:PORT], NAMESERVICE or BUCKET; empty for `file` and `memory`."""
    path: str


def parse_source_uri(text: str) -> SourceUri:
    """Take *text* apart. Raises ConfigError with what is accepted."""
    if text == "memory:":
        return SourceUri("memory", "", "/")
    scheme, colon, rest = text.partition(":")
    scheme = scheme.lower()
    if not colon or "/" in scheme:
        hint = f"write file://{text}" if text.startswith("/") else "write file:///PATH with the absolute path"
        raise _refused(text, f"it has no scheme; for a local tree {hint}")
    if scheme == "memory":
        raise _refused(text, "`memory:` takes nothing after the colon")
    if scheme != "file" and scheme not in _WITH_AUTHORITY:
        raise _refused(text, f"unknown scheme {scheme!r}")
    if not rest.startswith("//"):
        raise _refused(text, f"`//` must follow {scheme}:")
    authority, slash, path = rest[2:].partition("/")
    for mark, what in (("?", "a query string"), ("#", "a fragment")):
        if mark in rest:
            raise _refused(text, f"{what} is not accepted; where {mark!r} is part of a name, write %{ord(mark):02X}")
    _check_authority(text, scheme, authority)
    return SourceUri(scheme, authority, _decoded_path(text, slash + path))


def _check_authority(text: str, scheme: str, authority: str) -> None:
    if scheme == "file":
        if authority:
            raise _refused(text, "file: takes an absolute path on this machine, after three slashes")
        return
    if not authority:
        raise _refused(text, f"{_WITH_AUTHORITY[scheme]} must follow {scheme}://")
    if "@" in authority:
        raise _refused(text, "a user or a key does not belong in it; set the user in the configuration or environment")
    host, colon, port = authority.partition(":")
    if colon and (
        scheme != "hdfs" or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536
    ):
        raise _refused(text, f"{authority!r} is not {_WITH_AUTHORITY[scheme]}")


def _decoded_path(text: str, path: str) -> str:
    decoded = urllib.parse.unquote(path, errors="surrogateescape").rstrip("/") or "/"
    names = decoded[1:].split("/") if decoded != "/" else []
    if any(name in {"", ".", ".."} for name in names) or "\0" in decoded:
        raise _refused(text, "its path has an empty name, '.', '..' or NUL in it")
    return decoded


def _refused(text: str, why: str) -> ConfigError:
    return ConfigError(f"cannot use {text!r} as SOURCE: {why}", advice=f"SOURCE is one of {', '.join(ACCEPTED)}")
