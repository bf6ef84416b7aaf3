"""The writing half of the conformance suite: each test begins by asking for the capability that it is about."""

from __future__ import annotations

import time

import trio

from turbofs.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    IsADirectoryTurboError,
    NotADirectoryTurboError,
    NotEmptyError,
    NotFoundError,
)
from turbofs.model import AttributeChange, Change, FileKind
from turbofs.source.base import Capability, Source
from turbofs.testing.conformance_base import (
    ConformanceBase,
    append_to_file,
    content,
    exists,
    names_in,
    raises,
    read_file,
    write_file,
)


class WritingConformance(ConformanceBase):
    """create, append, sync, rename, delete, directories, attributes."""

    async def test_create_in_several_writes(self) -> None:
        data = content(300_000)
        async with self.make_source() as source:
            if Capability.CREATE not in source.capabilities:
                return
            writer = await source.create("/f", mode=0o640, replace=True)
            for start in range(0, len(data), 70_001):
                await writer.write(memoryview(data)[start : start + 70_001])
            await writer.write(memoryview(b""))
            await writer.aclose()
            await writer.abort()  # too late: an abort after completion takes nothing back
            assert await read_file(source, "/f") == data
            if Capability.OWNERS in source.capabilities:
                assert (await source.stat("/f")).mode == 0o640

    async def test_create_replaces_where_told_to(self) -> None:
        async with self.make_source() as source:
            if Capability.CREATE not in source.capabilities:
                return
            await write_file(source, "/f", content(5000))
            await write_file(source, "/f", b"short")
            assert await read_file(source, "/f") == b"short"
            assert await names_in(source, "/") == ["f"], "nothing temporary stays behind"

    async def test_create_where_it_cannot_be(self) -> None:
        async with self.make_source() as source:
            if not {Capability.CREATE, Capability.DIRECTORIES} <= source.capabilities:
                return
            await self.seed(source, "/f", b"x")
            await source.make_directory("/d")
            with raises(IsADirectoryTurboError, AlreadyExistsError):
                await source.create("/d", replace=True)
            with raises(NotFoundError):
                await source.create("/none/f", replace=True)
            with raises(NotADirectoryTurboError):
                await source.create("/f/g", replace=True)
            assert sorted(await names_in(source, "/")) == ["d", "f"]

    async def test_exclusive_create(self) -> None:
        async with self.make_source() as source:
            if Capability.EXCLUSIVE_CREATE not in source.capabilities:
                return
            await write_file(source, "/f", b"first", replace=False)
            with raises(AlreadyExistsError):
                await source.create("/f")
            assert await read_file(source, "/f") == b"first"

    async def test_one_of_several_exclusive_creators_wins(self) -> None:
        async with self.make_source() as source:
            if Capability.EXCLUSIVE_CREATE not in source.capabilities:
                return
            winners: list[int] = []
            async with trio.open_nursery() as nursery:
                for number in range(8):
                    nursery.start_soon(_create_exclusively, source, "/f", number, winners)
            assert len(winners) == 1
            assert await read_file(source, "/f") == b"%d" % winners[0]

    async def test_append(self) -> None:
        async with self.make_source() as source:
            if Capability.APPEND not in source.capabilities:
                return
            await self.seed(source, "/d/f", content(1000))
            before = (await source.stat_exact("/d/f")).version
            await append_to_file(source, "/d/f", content(500, seed=1))
            after = (await source.stat_exact("/d/f")).version
            assert await read_file(source, "/d/f") == content(1000) + content(500, seed=1)
            assert before.compare(after) is Change.GREW
            assert before.file_id == after.file_id
            with raises(NotFoundError):
                await source.append("/d/g")
            with raises(IsADirectoryTurboError):
                await source.append("/d")

    async def test_rename(self) -> None:
        async with self.make_source() as source:
            if Capability.RENAME not in source.capabilities:
                return
            await self.seed(source, "/d/f", b"f")
            await self.seed(source, "/d/g", b"g")
            await self.seed_directory(source, "/e")
            before = (await source.stat_exact("/d/f")).version
            await source.rename("/d/f", "/e/f", replace=False)
            assert not await exists(source, "/d/f")
            assert await read_file(source, "/e/f") == b"f"
            assert (await source.stat_exact("/e/f")).version.file_id == before.file_id
            with raises(AlreadyExistsError):
                await source.rename("/d/g", "/e/f", replace=False)
            assert await read_file(source, "/d/g") == b"g"
            assert await read_file(source, "/e/f") == b"f"
            with raises(NotFoundError):
                await source.rename("/d/none", "/d/n", replace=False)
            with raises(NotFoundError):
                await source.rename("/d/g", "/none/g", replace=False)

    async def test_rename_a_directory_with_what_is_inside(self) -> None:
        async with self.make_source() as source:
            if Capability.RENAME not in source.capabilities:
                return
            await self.seed(source, "/d/sub/f", b"f")
            await source.rename("/d", "/e", replace=False)
            assert not await exists(source, "/d")
            assert await read_file(source, "/e/sub/f") == b"f"
            with raises(InvalidRequestError):
                await source.rename("/e", "/e/sub/inside", replace=False)
            assert await read_file(source, "/e/sub/f") == b"f"

    async def test_rename_that_replaces(self) -> None:
        async with self.make_source() as source:
            if Capability.RENAME_REPLACE not in source.capabilities:
                return
            await self.seed(source, "/f", b"f")
            await self.seed(source, "/g", b"g")
            await self.seed(source, "/d/inside", b"i")
            await source.rename("/f", "/g", replace=True)
            assert not await exists(source, "/f")
            assert await read_file(source, "/g") == b"f"
            await source.rename("/g", "/h", replace=True)
            assert await read_file(source, "/h") == b"f"
            with raises(IsADirectoryTurboError, AlreadyExistsError, NotEmptyError):
                await source.rename("/h", "/d", replace=True)
            with raises(NotFoundError):
                await source.rename("/none", "/h", replace=True)
            assert await read_file(source, "/h") == b"f"
            assert await read_file(source, "/d/inside") == b"i"

    async def test_delete(self) -> None:
        async with self.make_source() as source:
            if Capability.DELETE not in source.capabilities:
                return
            await self.seed(source, "/d/f", b"f")
            await self.seed(source, "/d/g", b"g")
            await source.delete("/d/f")
            assert not await exists(source, "/d/f")
            with raises(NotFoundError):
                await source.delete("/d/f")
            with raises(IsADirectoryTurboError):
                await source.delete("/d")
            assert await read_file(source, "/d/g") == b"g"

    async def test_directories(self) -> None:
        async with self.make_source() as source:
            if Capability.DIRECTORIES not in source.capabilities:
                return
            await source.make_directory("/d", mode=0o750)
            attributes = await source.stat("/d")
            assert attributes.kind is FileKind.DIRECTORY
            if Capability.OWNERS in source.capabilities:
                assert attributes.mode == 0o750
            assert await names_in(source, "/d") == []
            with raises(AlreadyExistsError):
                await source.make_directory("/d")
            with raises(NotFoundError):
                await source.make_directory("/none/d")
            await self.seed(source, "/d/f", b"f")
            with raises(NotEmptyError):
                await source.delete_directory("/d")
            with raises(NotADirectoryTurboError):
                await source.delete_directory("/d/f")
            assert await read_file(source, "/d/f") == b"f"
            await source.delete("/d/f")
            await source.delete_directory("/d")
            assert not await exists(source, "/d")
            with raises(NotFoundError):
                await source.delete_directory("/d")

    async def test_set_mode_and_owner(self) -> None:
        async with self.make_source() as source:
            if Capability.OWNERS not in source.capabilities:
                return
            await self.seed(source, "/f", b"f")
            before = await source.stat("/f")
            change = AttributeChange(mode=0o604, owner=before.owner, group=before.group)
            await source.set_attributes("/f", change)
            after = await source.stat("/f")
            assert (after.mode, after.owner, after.group) == (0o604, before.owner, before.group)
            assert after.mtime_ns == before.mtime_ns
            assert await read_file(source, "/f") == b"f"
            with raises(NotFoundError):
                await source.set_attributes("/none", change)

    async def test_set_times(self) -> None:
        async with self.make_source() as source:
            if Capability.TIMES not in source.capabilities:
                return
            await self.seed(source, "/f", b"f")
            mtime_ns = (time.time_ns() - 3600 * 10**9) // 10**6 * 10**6  # HDFS keeps milliseconds
            await source.set_attributes("/f", AttributeChange(mtime_ns=mtime_ns))
            assert (await source.stat("/f")).mtime_ns == mtime_ns
            assert await read_file(source, "/f") == b"f"

    async def test_set_replication(self) -> None:
        async with self.make_source() as source:
            if Capability.REPLICATION not in source.capabilities:
                return
            await self.seed(source, "/f", b"f")
            copies = (await source.stat("/f")).replication + 1
            await source.set_replication("/f", copies)
            assert (await source.stat("/f")).replication == copies


async def _create_exclusively(source: Source, path: str, number: int, winners: list[int]) -> None:
    try:
        await write_file(source, path, b"%d" % number, replace=False)
    except AlreadyExistsError:
        return
    winners.append(number)
