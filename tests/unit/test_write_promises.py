"""What whoever waits for a publication is told, and what a name means that changes while one is on its way."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress

import pytest
import trio
import trio.testing

from turbofs.background import Background
from turbofs.config import SourceConfig, WriteConfig
from turbofs.errors import AccessDeniedError, NotFoundError, TurboError
from turbofs.model import AttributeChange
from turbofs.source.file import FileSource
from turbofs.testing.delegating import DelegatingSource
from turbofs.write.acts import Delete, Early, Publish, Rename, SetAttributes
from turbofs.write.journal import Journal
from turbofs.write.pending import CancelledActError, PendingActs
from turbofs.write.staging import StagingArea
from turbofs.write.writes import Writes

EARLY = Early("/step", "/")


class Gate(DelegatingSource):
    """Fails an act with what `errors` holds for it, once; waits where `held` has an event for it."""

    def __init__(self, inner):
        super().__init__(inner)
        self.errors = {}
        self.held = {}
        self.reached = trio.Event()

    async def around(self, act, path, call):
        if act in self.held:
            self.reached.set()
            await self.held[act].wait()
        if act in self.errors:
            raise self.errors.pop(act)
        return await call()


@asynccontextmanager
async def writing(tmp_path):
    """(What writes, its source, the source's directory)."""
    top = tmp_path / "source"
    top.mkdir()
    source = Gate(FileSource(top.as_uri(), SourceConfig(), trio.CapacityLimiter(8)))
    await source.connect()
    area = StagingArea.open(tmp_path / "staging", limit_bytes=1 << 26, stall_s=5)
    journal = Journal.open(tmp_path / "staging" / "journal.sqlite3")
    async with trio.open_nursery() as nursery:
        writes = Writes(source, area, journal, WriteConfig(), Background(nursery))
        yield writes, source, top
        await writes.stop()
        nursery.cancel_scope.cancel()
    await source.aclose()
    journal.close()
    area.close()


async def new_file(writes, path, data):
    file = writes.create(path, mode=0o644, owner=None, group=None)
    await file.write(0, data)
    writes.changed(file)
    return file


async def test_a_defect_is_an_error_of_close_and_ends_its_act(tmp_path):
    async with writing(tmp_path) as (writes, source, _):
        file = await new_file(writes, "/a", b"data")
        source.errors["complete"] = ZeroDivisionError("made to fail")
        with pytest.raises(TurboError, match="defect of TurboFS"):
            await writes.publish(file, None, final=True)
        assert not len(writes.acts)
        assert "defect" in writes.broken.reason("/a")


async def test_a_defect_breaks_a_promise_and_a_deferred_act(tmp_path):
    async with writing(tmp_path) as (writes, source, top):
        file = await new_file(writes, "/a", b"data")
        source.errors["complete"] = ZeroDivisionError("made to fail")
        await writes.publish(file, EARLY, final=True)
        assert not await writes.change(SetAttributes("/a", AttributeChange(mode=0o600)))
        await writes.drain()
        assert not len(writes.acts)
        assert writes.promised_bytes() == 0
        assert "defect" in writes.broken.reason("/a")
        other = await new_file(writes, "/b", b"data")
        await writes.publish(other, EARLY, final=True)
        source.errors["set_attributes"] = ZeroDivisionError("made to fail")
        assert not await writes.change(SetAttributes("/b", AttributeChange(mode=0o600)))
        await writes.drain()
        assert not len(writes.acts)
        assert "defect" in writes.broken.reason("/b")
        assert (top / "b").read_bytes() == b"data"


async def test_the_end_of_the_mount_is_an_error_of_close(tmp_path):
    async with writing(tmp_path) as (writes, source, top):
        file = await new_file(writes, "/a", b"data")
        source.held["rename"] = trio.Event()

        async def close():
            with pytest.raises(TurboError, match="the mount ended"):
                await writes.publish(file, None, final=True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(close)
            await source.reached.wait()
            await writes.stop()
        assert not (top / "a").exists()


@pytest.mark.parametrize("act", [Rename("/a", "/b", replace=False), Delete("/a")], ids=["rename", "unlink"])
async def test_a_name_changes_after_the_publication_that_is_on_its_way(tmp_path, act):
    async with writing(tmp_path) as (writes, source, top):
        file = await new_file(writes, "/a", b"data")
        source.held["rename"] = trio.Event()
        assert not writes.has_on_source(file)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: writes.publish(file, None, final=True))
            await source.reached.wait()
            assert writes.has_on_source(file)
            nursery.start_soon(writes.change, act)
            await trio.testing.wait_all_tasks_blocked()
            source.held.pop("rename").set()
        assert [each.name for each in top.iterdir()] == (["b"] if isinstance(act, Rename) else [])


async def test_a_file_that_is_unlinked_while_it_takes_its_name_does_not_stay(tmp_path):
    async with writing(tmp_path) as (writes, source, top):
        file = await new_file(writes, "/a", b"data")
        source.held["rename"] = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: writes.publish(file, None, final=True))
            await source.reached.wait()
            await writes.unlink_now(file)
            source.held.pop("rename").set()
        await writes.abandoning.wait_idle()
        assert list(top.iterdir()) == []
        assert writes.flusher.given_up == set()


async def test_an_unlink_behind_a_publication_that_fails_is_done_here(tmp_path):
    async with writing(tmp_path) as (writes, source, top):
        file = await new_file(writes, "/a", b"data")
        source.held["rename"] = trio.Event()
        source.errors["rename"] = AccessDeniedError("made to fail")

        async def close():
            with pytest.raises(AccessDeniedError):
                await writes.publish(file, None, final=True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(close)
            await source.reached.wait()
            nursery.start_soon(writes.change, Delete("/a"))
            await trio.testing.wait_all_tasks_blocked()
            source.held.pop("rename").set()
        assert list(top.iterdir()) == []


@pytest.mark.parametrize("rewritten", [False, True])
async def test_an_append_goes_on_from_what_a_failed_one_left(tmp_path, rewritten):
    async with writing(tmp_path) as (writes, source, top):
        (top / "log").write_bytes(b"one ")
        file = writes.update("/log", await source.stat_exact("/log"), "/log")
        await file.write(4, b"two ")
        file_id = (await source.stat_exact("/log")).version.file_id
        writes.changed(file)
        source.errors["sync"] = source.errors["complete"] = AccessDeniedError("made to fail")
        with pytest.raises(AccessDeniedError):
            await writes.publish(file, None, final=False)
        source.errors.clear()
        assert (top / "log").read_bytes() == b"one two "
        if rewritten:
            await file.write(4, b"TWO ")
        await file.write(8, b"three")
        writes.changed(file)
        await writes.publish(file, None, final=True)
        assert (top / "log").read_bytes() == (b"one TWO three" if rewritten else b"one two three")
        assert ((await source.stat_exact("/log")).version.file_id == file_id) is not rewritten


async def test_only_what_is_past_is_healed(tmp_path):
    async with writing(tmp_path) as (writes, source, top):
        (top / "a").write_bytes(b"data")
        writes.broken.mark("/a", TurboError("made to fail"))
        await writes.change(SetAttributes("/a", AttributeChange(mode=0o600)))
        source.errors["delete"] = AccessDeniedError("made to fail")
        with suppress(AccessDeniedError):
            await writes.change(Delete("/a"))
        assert writes.broken.reason("/a")
        await writes.change(Delete("/a"))
        assert writes.broken.reason("/a") is None


async def test_a_line_of_early_ones_is_waited_for_by_its_last(autojump_clock):
    acts = PendingActs()
    line = [acts.issue(Publish(f"/job/step/{n}", n, Early("/job/step", "/job")), deferred=True) for n in range(4000)]
    tracker = acts.issue(Rename("/job/tmp", "/job/latest", replace=True))
    removal = acts.issue(Delete("/job/old"))
    assert max(len(each.waits) for each in line) == 1
    assert tracker.waits == [line[-1]]
    assert removal.waits == [tracker]
    acts.finish(line[-1])  # given up before its turn
    acts.finish(tracker)
    for each in line[:-2]:
        acts.finish(each)
    with trio.move_on_after(1) as waiting:
        await acts.ready(removal)
    assert waiting.cancelled_caught
    acts.finish(line[-2], NotFoundError("made to fail"))
    with pytest.raises(CancelledActError):
        await acts.ready(removal)
