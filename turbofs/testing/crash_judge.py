"""Judges what a crash has left of what a job (`crash_jobs`) was promised."""

from __future__ import annotations

from collections.abc import Iterable

from turbofs.testing.crash_jobs import History, Opened, Tree


def difference(found: Tree, history: History) -> str | None:
    """How *found* differs from what was promised, in the nearest way to read it; None where it does not."""
    differences = [_differs(found, candidate, history) for candidate in history.candidates]
    return None if None in differences else differences[0]


def broken_promise(found: Tree, history: History) -> str | None:
    """What is wrong with *found* on a source that has not been told of everything yet; None: nothing.

    Each file is one that was promised at some time, whole, and a tracker file vouches for what it names. (A file that
    is renamed and then saved again before it is published may have the new content under the old name first.)
    """
    if not history.early:
        return difference(found, history)
    known = {data for state in (*history.states, *history.candidates) for data in state.values()}
    for path, data in found.items():
        if data not in known and not _may_be(data, path, history) and not _is_growing(data, path, history):
            return f"{path} has {_shown(data)}, which was never promised"
    tracker = found.get("job/latest")
    for path, data in history.checkpoints.get(tracker or b"", {}).items():
        if found.get(path) != data and (path in found or data is not None):
            return f"the tracker file names {tracker!r}, but {path} has {_shown(found.get(path))}"
    return None


def _is_growing(data: bytes | None, path: str, history: History) -> bool:
    """Whether *data* lies between two contents of a file that grew: it is appended in place."""
    name = path.rpartition("/")[2]
    known = [
        each for state in history.candidates + history.states for other, each in state.items() if _named(other, name)
    ]
    known += [opened.live for opened in history.opened if _named(opened.path, name)]
    return data is not None and any(
        before and after and data.startswith(before) and after.startswith(data) for before in known for after in known
    )


def _named(path: str, name: str) -> bool:
    return path.rpartition("/")[2] == name


def _differs(found: Tree, expected: Tree, history: History) -> str | None:
    for path in sorted({*found, *expected}):
        if path in found and path in expected and found[path] == expected[path]:
            continue
        if path in found and found[path] is not None and _may_be(found[path], path, history):
            continue
        return (
            f"{path} has {_shown(found[path]) if path in found else 'no name'}, "
            f"not {_shown(expected[path]) if path in expected else 'none'}"
        )
    return None


def _may_be(data: bytes | None, path: str, history: History) -> bool:
    """Whether *data* may be found as *path* because it was open: more of it than was promised, but nothing else."""
    if data is None:
        return False
    return any(_may_be_of(data, opened, history) for opened in _open_as(path, history.opened))


def _open_as(path: str, opened: Iterable[Opened]) -> list[Opened]:
    return [each for each in opened if _named(each.path, path.rpartition("/")[2])]


def _may_be_of(data: bytes, opened: Opened, history: History) -> bool:
    promised, live = opened.promised, opened.live
    if promised is None or len(data) < len(promised):
        return False
    if live.startswith(data) and live.startswith(promised):
        return True
    if opened.synced and history.early and len(data) <= max(len(live), len(promised)):
        # Written again after it was synced, through the same descriptor: each byte is the older or the newer one.
        longest = max(len(live), len(promised))
        older, newer = promised.ljust(longest, b"\0"), live.ljust(longest, b"\0")
        return all(byte in pair for byte, *pair in zip(data, older, newer, strict=False))
    return False


def _shown(data: bytes | None) -> str:
    return "a directory" if data is None else f"{len(data)} bytes {data[:12]!r}"
