"""Threads that hang: they hold neither the limiter nor the caller's buffer."""

from __future__ import annotations

import threading

import pytest
import trio
import trio.testing

from turbofs.errors import SourceUnavailableError
from turbofs.source.hdfs.calls import BlockingCalls, Sink, StalledError, StallWatch


@pytest.fixture
def hang():
    """A function that blocks until the test ends."""
    released = threading.Event()
    yield released.wait
    released.set()


async def until(condition):
    with trio.fail_after(10):
        while not condition():
            await trio.sleep(0.005)


async def test_a_call_that_takes_too_long_is_left_behind(hang):
    limiter = trio.CapacityLimiter(1)
    calls = BlockingCalls(limiter, 0.05)
    with pytest.raises(StalledError, match="cannot wait: no answer within"):
        await calls.run("wait", hang)
    assert calls.hung == 1
    assert limiter.borrowed_tokens == 0
    assert await calls.run("answer", lambda: 42) == 42


async def test_a_cancelled_call_returns_at_once(hang):
    limiter = trio.CapacityLimiter(1)
    calls = BlockingCalls(limiter, 60)
    with trio.move_on_after(0.05) as scope:
        await calls.run("wait", hang)
    assert scope.cancelled_caught
    assert limiter.borrowed_tokens == 0
    assert calls.hung == 1


async def test_settling_waits_for_threads_left_behind_and_not_for_ever():
    release = threading.Event()
    calls = BlockingCalls(trio.CapacityLimiter(4), 0.05)
    with pytest.raises(StalledError):
        await calls.run("wait", release.wait)
    await calls.settle(0.05)
    assert calls.hung == 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(calls.settle, 60)
        await trio.testing.wait_all_tasks_blocked()
        release.set()
    assert calls.hung == 0


async def test_threads_left_behind_are_counted_until_they_end():
    release = threading.Event()
    calls = BlockingCalls(trio.CapacityLimiter(4), 0.05, hung_limit=2)
    for _ in range(2):
        with pytest.raises(StalledError):
            await calls.run("wait", release.wait)
    with pytest.raises(SourceUnavailableError, match="2 earlier calls"):
        await calls.run("answer", lambda: 42)
    release.set()
    await until(lambda: calls.hung == 0)
    assert await calls.run("answer", lambda: 42) == 42


async def test_the_result_of_an_abandoned_call_is_disposed_of():
    release = threading.Event()
    disposed = []
    calls = BlockingCalls(trio.CapacityLimiter(1), 0.05)
    with pytest.raises(StalledError):
        await calls.run("open", lambda: release.wait() and "file", dispose=disposed.append)
    release.set()
    await until(lambda: disposed == ["file"])
    assert await calls.run("open", lambda: "kept", dispose=disposed.append) == "kept"
    assert disposed == ["file"]


async def test_a_result_that_a_cancellation_overtook_is_disposed_of_too():
    disposed = []
    calls = BlockingCalls(trio.CapacityLimiter(1), 60)
    with trio.CancelScope() as scope:
        token = trio.lowlevel.current_trio_token()

        def cancel_and_answer():
            token.run_sync_soon(scope.cancel)
            return "file"

        await calls.run("open", cancel_and_answer, dispose=disposed.append)
    await until(lambda: disposed == ["file"])
    assert calls.hung == 0


async def test_errors_come_through():
    calls = BlockingCalls(trio.CapacityLimiter(1), 5)
    with pytest.raises(ZeroDivisionError):
        await calls.run("divide", lambda: 1 / 0)
    assert calls.hung == 0


async def test_a_transfer_may_take_long_while_it_makes_progress():
    calls = BlockingCalls(trio.CapacityLimiter(1), 60)
    watch = StallWatch()
    pause = threading.Event()

    def slowly():
        for _ in range(12):
            pause.wait(0.05)
            watch.touch()
        return "done"

    assert await calls.run("transfer", slowly, timeout_s=0.3, watch=watch) == "done"


def test_a_sink_takes_nothing_after_it_was_closed():
    target = bytearray(10)
    sink = Sink(memoryview(target))
    assert sink.feed(b"abc")
    assert sink.close() == 3
    assert not sink.feed(b"def")
    assert target == b"abc" + bytes(7)
    target.extend(b"x")  # no view of it is left


def test_a_sink_refuses_more_than_was_asked_for():
    sink = Sink(memoryview(bytearray(4)))
    assert sink.feed(b"abcd")
    assert not sink.feed(b"e")
    assert sink.close() == 4
