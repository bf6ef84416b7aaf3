"""Local trees."""

import errno
import os
import socket
import stat
import threading
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from turbofs.config import SourceConfig
from turbofs.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    InvalidRequestError,
    NotADirectoryTurboError,
    NotFoundError,
    NotSupportedError,
    ShortReadError,
    StaleFileError,
    TurboError,
)
from turbofs.model import AttributeChange, Change, FileKind
from turbofs.source import at_calls, local_files
from turbofs.source.file import FileSource
from turbofs.testing.conformance import SourceConformance
from turbofs.testing.conformance_base import append_to_file, content, names_in, read_file, write_file


@asynccontextmanager
async def connected(root):
    source = FileSource(root.as_uri(), SourceConfig(), trio.CapacityLimiter(8))
    await source.connect()
    try:
        yield source
    finally:
        await source.aclose()


@pytest.fixture
async def source(tmp_path):
    async with connected(tmp_path) as source:
        yield source


class TestFileSource(SourceConformance):
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path):
        self.root = tmp_path

    def make_source(self):
        return connected(self.root)


# --- the root


async def test_a_root_that_is_not_there(tmp_path):
    with pytest.raises(NotFoundError):
        async with connected(tmp_path / "none"):
            pass


async def test_a_root_that_is_a_file(tmp_path):
    (tmp_path / "f").write_bytes(b"f")
    with pytest.raises(NotADirectoryTurboError):
        async with connected(tmp_path / "f"):
            pass


async def test_a_root_with_unusual_characters(tmp_path):
    root = tmp_path / "a b%#?ü"
    root.mkdir()
    (root / "f").write_bytes(b"f")
    async with connected(root) as source:
        assert await read_file(source, "/f") == b"f"


async def test_before_connecting_and_after_closing(tmp_path):
    source = FileSource(tmp_path.as_uri(), SourceConfig(), trio.CapacityLimiter(1))
    with pytest.raises(TurboError, match="not connected"):
        await source.stat("/")
    await source.connect()
    await source.connect()
    await source.aclose()
    await source.aclose()
    with pytest.raises(TurboError, match="not connected"):
        await source.stat("/")


async def test_the_root_cannot_be_changed_away(source):
    for act in (
        partial(source.delete, "/"),
        partial(source.delete_directory, "/"),
        partial(source.rename, "/", "/x", replace=False),
        partial(source.create, "/", replace=True),
        partial(source.make_directory, "/"),
    ):
        with pytest.raises(TurboError):
            await act()
    assert await names_in(source, "/") == []


# --- links and special files


async def test_no_link_leads_out_of_the_root(source, tmp_path, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret").write_bytes(b"secret")
    (tmp_path / "link").symlink_to(outside)
    (tmp_path / "file").symlink_to(outside / "secret")
    assert (await source.stat("/link")).kind is FileKind.SYMLINK
    assert await source.readlink("/link") == str(outside)
    for act in (
        partial(source.stat, "/link/secret"),
        partial(source.open, "/link/secret"),
        partial(source.list, "/link"),
        partial(source.create, "/link/new", replace=True),
        partial(source.delete, "/link/secret"),
        partial(source.rename, "/link/secret", "/here", replace=False),
    ):
        with pytest.raises(NotADirectoryTurboError):
            await act()
    with pytest.raises(InvalidRequestError):
        await source.open("/file")
    with pytest.raises(InvalidRequestError):
        await source.append("/file")
    with pytest.raises(AlreadyExistsError):
        await source.create("/file")
    await write_file(source, "/file", b"mine")  # replaces the link, not what it names
    assert (outside / "secret").read_bytes() == b"secret"
    assert sorted(os.listdir(outside)) == ["secret"]


async def test_special_files_are_shown_and_never_opened(source, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name in ("pipe", "socket"):
            assert (await source.stat(f"/{name}")).kind is FileKind.OTHER
            with trio.fail_after(5):
                with pytest.raises(NotSupportedError):
                    await source.open(f"/{name}")
                with pytest.raises(NotSupportedError):
                    await source.append(f"/{name}")


# --- what happens to an open file


async def test_an_open_file_is_read_past_rename_chmod_link_and_deletion(source, tmp_path):
    path = tmp_path / "f"
    path.write_bytes(content(5000))
    file = await source.open("/f")
    for change in (
        lambda: path.chmod(0o600),
        lambda: os.link(path, tmp_path / "g"),
        lambda: path.rename(tmp_path / "h"),
        lambda: os.unlink(tmp_path / "g"),
        lambda: os.unlink(tmp_path / "h"),
    ):
        change()
        buffer = bytearray(5000)
        assert await file.read_into(0, memoryview(buffer)) == 5000
        assert buffer == content(5000)
        assert file.version.compare(await file.refresh()) is Change.SAME
    await file.aclose()


async def test_a_file_written_in_place_is_stale(source, tmp_path):
    (tmp_path / "f").write_bytes(content(5000))
    file = await source.open("/f")
    with open(tmp_path / "f", "r+b") as writer:
        writer.write(b"changed")
    with pytest.raises(StaleFileError):
        await file.read_into(0, memoryview(bytearray(5000)))
    with pytest.raises(StaleFileError):
        await file.refresh()
    await file.aclose()


async def test_a_file_written_in_place_whose_time_is_set_back_is_stale(source, tmp_path):
    """Size and modification time collide; the change time does not."""
    (tmp_path / "f").write_bytes(content(5000))
    before = os.stat(tmp_path / "f")
    file = await source.open("/f")
    with open(tmp_path / "f", "r+b") as writer:
        writer.write(b"changed")
    os.utime(tmp_path / "f", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(StaleFileError):
        await file.read_into(0, memoryview(bytearray(5000)))
    await file.aclose()


async def test_a_truncated_file_is_stale_and_not_at_its_end(source, tmp_path):
    (tmp_path / "f").write_bytes(content(5000))
    file = await source.open("/f")
    os.truncate(tmp_path / "f", 100)
    with pytest.raises(StaleFileError):
        await file.read_into(4000, memoryview(bytearray(1000)))
    await file.aclose()


async def test_a_file_that_grew_is_read_again_after_a_refresh_and_is_stale_once_written_in_place(source, tmp_path):
    (tmp_path / "f").write_bytes(content(5000))
    file = await source.open("/f")
    await append_to_file(source, "/f", b"more")
    buffer = bytearray(5004)
    with pytest.raises(StaleFileError, match="grew"):
        await file.read_into(0, memoryview(buffer))
    assert (await file.refresh()).size == 5004
    assert await file.read_into(0, memoryview(buffer)) == 5004
    assert buffer == content(5000) + b"more"
    with open(tmp_path / "f", "r+b") as writer:
        writer.write(b"changed")
    with pytest.raises(StaleFileError):
        await file.read_into(0, memoryview(buffer))
    with pytest.raises(StaleFileError):
        await file.refresh()
    await file.aclose()


async def test_a_read_that_ends_early_is_an_error(source, tmp_path, monkeypatch):
    (tmp_path / "f").write_bytes(content(5000))
    file = await source.open("/f")
    real = os.preadv
    monkeypatch.setattr(local_files.os, "preadv", lambda fd, parts, at: real(fd, [parts[0][: max(0, 3000 - at)]], at))
    with pytest.raises(ShortReadError, match="3000 of 5000"):
        await file.read_into(0, memoryview(bytearray(5000)))
    await file.aclose()


async def test_closing_waits_for_reads_under_way(source, tmp_path, monkeypatch):
    """A descriptor closed under a reading thread would turn into another file's."""
    (tmp_path / "f").write_bytes(content(5000))
    file = await source.open("/f")
    entered, leave = threading.Event(), threading.Event()
    real = os.preadv

    def late(fd, parts, at):
        entered.set()
        leave.wait()
        return real(fd, parts, at)

    monkeypatch.setattr(local_files.os, "preadv", late)
    buffer = bytearray(5000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(file.read_into, 0, memoryview(buffer))
        await trio.to_thread.run_sync(entered.wait)
        await file.aclose()
        leave.set()
    assert buffer == content(5000)
    with pytest.raises(TurboError, match="closed"):
        await file.read_into(0, memoryview(buffer))


# --- names


async def test_entries_that_vanish_while_they_are_listed_are_left_out(source, tmp_path, monkeypatch):
    for name in ("a", "b", "c"):
        (tmp_path / name).touch()
    listing = await source.list("/")
    real = local_files.islice

    def vanish(entries, count):
        chunk = list(real(entries, count))
        if chunk:
            os.unlink(tmp_path / "b")
        return chunk

    monkeypatch.setattr(local_files, "islice", vanish)
    async with listing:
        assert sorted(entry.name for entry in await listing.next_batch()) == ["a", "c"]
        assert not await listing.next_batch()


async def test_a_path_longer_than_the_kernel_takes(source):
    path = ""
    for _ in range(30):
        path += "/" + "d" * 200
        await source.make_directory(path)
    await write_file(source, f"{path}/f", b"deep")
    assert await read_file(source, f"{path}/f") == b"deep"


# --- writing


async def test_modes_are_what_was_asked_for_whatever_the_umask(source, tmp_path):
    before = os.umask(0o077)
    try:
        writer = await source.create("/f", mode=0o664)
        await writer.aclose()
        await source.make_directory("/d", mode=0o2775)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(tmp_path / "f").st_mode) == 0o664
    assert stat.S_IMODE(os.stat(tmp_path / "d").st_mode) == 0o2775


async def test_a_replaced_file_stays_readable_by_who_has_it_open(source):
    await write_file(source, "/f", content(5000, seed=1))
    file = await source.open("/f")
    await write_file(source, "/f", content(5000, seed=2))
    buffer = bytearray(5000)
    assert await file.read_into(0, memoryview(buffer)) == 5000
    assert buffer == content(5000, seed=1)
    await file.aclose()


async def test_an_abort_leaves_another_file_of_that_name_alone(source, tmp_path):
    writer = await source.create("/f")
    os.unlink(tmp_path / "f")
    (tmp_path / "f").write_bytes(b"theirs")
    await writer.abort()
    assert (tmp_path / "f").read_bytes() == b"theirs"


async def test_a_failed_sync_is_not_forgotten(source, monkeypatch):
    """The kernel drops pages that it could not write: a second fsync would succeed and mean nothing."""
    writer = await source.create("/f")
    await writer.write(memoryview(b"data"))

    def failing(_fd):
        raise OSError(errno.EIO, "disk")

    with monkeypatch.context() as patch:
        patch.setattr(local_files.os, "fsync", failing)
        with pytest.raises(TurboError) as caught:
            await writer.sync()
    assert caught.value.errno == errno.EIO
    with pytest.raises(TurboError):
        await writer.write(memoryview(b"more"))
    with pytest.raises(TurboError):
        await writer.aclose()
    with pytest.raises(TurboError):
        await writer.aclose()
    await writer.abort()


async def test_a_file_system_without_exclusive_rename_says_so(source, monkeypatch):
    def refused(*_):
        raise OSError(errno.EINVAL, "renameat2")

    await write_file(source, "/f", b"f")
    monkeypatch.setattr("turbofs.source.file.rename_no_replace", refused)
    with pytest.raises(NotSupportedError):
        await source.rename("/f", "/g", replace=False)
    assert await read_file(source, "/f") == b"f"


async def test_names_are_synced_after_a_rename(source, monkeypatch):
    synced = []
    monkeypatch.setattr("turbofs.source.file.sync_directory", lambda fd: synced.append(os.fstat(fd).st_ino))
    await source.make_directory("/d")
    await write_file(source, "/f", b"f")
    synced.clear()
    await source.rename("/f", "/d/f", replace=True)
    attributes = [await source.stat("/d"), await source.stat("/")]
    assert sorted(synced) == sorted(int(each.version.file_id.split(":")[1]) for each in attributes)


async def test_a_local_descriptor_is_of_the_file_that_was_looked_at(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/f").write_bytes(b"secret")
    (tmp_path / "tree/d").mkdir(parents=True)
    (tmp_path / "tree/d/f").write_bytes(b"public")
    async with connected(tmp_path / "tree") as source:
        seen = (await source.stat("/d/f")).version
        with open(await source.open_local("/d/f", seen), "rb") as file:
            assert file.read() == b"public"
        (tmp_path / "tree/d/f").rename(tmp_path / "tree/d/g")
        os.link(tmp_path / "outside/f", tmp_path / "tree/d/f")
        with pytest.raises(StaleFileError):
            await source.open_local("/d/f", seen)
        (tmp_path / "tree/d").rename(tmp_path / "tree/e")
        (tmp_path / "tree/d").symlink_to(tmp_path / "outside")
        with pytest.raises(TurboError):
            await source.open_local("/d/f", (await source.stat("/e/f")).version)


def test_a_directory_that_cannot_be_synced_is_not_an_error(tmp_path, monkeypatch):
    def refused(_fd):
        raise OSError(errno.EINVAL, "fsync")

    monkeypatch.setattr(at_calls.os, "fsync", refused)
    fd = os.open(tmp_path, os.O_PATH)
    at_calls.sync_directory(fd)
    os.close(fd)


async def test_attributes_of_links_and_unknown_owners(source, tmp_path):
    (tmp_path / "l").symlink_to("nowhere")
    with pytest.raises(NotSupportedError):
        await source.set_attributes("/l", AttributeChange(mode=0o600))
    await source.set_attributes("/l", AttributeChange(mtime_ns=10**18))
    assert (await source.stat("/l")).mtime_ns == 10**18
    await source.set_attributes("/l", AttributeChange(owner=str(os.getuid()), group=os.getgid()))
    with pytest.raises(InvalidRequestError, match="no-such-user"):
        await source.set_attributes("/l", AttributeChange(owner="no-such-user"))
    with pytest.raises(InvalidRequestError, match="no-such-group"):
        await source.set_attributes("/l", AttributeChange(group="no-such-group"))


async def test_a_cancelled_act_leaks_no_descriptor(source, tmp_path):
    (tmp_path / "f").write_bytes(b"f")
    with trio.CancelScope() as scope:
        file = await source.open("/f")  # the thread pool and modules are warm now
        await file.aclose()
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(200):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(source.open, "/f")
                await trio.lowlevel.checkpoint()
                scope.cancel()
    limiter = source._limiter
    while limiter.borrowed_tokens:  # abandoned threads give their place back when they end
        await trio.lowlevel.checkpoint()
    assert len(os.listdir("/proc/self/fd")) <= len(before)


async def test_errors_by_errno(source, tmp_path, monkeypatch):
    def failing(number):
        def stat_call(*_args, **_kwargs):
            raise OSError(number, "x")

        return stat_call

    for number, kind in ((errno.EACCES, AccessDeniedError), (errno.EMFILE, TurboError)):
        with monkeypatch.context() as patch:
            patch.setattr("turbofs.source.file.os.stat", failing(number))
            with pytest.raises(kind) as caught:
                await source.stat("/f")
        assert caught.value.errno == number
        assert "/f" in str(caught.value)
