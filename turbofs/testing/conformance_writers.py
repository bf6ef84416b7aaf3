"""The part of the conformance suite about files that are open: who sees what of them, while they are renamed or given up."""

from __future__ import annotations

from turbofs.errors import IsADirectoryTurboError, NotFoundError, NotSupportedError
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

_RENAMED_WHILE_WRITTEN = frozenset(
    {
        Capability.EXCLUSIVE_CREATE,
        Capability.SYNC,
        Capability.APPEND,
        Capability.RENAME,
        Capability.RENAME_REPLACE,
        Capability.DELETE,
    }
)


class OpenFileConformance(ConformanceBase):
    """Visibility, `being_written`, abort, and renames under an open reader or writer."""

    async def test_abort_takes_a_new_file_back(self) -> None:
        async with self.make_source() as source:
            if Capability.CREATE not in source.capabilities:
                return
            writer = await source.create("/f", replace=True)
            await writer.write(memoryview(content(1000)))
            await writer.abort()
            await writer.abort()
            assert not await exists(source, "/f")
            await write_file(source, "/f", b"next")  # no lease was left behind
            assert await read_file(source, "/f") == b"next"

    async def test_whether_a_file_is_being_written(self) -> None:
        async with self.make_source() as source:
            await self.seed(source, "/d/f", b"f")
            assert not await source.being_written("/d/f")
            with raises(NotFoundError):
                await source.being_written("/d/none")
            with raises(IsADirectoryTurboError):
                await source.being_written("/d")
            if {Capability.CREATE, Capability.SYNC} <= source.capabilities:
                writer = await source.create("/g", replace=True)
                await writer.write(memoryview(b"begun"))
                await writer.sync()
                assert await source.being_written("/g") is self.knows_writers
                await writer.aclose()
                assert not await source.being_written("/g")
            if Capability.APPEND in source.capabilities:
                writer = await source.append("/d/f")
                assert await source.being_written("/d/f") is self.knows_writers
                await writer.abort()
                assert not await source.being_written("/d/f")
                assert await read_file(source, "/d/f") == b"f"

    async def test_what_is_synced_is_visible(self) -> None:
        async with self.make_source() as source:
            if not {Capability.SYNC, Capability.CREATE} <= source.capabilities:
                return
            writer = await source.create("/f", replace=True)
            await writer.write(memoryview(content(1000)))
            await writer.sync()
            assert await read_file(source, "/f") == content(1000)
            await writer.write(memoryview(content(500, seed=1)))
            await writer.sync()
            await writer.sync()
            assert await read_file(source, "/f") == content(1000) + content(500, seed=1)
            await writer.aclose()
            assert await read_file(source, "/f") == content(1000) + content(500, seed=1)

    async def test_a_file_that_cannot_be_synced_appears_when_it_is_complete(self) -> None:
        async with self.make_source() as source:
            if Capability.CREATE not in source.capabilities or Capability.SYNC in source.capabilities:
                return
            await self.seed(source, "/old", b"before")
            for path, before in (("/new", None), ("/old", b"before")):
                for complete in (False, True):
                    writer = await source.create(path, replace=True)
                    await writer.write(memoryview(content(300_000)))
                    with raises(NotSupportedError):
                        await writer.sync()
                    assert await _content_or_none(source, path) == before
                    await (writer.aclose() if complete else writer.abort())
                    assert await _content_or_none(source, path) == (content(300_000) if complete else before)
            assert sorted(await names_in(source, "/")) == ["new", "old"]

    async def test_an_open_file_that_lost_its_name_is_read_to_its_end(self) -> None:
        async with self.make_source() as source:
            if not {Capability.KEEPS_OPEN, Capability.RENAME_REPLACE, Capability.DELETE} <= source.capabilities:
                return
            for act in ("replaced", "deleted"):
                await self.seed(source, "/f", content(300_000))
                await self.seed(source, "/g", content(300_000, seed=1))
                file = await source.open("/f")
                buffer = bytearray(300_000)
                assert await file.read_into(0, memoryview(buffer)[:1000]) == 1000
                if act == "replaced":
                    await source.rename("/g", "/f", replace=True)
                else:
                    await source.delete("/f")
                assert await file.read_into(1000, memoryview(buffer)[1000:]) == 299_000
                assert buffer == content(300_000), act
                await file.aclose()

    async def test_a_writer_goes_on_after_its_file_was_renamed(self) -> None:
        """As a mount shows a new file at its first fsync: what is synced under a temporary name is renamed, and grows."""
        first, second, third = content(100_000), content(300, seed=1), content(200_000, seed=2)
        async with self.make_source() as source:
            if not source.capabilities >= _RENAMED_WHILE_WRITTEN:
                return
            await self.seed(source, "/d/there", b"old")
            for final, replace in (("/d/new", False), ("/d/there", True)):
                writer = await source.create("/d/.temporary")
                await writer.write(memoryview(first))
                await writer.sync()
                await source.rename("/d/.temporary", final, replace=replace)
                assert await read_file(source, final) == first
                await writer.write(memoryview(second))
                await writer.sync()
                assert await read_file(source, final) == first + second
                await writer.write(memoryview(third))
                await writer.aclose()
                await writer.abort()
                assert await read_file(source, final) == first + second + third
                assert not await source.being_written(final)
            assert sorted(await names_in(source, "/d")) == ["new", "there"]

    async def test_an_abort_after_a_rename_leaves_what_was_synced_and_other_files_alone(self) -> None:
        async with self.make_source() as source:
            if not source.capabilities >= _RENAMED_WHILE_WRITTEN:
                return
            await self.seed_directory(source, "/d")
            for number, synced in enumerate((True, False)):
                writer = await source.create("/d/.temporary")
                await writer.write(memoryview(content(1000)))
                if synced:
                    await writer.sync()
                await source.rename("/d/.temporary", f"/d/{number}", replace=False)
                await writer.write(memoryview(content(500, seed=1)))
                await write_file(source, "/d/.temporary", b"another", replace=False)
                await writer.abort()
                assert await read_file(source, "/d/.temporary") == b"another"
                kept = await read_file(source, f"/d/{number}")
                assert (content(1000) + content(500, seed=1)).startswith(kept)
                assert len(kept) >= 1000 * synced
                assert not await source.being_written(f"/d/{number}")
                await append_to_file(source, f"/d/{number}", b"next")  # no lease was left behind
                await source.delete("/d/.temporary")

    async def test_a_writer_goes_on_after_a_directory_above_was_renamed(self) -> None:
        async with self.make_source() as source:
            if not {*_RENAMED_WHILE_WRITTEN, Capability.DIRECTORIES} <= source.capabilities:
                return
            await self.seed_directory(source, "/d")
            writer, aborted = await source.create("/d/f"), await source.create("/d/g")
            await writer.write(memoryview(content(1000)))
            await aborted.write(memoryview(content(1000)))
            await source.rename("/d", "/e", replace=False)
            await self.seed_directory(source, "/d")
            await writer.sync()
            assert await read_file(source, "/e/f") == content(1000)
            await writer.write(memoryview(content(500, seed=1)))
            await writer.aclose()
            await aborted.abort()
            assert await read_file(source, "/e/f") == content(1000) + content(500, seed=1)
            assert (await names_in(source, "/d"), await names_in(source, "/e")) == ([], ["f"])


async def _content_or_none(source: Source, path: str) -> bytes | None:
    return await read_file(source, path) if await exists(source, path) else None
