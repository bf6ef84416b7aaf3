"""What the parts of the conformance suite share: the hooks that a source's tests fill in, and small helpers."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress

from turbofs.errors import AlreadyExistsError, TurboError
from turbofs.model import ROOT, split
from turbofs.source.base import Capability, Source


class ConformanceBase(ABC):
    """The hooks. A test class derives from `SourceConformance`, defines `make_source`, and is collected by pytest."""

    many_entries: int = 2500
    """How many names the large directory has: more than two batches of the source."""
    large_bytes: int = 3 << 20
    """Size of the large file: more than one block or part where that is cheap to arrange."""
    knows_writers: bool = False
    """Whether the source keeps a record of who has a file open for writing."""

    @abstractmethod
    def make_source(self) -> AbstractAsyncContextManager[Source]:
        """A connected source whose root is an empty directory; leaving the context closes it."""

    async def seed(self, source: Source, path: str, data: bytes) -> None:
        """Put a file there, replacing what has the name and making its directories; a read-only source overrides it."""
        await self.seed_directory(source, split(path)[0])
        await write_file(source, path, data)

    async def seed_directory(self, source: Source, path: str) -> None:
        """Make a directory and those above it, where directories exist on their own."""
        if path == ROOT or Capability.DIRECTORIES not in source.capabilities:
            return
        await self.seed_directory(source, split(path)[0])
        with suppress(AlreadyExistsError):
            await source.make_directory(path)

    async def seed_entry(self, source: Source, path: str) -> None:
        """Put any name into a large directory, as cheaply as the source can."""
        if Capability.DIRECTORIES in source.capabilities:
            await source.make_directory(path)  # far cheaper than a file on HDFS
        else:
            await self.seed(source, path, b"")


def content(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes in which every range is recognisable."""
    return random.Random(seed).randbytes(size_bytes)


async def write_file(source: Source, path: str, data: bytes, *, replace: bool = True) -> None:
    """Create one file whole."""
    writer = await source.create(path, replace=replace)
    await writer.write(memoryview(data))
    await writer.aclose()


async def append_to_file(source: Source, path: str, data: bytes) -> None:
    """Append *data* and complete the file."""
    writer = await source.append(path)
    await writer.write(memoryview(data))
    await writer.aclose()


async def read_file(source: Source, path: str) -> bytes:
    """The whole content of the file that has this name now."""
    file = await source.open(path)
    try:
        buffer = bytearray(file.version.size)
        count = await file.read_into(0, memoryview(buffer))
        assert count == len(buffer), f"{path}: {count} of {len(buffer)} bytes"
        return bytes(buffer)
    finally:
        await file.aclose()


async def names_in(source: Source, path: str) -> list[str]:
    """All names in a directory, in the source's order."""
    names: list[str] = []
    async with await source.list(path) as listing:
        while batch := await listing.next_batch():
            names += [entry.name for entry in batch]
    return names


async def exists(source: Source, path: str) -> bool:
    """Whether a name is there, by its directory's listing and by stat, which must agree."""
    parent, name = split(path)
    listed = name in await names_in(source, parent)
    try:
        await source.stat(path)
    except TurboError:
        assert not listed, f"{path} is listed, and stat does not find it"
        return False
    assert listed, f"stat finds {path}, and it is not listed"
    return True


@contextmanager
def raises(*kinds: type[TurboError]) -> Iterator[None]:
    """Inside, exactly one of these errors must come."""
    try:
        yield
    except kinds:
        return
    except TurboError as error:
        raise AssertionError(f"{type(error).__name__} ({error}) instead of {_names(kinds)}") from error
    raise AssertionError(f"no error instead of {_names(kinds)}")


def _names(kinds: tuple[type[TurboError], ...]) -> str:
    return " or ".join(kind.__name__ for kind in kinds)
