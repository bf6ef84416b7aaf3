"""The reading half of the conformance suite."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from turbofs.errors import (
    BadNameError,
    InvalidRequestError,
    IsADirectoryTurboError,
    NameTooLongError,
    NotADirectoryTurboError,
    NotFoundError,
    NotSupportedError,
    StaleFileError,
)
from turbofs.model import AttributeChange, ByteRange, Change, FileKind, FileVersion
from turbofs.source.base import Capability, Source
from turbofs.testing.conformance_base import (
    ConformanceBase,
    append_to_file,
    content,
    exists,
    names_in,
    raises,
    read_file,
)

_DAY_NS = 24 * 3600 * 10**9


class ReadingConformance(ConformanceBase):
    """stat, list, open, read, versions, names, and what is not declared."""

    async def test_the_root_is_a_directory(self) -> None:
        async with self.make_source() as source:
            assert (await source.stat("/")).kind is FileKind.DIRECTORY
            assert await names_in(source, "/") == []

    async def test_connecting_again_does_no_harm(self) -> None:
        async with self.make_source() as source:
            await source.connect()
            assert (await source.stat("/")).kind is FileKind.DIRECTORY

    async def test_description_can_be_shown_as_json(self) -> None:
        async with self.make_source() as source:
            assert json.loads(json.dumps(source.describe()))["uri"] == source.uri

    async def test_stat_of_a_file(self) -> None:
        async with self.make_source() as source:
            await self.seed(source, "/d/f", content(1234))
            attributes = await source.stat("/d/f")
            assert attributes.kind is FileKind.FILE
            assert attributes.size == attributes.version.size == 1234
            assert attributes.mode == stat.S_IMODE(attributes.mode)
            assert abs(attributes.mtime_ns - time.time_ns()) < _DAY_NS  # nanoseconds, and not another unit
            assert (await source.stat("/d")).kind is FileKind.DIRECTORY

    async def test_stat_of_what_is_not_there(self) -> None:
        async with self.make_source() as source:
            await self.seed(source, "/f", b"x")
            for path in ("/g", "/g/h"):
                with raises(NotFoundError):
                    await source.stat(path)
                with raises(NotFoundError):
                    await source.stat_exact(path)
                with raises(NotFoundError):
                    await source.open(path)
                with raises(NotFoundError):
                    await names_in(source, path)
            with raises(NotADirectoryTurboError, NotFoundError):
                await source.stat("/f/x")

    async def test_wrong_kinds(self) -> None:
        async with self.make_source() as source:
            await self.seed(source, "/d/f", b"x")
            with raises(IsADirectoryTurboError):
                await source.open("/d")
            with raises(NotADirectoryTurboError):
                await names_in(source, "/d/f")

    async def test_list_gives_what_stat_gives(self) -> None:
        async with self.make_source() as source:
            await self.seed(source, "/d/one", content(1))
            await self.seed(source, "/d/two", content(2))
            await self.seed(source, "/d/sub/three", content(3))
            async with await source.list("/d") as listing:
                entries = {entry.name: entry.attributes for entry in await listing.next_batch()}
                assert not await listing.next_batch()
                assert not await listing.next_batch(), "the end of a listing stays its end"
            assert sorted(entries) == ["one", "sub", "two"]
            for name, listed in entries.items():
                single = await source.stat(f"/d/{name}")
                assert (listed.kind, listed.size, listed.mode) == (single.kind, single.size, single.mode)
                assert (listed.owner, listed.group, listed.mtime_ns) == (single.owner, single.group, single.mtime_ns)

    async def test_a_large_directory_comes_in_batches_once_each(self) -> None:
        async with self.make_source() as source:
            expected = {f"name-{number:06d}" for number in range(self.many_entries)}
            await self.seed_directory(source, "/many")
            async with trio.open_nursery() as nursery:
                places = trio.Semaphore(16)
                for name in expected:
                    await places.acquire()
                    nursery.start_soon(self._seed_within, places, source, f"/many/{name}")
            names = await names_in(source, "/many")
            assert len(names) == len(expected)
            assert set(names) == expected

    async def _seed_within(self, places: trio.Semaphore, source: Source, path: str) -> None:
        await self.seed_entry(source, path)
        places.release()

    async def test_a_listing_can_be_left_early(self) -> None:
        async with self.make_source() as source:
            await self.seed(source, "/d/f", b"")
            listing = await source.list("/d")
            await listing.aclose()
            await listing.aclose()

    async def test_read_ranges(self) -> None:
        data = content(100_003)
        size = len(data)
        cases = [
            (0, 1),
            (0, 4096),
            (1, 4095),
            (50_000, 30_000),
            (size - 1, 1),
            (size - 10, 100),
            (0, size),
            (0, size + 9),
        ]
        async with self.make_source() as source:
            await self.seed(source, "/f", data)
            file = await source.open("/f")
            assert file.version.size == size
            for offset, length in cases:
                buffer = bytearray(length)
                count = await file.read_into(offset, memoryview(buffer))
                assert count == min(length, size - offset)
                assert buffer[:count] == data[offset : offset + count]
            for offset in (size, size + 1, size * 100):
                assert await file.read_into(offset, memoryview(bytearray(10))) == 0
            assert await file.read_into(5, memoryview(bytearray())) == 0
            with raises(InvalidRequestError):
                await file.read_into(-1, memoryview(bytearray(10)))
            await file.aclose()
            await file.aclose()

    async def test_read_an_empty_file(self) -> None:
        async with self.make_source() as source:
            await self.seed(source, "/f", b"")
            assert (await source.stat("/f")).size == 0
            assert await read_file(source, "/f") == b""

    async def test_read_a_large_file_by_concurrent_reads(self) -> None:
        data = content(self.large_bytes)
        async with self.make_source() as source:
            await self.seed(source, "/f", data)
            file = await source.open("/f")
            buffer = bytearray(len(data))
            step = len(data) // 16 + 1
            async with trio.open_nursery() as nursery:
                for offset in range(0, len(data), step):
                    nursery.start_soon(file.read_into, offset, memoryview(buffer)[offset : offset + step])
            assert buffer == data
            await file.aclose()

    async def test_a_cancelled_read_leaves_the_buffer_alone(self) -> None:
        data = content(self.large_bytes)
        async with self.make_source() as source:
            await self.seed(source, "/f", data)
            file = await source.open("/f")
            buffer = bytearray(len(data))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(file.read_into, 0, memoryview(buffer))
                await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            buffer[:] = bytes(len(buffer))
            assert await read_file(source, "/f") == data  # long enough for a late write to show itself
            assert not any(buffer)
            await file.aclose()

    async def test_versions_tell_a_replaced_file(self) -> None:
        async with self.make_source() as source:
            await self.seed(source, "/f", content(5000, seed=1))
            before = (await source.stat_exact("/f")).version
            assert before.strong == (Capability.STRONG_VERSIONS in source.capabilities)
            assert before.compare((await source.stat_exact("/f")).version) is Change.SAME
            file = await source.open("/f")
            assert before.compare(file.version) is Change.SAME
            await self.seed(source, "/f", content(5000, seed=2))
            if before.strong:
                assert before.compare((await source.stat_exact("/f")).version) is Change.REPLACED
                await _old_bytes_or_stale(
                    source, file.version, partial(file.read_into, 100), content(5000, seed=1)[100:]
                )
            await file.aclose()
            assert await read_file(source, "/f") == content(5000, seed=2)

    async def test_an_open_file_that_is_deleted(self) -> None:
        async with self.make_source() as source:
            if Capability.DELETE not in source.capabilities:
                return
            await self.seed(source, "/f", content(5000))
            file = await source.open("/f")
            await source.delete("/f")
            await _old_bytes_or_stale(source, file.version, partial(file.read_into, 0), content(5000))
            await file.aclose()

    async def test_an_open_file_grows(self) -> None:
        async with self.make_source() as source:
            if Capability.APPEND not in source.capabilities:
                return
            await self.seed(source, "/f", content(5000))
            file = await source.open("/f")
            before = file.version
            await append_to_file(source, "/f", content(3000, seed=1))
            after = await file.refresh()
            assert after == file.version
            assert before.compare(after) is Change.GREW
            assert before.compare((await source.stat_exact("/f")).version) is Change.GREW
            buffer = bytearray(4000)
            assert await file.read_into(4000, memoryview(buffer)) == 4000
            assert buffer == content(5000)[4000:] + content(3000, seed=1)
            await file.aclose()

    async def test_unusual_names(self) -> None:
        names = ["ünïcode 💾", "a b", "%41%2F", "a+b&c=d", "#x?y", "'q'", ".hidden", "~", "x" * 200]
        async with self.make_source() as source:
            for name in names:
                await self.seed(source, f"/d/{name}", name.encode())
            assert sorted(await names_in(source, "/d")) == sorted(names)
            for name in names:
                assert await read_file(source, f"/d/{name}") == name.encode()

    async def test_names_that_are_not_utf8(self) -> None:
        path = "/caf\udce9"  # Latin-1, as PEP 383 carries it
        async with self.make_source() as source:
            if Capability.ARBITRARY_NAMES not in source.capabilities:
                with raises(BadNameError, NotFoundError):
                    await source.stat(path)
                with raises(BadNameError, NotFoundError):
                    await source.open(path)
                return
            await self.seed(source, path, b"x")
            assert await exists(source, path)
            assert await read_file(source, path) == b"x"

    async def test_names_that_are_too_long(self) -> None:
        async with self.make_source() as source:
            with raises(NameTooLongError, NotFoundError):
                await source.stat("/" + "x" * 256)

    async def test_paths_that_are_no_paths(self) -> None:
        async with self.make_source() as source:
            with raises(InvalidRequestError):
                await source.stat("relative")
            for path in ("/a/../b", "/./a", "/a//b", "/a\0b"):
                with raises(BadNameError):
                    await source.stat(path)

    async def test_links(self) -> None:
        async with self.make_source() as source:
            if Capability.SYMLINKS not in source.capabilities:
                return
            await self.seed(source, "/f", b"x")
            await source.make_symlink("/l", "no/such target")
            assert (await source.stat("/l")).kind is FileKind.SYMLINK
            assert await source.readlink("/l") == "no/such target"
            with raises(InvalidRequestError):
                await source.open("/l")
            with raises(InvalidRequestError):
                await source.readlink("/f")
            with raises(NotFoundError):
                await source.readlink("/g")
            await source.delete("/l")
            assert not await exists(source, "/l")

    async def test_space(self) -> None:
        async with self.make_source() as source:
            if Capability.SPACE in source.capabilities:
                space = await source.space()
                assert space.total_bytes is not None
                assert space.free_bytes is not None
                assert 0 <= space.free_bytes <= space.total_bytes

    async def test_block_locations(self) -> None:
        async with self.make_source() as source:
            if Capability.BLOCK_LOCATIONS not in source.capabilities:
                return
            await self.seed(source, "/f", content(5000))
            blocks = await source.block_locations("/f", ByteRange(100, 4000))
            assert min(block.range.start for block in blocks) <= 100
            assert max(block.range.stop for block in blocks) >= 4000
            assert all(block.hosts for block in blocks)

    async def test_what_is_not_declared_is_not_supported(self) -> None:
        async with self.make_source() as source:
            await self.seed(source, "/d/f", b"x")
            acts: dict[Capability, list[Callable[[], Awaitable[object]]]] = {
                Capability.SYMLINKS: [partial(source.readlink, "/d/f"), partial(source.make_symlink, "/l", "d/f")],
                Capability.SPACE: [source.space],
                Capability.BLOCK_LOCATIONS: [partial(source.block_locations, "/d/f", ByteRange(0, 1))],
                Capability.CREATE: [partial(source.create, "/n", replace=True)],
                Capability.EXCLUSIVE_CREATE: [partial(source.create, "/n", replace=False)],
                Capability.APPEND: [partial(source.append, "/d/f")],
                Capability.RENAME: [partial(source.rename, "/d/f", "/n", replace=False)],
                Capability.RENAME_REPLACE: [partial(source.rename, "/d/f", "/n", replace=True)],
                Capability.DELETE: [partial(source.delete, "/d/f")],
                Capability.DIRECTORIES: [
                    partial(source.make_directory, "/n"),
                    partial(source.delete_directory, "/d"),
                ],
                Capability.OWNERS: [partial(source.set_attributes, "/d/f", AttributeChange(mode=0o600))],
                Capability.TIMES: [partial(source.set_attributes, "/d/f", AttributeChange(mtime_ns=10**18))],
                Capability.REPLICATION: [partial(source.set_replication, "/d/f", 2)],
            }
            for capability, calls in acts.items():
                for call in calls if capability not in source.capabilities else []:
                    with raises(NotSupportedError):
                        await call()
            assert await read_file(source, "/d/f") == b"x"
            assert await names_in(source, "/") == ["d"]


async def _old_bytes_or_stale(
    source: Source, version: FileVersion, read: Callable[[memoryview], Awaitable[int]], expected: bytes
) -> None:
    """A file that was replaced or deleted gives its old bytes or ESTALE: never others, never an early end."""
    buffer = bytearray(len(expected))
    try:
        count = await read(memoryview(buffer))
    except StaleFileError:
        return
    assert (count, bytes(buffer)) == (len(expected), expected), f"{source.uri}: bytes that are not {version.token()}"
