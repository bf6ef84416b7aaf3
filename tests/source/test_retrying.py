"""Deadlines, repetition, and acts whose answer was lost. Time is trio's mock clock: nothing here waits."""

import itertools
import random
from functools import partial

import pytest
import trio

from turbofs.config import SourceConfig
from turbofs.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    DeadlineExceededError,
    NotEmptyError,
    NotFoundError,
    ShortReadError,
    SourceUnavailableError,
    StaleFileError,
)
from turbofs.model import AttributeChange, Change, FileVersion
from turbofs.source.memory import MemorySource
from turbofs.source.retrying import RetryingSource
from turbofs.source.retrying_files import SHORT_READS
from turbofs.testing.conformance_base import content, exists, names_in, read_file, write_file
from turbofs.testing.counting import CountingSource
from turbofs.testing.faulty import Fault, FaultySource
from turbofs.testing.slow import SlowSource

CONFIG = SourceConfig(operation_timeout_s=10.0, deadline_s=40.0, backoff_first_s=0.1, backoff_limit_s=5.0)


class Layers:
    """Memory, counted, behind faults, behind retries."""

    def __init__(self, *faults, config=CONFIG):
        self.memory = MemorySource()
        self.counting = CountingSource(self.memory)
        self.faulty = FaultySource(self.counting, *faults)
        self.source = RetryingSource(self.faulty, config, chance=random.Random(1))


def on(act, *, nth=(1,), **more):
    return Fault(acts=frozenset({act}), nth=frozenset(nth), **more)


def always(*acts, **more):
    return Fault(acts=frozenset(acts), **more)


# --- deadlines and repetition


async def test_what_is_transient_is_repeated(autojump_clock):
    layers = Layers(on("stat", nth=(1, 2, 3)))
    layers.memory.put("/f", b"f")
    assert (await layers.source.stat("/f")).size == 1
    assert layers.faulty.faults[0].seen == 4
    assert layers.source.describe()["retries"] == 3


async def test_what_is_not_transient_comes_out_at_once(autojump_clock):
    layers = Layers(always("stat", error=lambda: AccessDeniedError("no")))
    with pytest.raises(AccessDeniedError):
        await layers.source.stat("/f")
    assert layers.faulty.faults[0].seen == 1
    with pytest.raises(NotFoundError):
        await layers.source.open("/f")
    assert layers.counting.count("open") == 1


async def test_all_attempts_together_end_at_the_deadline(autojump_clock):
    layers = Layers(always("stat"))
    begin = trio.current_time()
    with pytest.raises(DeadlineExceededError, match="given up after") as caught:
        await layers.source.stat("/f")
    assert trio.current_time() - begin == pytest.approx(CONFIG.deadline_s)
    assert isinstance(caught.value.__cause__, SourceUnavailableError)
    assert layers.faulty.faults[0].seen > CONFIG.deadline_s / CONFIG.backoff_limit_s


async def test_pauses_grow_and_differ(autojump_clock):
    begun = []

    class Watching(MemorySource):
        async def stat(self, path):
            begun.append(trio.current_time())
            raise SourceUnavailableError("away")

    with pytest.raises(DeadlineExceededError):
        await RetryingSource(Watching(), CONFIG, chance=random.Random(2)).stat("/f")
    pauses = [after - before for before, after in itertools.pairwise(begun)]
    for number, pause in enumerate(pauses[:-1]):
        assert pause <= min(CONFIG.backoff_limit_s, CONFIG.backoff_first_s * 2**number) + 1e-9
    assert len({round(pause, 6) for pause in pauses}) == len(pauses)


async def test_an_attempt_that_hangs_is_given_up_and_repeated(autojump_clock):
    slow = SlowSource(MemorySource())
    slow.inner.put("/f", b"f")
    source = RetryingSource(slow, CONFIG)
    await slow.hold({"stat"})
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def heal():
            await trio.sleep(CONFIG.operation_timeout_s * 1.5)
            await slow.release()

        assert (await source.stat("/f")).size == 1


async def test_a_source_that_hangs_for_ever_ends_at_the_deadline(autojump_clock):
    slow = SlowSource(MemorySource())
    slow.inner.put("/f", b"f")
    source = RetryingSource(slow, CONFIG)
    file = await source.open("/f")
    writer = await source.create("/g")
    await slow.hold()
    for act in (
        partial(source.stat, "/f"),
        partial(source.list, "/"),
        partial(source.open, "/f"),
        partial(source.delete, "/f"),
        partial(file.read_into, 0, memoryview(bytearray(1))),
        partial(file.refresh),
        partial(writer.write, memoryview(b"x")),
    ):
        begin = trio.current_time()
        with pytest.raises(DeadlineExceededError):
            await act()
        assert trio.current_time() - begin <= CONFIG.deadline_s + 0.001


async def test_an_attempt_that_carries_much_gets_more_time(autojump_clock):
    slow = SlowSource(MemorySource())
    slow.inner.put("/f", bytes(4 << 20))
    file = await RetryingSource(slow, CONFIG).open("/f")
    slow.latency_s = CONFIG.operation_timeout_s + 2
    assert await file.read_into(0, memoryview(bytearray(4 << 20))) == 4 << 20


async def test_a_cancellation_from_outside_passes_through(autojump_clock):
    layers = Layers(always("stat"))
    with trio.move_on_after(1) as scope:
        await layers.source.stat("/f")
    assert scope.cancelled_caught


# --- connecting


async def test_connecting_waits_and_tells_about_it(autojump_clock):
    layers = Layers(on("connect", nth=(1, 2)))
    told = []
    await layers.source.connect(wait_s=30, progress=lambda error, left_s: told.append((str(error), left_s)))
    assert len(told) == 2
    assert "away on purpose" in told[0][0]
    assert 30 >= told[0][1] > told[1][1] > 0


@pytest.mark.parametrize("wait_s", [0, 12.5])
async def test_connecting_gives_up_in_time(autojump_clock, wait_s):
    layers = Layers(always("connect"))
    begin = trio.current_time()
    with pytest.raises(SourceUnavailableError, match=r"memory: is not reachable: .*away on purpose"):
        await layers.source.connect(wait_s=wait_s)
    assert trio.current_time() - begin == pytest.approx(wait_s)


async def test_connecting_without_waiting_gives_the_first_attempt_its_time(autojump_clock):
    await RetryingSource(SlowSource(MemorySource(), latency_s=3), CONFIG).connect(wait_s=0)


async def test_a_silent_source_is_waited_for_no_longer_than_said(autojump_clock):
    begin = trio.current_time()
    with pytest.raises(SourceUnavailableError):
        await RetryingSource(SlowSource(MemorySource(), latency_s=3600), CONFIG).connect(wait_s=2)
    assert trio.current_time() - begin == pytest.approx(2)


async def test_a_wrong_address_is_not_waited_for(autojump_clock):
    layers = Layers(always("connect", error=lambda: NotFoundError("no such directory")))
    with pytest.raises(NotFoundError):
        await layers.source.connect(wait_s=30)
    assert layers.faulty.faults[0].seen == 1


# --- reading


async def test_a_read_is_repeated_through_the_same_handle_first(autojump_clock):
    layers = Layers(on("read"))
    layers.memory.put("/f", content(5000))
    assert await read_file(layers.source, "/f") == content(5000)
    assert layers.counting.count("open") == 1


async def test_a_broken_handle_is_replaced_by_one_on_the_same_version(autojump_clock):
    layers = Layers(on("read", nth=(1, 2, 3)))
    layers.memory.put("/f", content(5000))
    assert await read_file(layers.source, "/f") == content(5000)
    assert layers.counting.count("open") == 3


@pytest.mark.parametrize("what", ["replaced", "deleted", "a directory"])
async def test_a_broken_handle_on_a_name_that_moved_on_is_stale(autojump_clock, what):
    layers = Layers(always("read"))
    layers.memory.put("/f", content(5000))
    file = await layers.source.open("/f")
    await layers.memory.delete("/f")
    if what == "replaced":
        layers.memory.put("/f", content(5000, seed=1))
    elif what == "a directory":
        await layers.memory.make_directory("/f")
    with pytest.raises(StaleFileError):
        await file.read_into(0, memoryview(bytearray(5000)))
    await file.aclose()


async def test_a_weak_version_does_not_replace_a_strong_one(autojump_clock):
    class Forgetful(MemorySource):
        weak = False

        async def open(self, path):
            file = await super().open(path)
            if self.weak:
                file.version = FileVersion(file.version.size, file.version.mtime_ns)
            return file

    memory = Forgetful()
    memory.put("/f", content(5000))
    file = await RetryingSource(FaultySource(memory, always("read")), CONFIG).open("/f")
    memory.weak = True
    with pytest.raises(DeadlineExceededError, match="whether /f is the same file"):
        await file.read_into(0, memoryview(bytearray(5000)))


async def test_readers_that_fail_together_open_the_file_once_and_close_what_they_replace(autojump_clock):
    opened, closed = [], []

    class Watching(MemorySource):
        async def open(self, path):
            file = await super().open(path)
            close = file.aclose
            opened.append(file)

            async def aclose():
                closed.append(file)
                await close()

            file.aclose = aclose
            return file

    memory = Watching()
    memory.put("/f", content(64_000))
    faulty = FaultySource(memory, always("read"))
    source = RetryingSource(faulty, CONFIG)
    file = await source.open("/f")
    buffer = bytearray(64_000)
    async with trio.open_nursery() as nursery:
        for offset in range(0, 64_000, 1000):
            nursery.start_soon(file.read_into, offset, memoryview(buffer)[offset : offset + 1000])
        await trio.sleep(2)
        faulty.faults.clear()
    assert buffer == content(64_000)
    await file.aclose()
    assert len(opened) > 1
    assert sorted(map(id, closed)) == sorted(map(id, opened))


async def test_a_file_that_is_closed_while_read_ahead_fails_is_not_opened_again(autojump_clock):
    layers = Layers(always("read"))
    layers.memory.put("/f", content(5000))
    file = await layers.source.open("/f")
    async with trio.open_nursery() as nursery:

        async def read():
            with pytest.raises(StaleFileError, match="closed"):
                await file.read_into(0, memoryview(bytearray(5000)))

        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        await file.aclose()
    assert layers.counting.count("open") == 1


async def test_a_short_read_is_repeated_and_never_an_early_end(autojump_clock):
    layers = Layers(on("read", nth=(1, 2), short_reads=True))
    layers.memory.put("/f", content(5000))
    assert await read_file(layers.source, "/f") == content(5000)


async def test_a_file_that_stays_short_is_an_input_output_error(autojump_clock):
    layers = Layers(always("read", short_reads=True))
    layers.memory.put("/f", content(5000))
    file = await layers.source.open("/f")
    with pytest.raises(ShortReadError, match="2500 of 5000"):
        await file.read_into(0, memoryview(bytearray(5000)))
    assert layers.counting.count("read") == SHORT_READS


async def test_a_short_read_at_the_deadline_is_an_input_output_error_too(autojump_clock):
    config = SourceConfig(deadline_s=0.05)
    layers = Layers(always("read", short_reads=True), config=config)
    layers.memory.put("/f", content(5000))
    file = await layers.source.open("/f")
    with pytest.raises(ShortReadError):
        await file.read_into(0, memoryview(bytearray(5000)))


async def test_a_file_that_grew_is_followed(autojump_clock):
    layers = Layers(on("refresh"))
    layers.memory.put("/f", content(5000))
    file = await layers.source.open("/f")
    before = file.version
    layers.memory.modify("/f", 5000, b"more")
    assert before.compare(await file.refresh()) is Change.GREW
    assert file.version.size == 5004
    buffer = bytearray(8)
    assert await file.read_into(5000, memoryview(buffer)) == 4


async def test_a_listing_that_breaks_gives_each_name_once(autojump_clock):
    layers = Layers(on("next_batch", nth=(2, 4, 6), after=True))
    for number in range(3500):
        layers.memory.put(f"/d/{number:05}")
    names = await names_in(layers.source, "/d")
    assert names == [f"{number:05}" for number in range(3500)]
    assert layers.counting.count("list") == 4


# --- acts whose answer is lost


async def test_a_lost_answer_to_a_rename_is_found_out(autojump_clock):
    for replace in (False, True):
        layers = Layers(on("rename", after=True))
        layers.memory.put("/f", b"f")
        if replace:
            layers.memory.put("/g", b"g")
        await layers.source.rename("/f", "/g", replace=replace)
        assert layers.counting.count("rename") == 1
        assert await read_file(layers.memory, "/g") == b"f"


async def test_a_rename_whose_object_is_known_needs_no_look_at_it(autojump_clock):
    layers = Layers(on("rename", nth=(2,), after=True))
    layers.memory.put("/f", b"f")
    identity = (await layers.source.stat_exact("/f")).version
    layers.counting.reset()
    await layers.source.rename("/f", "/g", replace=False, identity=identity)
    assert [request.act for request in layers.counting.requests] == ["rename"]
    await layers.source.rename("/g", "/h", replace=False, identity=identity)
    assert layers.counting.count("rename") == 2, "the lost answer was found out"
    assert await names_in(layers.memory, "/") == ["h"]


async def test_a_rename_that_did_not_happen_is_repeated(autojump_clock):
    layers = Layers(on("rename", nth=(1, 2)))
    layers.memory.put("/f", b"f")
    await layers.source.rename("/f", "/g", replace=False)
    assert await names_in(layers.memory, "/") == ["g"]


async def test_a_rename_does_not_take_a_stranger_for_its_own(autojump_clock):
    layers = Layers(on("rename"))

    class Meddling(FaultySource):
        async def around(self, act, path, call):
            try:
                return await super().around(act, path, call)
            except SourceUnavailableError:
                await self.inner.inner.delete("/f")  # somebody else, while we wait for the answer
                self.inner.inner.put("/g", b"theirs")
                raise

    source = RetryingSource(Meddling(layers.counting, on("rename")), CONFIG)
    layers.memory.put("/f", b"mine")
    with pytest.raises(NotFoundError):
        await source.rename("/f", "/g", replace=False)
    assert await read_file(layers.memory, "/g") == b"theirs"


async def test_a_rename_onto_an_existing_name_fails_as_it_should(autojump_clock):
    layers = Layers(on("rename"))
    layers.memory.put("/f", b"f")
    layers.memory.put("/g", b"g")
    with pytest.raises(AlreadyExistsError):
        await layers.source.rename("/f", "/g", replace=False)


async def test_a_late_answer_of_a_rename_that_was_given_up(autojump_clock):
    """The first attempt is cut off, looks undone, and takes effect before the second: which is then refused."""
    layers = Layers()

    class Late(FaultySource):
        times = 0

        async def rename(self, old, new, *, replace):
            self.times += 1
            if self.times == 1:
                raise SourceUnavailableError("cut off")
            await self.inner.rename(old, new, replace=replace)  # now the first attempt arrives …
            await self.inner.rename(old, new, replace=replace)  # … and this is ours

    layers.memory.put("/f", b"f")
    await RetryingSource(Late(layers.counting), CONFIG).rename("/f", "/g", replace=False)
    assert await names_in(layers.memory, "/") == ["g"]


async def test_a_lost_answer_to_a_deletion_is_found_out(autojump_clock):
    layers = Layers(on("delete", after=True), on("delete_directory", after=True))
    layers.memory.put("/d/f", b"f")
    await layers.source.delete("/d/f")
    await layers.source.delete_directory("/d")
    assert await names_in(layers.memory, "/") == []


async def test_a_deletion_does_not_take_the_next_file_of_that_name(autojump_clock):
    memory = MemorySource()

    class Recreating(FaultySource):
        async def around(self, act, path, call):
            try:
                return await super().around(act, path, call)
            except SourceUnavailableError:
                memory.put(path, b"next")
                raise

    memory.put("/f", b"first")
    await RetryingSource(Recreating(memory, on("delete", after=True)), CONFIG).delete("/f")
    assert await read_file(memory, "/f") == b"next"


async def test_deletions_that_are_refused_stay_refused(autojump_clock):
    layers = Layers(on("delete_directory"), on("delete"))
    layers.memory.put("/d/f", b"f")
    with pytest.raises(NotEmptyError):
        await layers.source.delete_directory("/d")
    with pytest.raises(NotFoundError):
        await layers.source.delete("/none")
    assert await exists(layers.memory, "/d/f")


async def test_a_lost_answer_to_making_a_directory_or_a_link_is_found_out(autojump_clock):
    layers = Layers(on("make_directory", after=True), on("make_symlink", after=True))
    await layers.source.make_directory("/d", mode=0o700)
    await layers.source.make_symlink("/l", "d")
    assert await layers.memory.readlink("/l") == "d"
    with pytest.raises(AlreadyExistsError):
        await layers.source.make_directory("/d")
    with pytest.raises(AlreadyExistsError):
        await layers.source.make_symlink("/l", "other")


async def test_a_link_of_somebody_else_is_not_taken_for_ours(autojump_clock):
    layers = Layers(on("make_symlink"))
    await layers.memory.make_symlink("/l", "theirs")
    with pytest.raises(AlreadyExistsError):
        await layers.source.make_symlink("/l", "mine")


async def test_an_exclusive_create_without_an_answer_claims_nothing(autojump_clock):
    layers = Layers(on("create", after=True))
    with pytest.raises(AlreadyExistsError, match="may be ours"):
        await layers.source.create("/f")


async def test_a_create_that_did_not_happen_is_repeated(autojump_clock):
    layers = Layers(on("create", nth=(1, 2)))
    await write_file(layers.source, "/f", b"f", replace=False)
    assert await read_file(layers.memory, "/f") == b"f"


async def test_a_replacing_create_is_repeated_whatever_happened(autojump_clock):
    layers = Layers(on("create", after=True))
    layers.memory.put("/f", b"old")
    await write_file(layers.source, "/f", b"new")
    assert await read_file(layers.memory, "/f") == b"new"


async def test_attributes_are_set_again(autojump_clock):
    layers = Layers(on("set_attributes", after=True))
    layers.memory.put("/f", b"f")
    await layers.source.set_attributes("/f", AttributeChange(mode=0o600))
    assert (await layers.memory.stat("/f")).mode == 0o600


# --- writing


async def test_a_write_is_never_repeated(autojump_clock):
    layers = Layers(on("write", after=True))
    writer = await layers.source.create("/f")
    for act in (partial(writer.write, memoryview(b"x")), writer.sync, writer.aclose):
        with pytest.raises(SourceUnavailableError):
            await act()
    await writer.abort()
    assert layers.counting.count("write") == 1
    assert not await exists(layers.memory, "/f")


async def test_sync_and_completion_are_repeated(autojump_clock):
    layers = Layers(on("sync", after=True), on("complete", after=True))
    writer = await layers.source.create("/f")
    await writer.write(memoryview(b"data"))
    await writer.sync()
    await writer.aclose()
    assert await read_file(layers.memory, "/f") == b"data"
    writer = await layers.source.append("/f")
    await writer.write(memoryview(b" and more"))
    await writer.aclose()
    assert await read_file(layers.memory, "/f") == b"data and more"


async def test_random_faults_change_nothing_but_the_time(autojump_clock):
    """A tenth of everything fails, half of that with a lost answer, and the tree comes out as without faults."""
    safe = frozenset(
        {"stat", "stat_exact", "list", "next_batch", "open", "read", "rename", "delete", "make_directory", "complete"}
    )
    layers = Layers(
        Fault(acts=safe, probability=0.05), Fault(acts=safe, probability=0.05, after=True), config=SourceConfig()
    )
    source = layers.source
    for number in range(60):
        await source.make_directory(f"/step-{number}")
        await write_file(source, f"/step-{number}/.tmp", content(3000, seed=number))
        await source.rename(f"/step-{number}/.tmp", f"/step-{number}/shard", replace=False)
        assert await read_file(source, f"/step-{number}/shard") == content(3000, seed=number)
        if number % 3 == 0:
            await source.delete(f"/step-{number}/shard")
    left = [number for number in range(60) if await names_in(source, f"/step-{number}")]
    assert left == [number for number in range(60) if number % 3]
    assert source.describe()["retries"] > 20
