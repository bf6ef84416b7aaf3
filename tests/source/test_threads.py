"""Blocking calls in threads: what a cancellation leaves behind."""

import threading

import pytest
import trio

from turbofs.errors import TurboError
from turbofs.source.threads import Shared, abandonable, to_the_end


async def test_results_and_errors_come_back():
    limiter = trio.CapacityLimiter(1)
    assert await abandonable(limiter, lambda: 42, dispose=pytest.fail) == 42
    assert await to_the_end(limiter, lambda: 43) == 43
    with pytest.raises(ZeroDivisionError):
        await abandonable(limiter, lambda: 1 // 0)


async def test_an_abandoned_result_is_disposed_of_and_the_place_is_kept_until_then():
    limiter = trio.CapacityLimiter(1)
    entered, leave, disposed = threading.Event(), threading.Event(), threading.Event()

    def work():
        entered.set()
        leave.wait()
        return "descriptor"

    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def call():
            await abandonable(limiter, work, dispose=lambda _: disposed.set())

        await trio.to_thread.run_sync(entered.wait)
        nursery.cancel_scope.cancel()
    assert limiter.borrowed_tokens == 1
    assert not disposed.is_set()
    leave.set()
    await trio.to_thread.run_sync(disposed.wait)


async def test_a_cancellation_that_overtakes_the_answer_disposes_of_it():
    disposed = []
    begun, go_on, finished = threading.Event(), threading.Event(), threading.Event()

    def work():
        begun.set()
        go_on.wait()
        finished.set()
        return "descriptor"

    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def call():
            await abandonable(trio.CapacityLimiter(1), work, dispose=disposed.append)
            disposed.append("delivered")

        await trio.to_thread.run_sync(begun.wait)
        go_on.set()
        finished.wait()  # blocks the event loop, so that the answer cannot be delivered first
        nursery.cancel_scope.cancel()
    while not disposed:
        await trio.lowlevel.checkpoint()
    assert disposed == ["descriptor"]


async def test_a_call_with_the_callers_memory_is_waited_for():
    entered, leave = threading.Event(), threading.Event()
    done = []

    def work():
        entered.set()
        leave.wait()
        done.append(True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(to_the_end, trio.CapacityLimiter(1), work)
        await trio.to_thread.run_sync(entered.wait)
        nursery.cancel_scope.cancel()
        leave.set()
    assert done


def test_what_is_shared_goes_when_it_is_closed_and_its_last_user_has_left():
    disposed = []
    shared = Shared("value", disposed.append, "/f")
    with shared.use() as one:
        assert one == "value"
        with shared.use():
            shared.close()
            shared.close()
            assert not disposed
        assert not disposed
    assert disposed == ["value"]
    with pytest.raises(TurboError, match="/f is closed"), shared.use():
        pass
    shared.close()
    assert disposed == ["value"]
