"""The control socket end to end: server, client and operations; one bad client harms no other."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turbofs.errors import (
    AccessDeniedError,
    BusyError,
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    NotPermittedError,
    NotReachableError,
    NotSupportedError,
    ProtocolError,
    TurboError,
)
from turbofs.fs.control_ops import ControlOps
from turbofs.fs.events import EventBus
from turbofs.model import Caller
from turbofs.wire import control_codec as codec
from turbofs.wire.control_client import ControlClient
from turbofs.wire.control_server import Answer, ControlServer, Limits

LIMIT_S = 20.0


class Job:
    """A prefetch that ends when the test says so."""

    def __init__(self, job_id, path, owner_uid):
        self.id, self.path, self.wanted_bytes, self.done_bytes = job_id, path, 100, 0
        self.owner_uid = owner_uid
        self.state, self.error = "running", None
        self.ended = trio.Event()

    async def wait(self):
        await self.ended.wait()

    def end(self, state="done"):
        self.state, self.done_bytes = state, 100
        self.ended.set()

    def cancel(self):
        self.end("cancelled")


class Files:
    """The file system's side, in memory."""

    def __init__(self, folder):
        self.folder, self.events, self.jobs, self.hints = folder, EventBus(), [], []
        self.level, self.reason, self.looks, self.changed = "persisted", None, 0, trio.Event()
        self.parked = {7: {"id": 7, "path": "/run/a", "size": 3, "hidden": "/.turbofs/conflicts/7/a"}}

    def status(self, caller):
        return {"inodes": 1}

    async def file_status(self, path, caller):
        if path == "/missing":
            raise NotFoundError("no /missing")
        return {"path": path, "uid": caller.uid}

    async def set_hint(self, path, name, value, caller):
        if value == b"bad":
            raise InvalidRequestError("bad value")
        self.hints.append((path, name, value, caller.uid))

    async def start_prefetch(self, path, ranges, caller):
        if path == "/secret":
            raise AccessDeniedError("not yours")
        self.jobs.append(Job(len(self.jobs) + 1, path, caller.uid))
        self.jobs[-1].ranges = ranges
        return self.jobs[-1]

    def prefetch_job(self, job_id):
        if not 0 < job_id <= len(self.jobs):
            raise NotFoundError(f"no job {job_id}")
        return self.jobs[job_id - 1]

    async def durability(self, path, caller):
        self.looks += 1
        await trio.lowlevel.checkpoint()
        return self.level

    def durability_changed(self):
        return self.changed

    def broken_reason(self, path):
        return self.reason

    def becomes(self, level):
        self.level, changed, self.changed = level, self.changed, trio.Event()
        changed.set()

    async def conflicts(self, caller):
        return list(self.parked.values())

    async def publish_conflict(self, conflict_id, to, caller):
        found = self.parked.pop(conflict_id, None)
        if found is None:
            raise NotFoundError(f"no conflict {conflict_id}")
        await trio.sleep(600)
        return {"id": conflict_id, "path": to or found["path"], "size": 3, "replaced": None}

    async def drop_conflict(self, conflict_id, caller):
        if caller.uid not in {0, os.getuid()}:
            raise NotPermittedError("not yours")
        del self.parked[conflict_id]

    async def local_descriptor(self, path, caller):
        if path != "/local":
            raise NotSupportedError("no local copy")
        (self.folder / "copy").write_bytes(b"bytes")
        return os.open(self.folder / "copy", os.O_RDONLY)


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s"


@asynccontextmanager
async def serving(path, handler, limits=None):
    async with trio.open_nursery() as nursery:
        server = ControlServer(path, handler, limits)
        await nursery.start(server.serve)
        with trio.fail_after(LIMIT_S):
            yield server
        nursery.cancel_scope.cancel()


async def in_thread(function, *args, **kwargs):
    return await trio.to_thread.run_sync(partial(function, *args, **kwargs), abandon_on_cancel=True)


async def call(path, op, args=None, **kwargs):
    def run():
        with ControlClient(path) as client:
            return client.call(op, args, **kwargs)

    return await in_thread(run)


async def raw(path):
    stream = trio.socket.socket(socket.AF_UNIX)
    await stream.connect(str(path))
    return stream


async def receive(stream):
    data = b""
    while len(data) < 4 or len(data) < 4 + struct.unpack(">I", data[:4])[0]:
        part = await stream.recv(1)
        if not part:
            return None
        data += part
    return codec.decode(data[4:])


def ops(files):
    return ControlOps(files, {"source": "memory:", "mountpoint": "/mnt/x"})


# --- operations


async def test_ping_and_status_are_for_everybody(path, files):
    async with serving(path, ops(files)):
        assert path.stat().st_mode & 0o777 == 0o666
        pong = await call(path, "ping")
        assert (pong["source"], pong["pid"]) == ("memory:", os.getpid())
        assert (await call(path, "status"))["inodes"] == 1
        assert await call(path, "status", {"path": "/a"}) == {"path": "/a", "uid": os.getuid()}
    assert not path.exists()


async def test_hints_arrive_as_bytes_with_the_callers_identity(path, files):
    async with serving(path, ops(files)):
        await call(path, "hint", {"path": "/a", "name": "user.turbofs.prefetch", "value": b"all"})
        assert files.hints == [("/a", "user.turbofs.prefetch", b"all", os.getuid())]
        with pytest.raises(InvalidRequestError, match="bad value"):
            await call(path, "hint", {"path": "/a", "name": "user.turbofs.prefetch", "value": b"bad"})


async def test_names_that_are_not_utf8_arrive_as_they_are(path, files):
    async with serving(path, ops(files)):
        name = "/" + os.fsdecode(b"\xff\xfe")
        assert (await call(path, "status", {"path": name}))["path"] == name


async def test_a_prefetch_can_be_waited_for_and_cancelled(path, files):
    async with serving(path, ops(files)):
        started = await call(path, "prefetch", {"path": "/a", "ranges": [[0, 10], [20, 30]]})
        assert started["state"] == "running"
        assert [part.length for part in files.jobs[0].ranges] == [10, 10]
        assert (await call(path, "wait", {"job": 1, "timeout_s": 0.01}))["state"] == "running"
        files.jobs[0].end()
        assert (await call(path, "wait", {"job": 1, "timeout_s": 5}))["done_bytes"] == 100
        await call(path, "prefetch", {"path": "/b"})
        assert files.jobs[1].ranges is None
        assert (await call(path, "cancel", {"job": 2}))["state"] == "cancelled"
        with pytest.raises(AccessDeniedError):
            await call(path, "prefetch", {"path": "/secret"})
        with pytest.raises(NotFoundError, match="no job 99"):
            await call(path, "cancel", {"job": 99})


async def test_only_its_owner_and_root_wait_for_a_job_and_cancel_it(files):
    handler = ops(files)
    mine, other, root = Caller(1000, 1000, 1), Caller(1001, 1001, 1), Caller(0, 0, 1)
    await handler.handle(codec.Request(1, "prefetch", {"path": "/a"}), mine)
    with pytest.raises(NotPermittedError):
        await handler.handle(codec.Request(2, "cancel", {"job": 1}), other)
    with pytest.raises(NotPermittedError):  # its answer would tell the path
        await handler.handle(codec.Request(2, "wait", {"job": 1, "timeout_s": 0}), other)
    await handler.handle(codec.Request(3, "cancel", {"job": 1}), mine)
    await handler.handle(codec.Request(4, "cancel", {"job": 1}), root)


async def test_an_operation_is_bounded_by_the_request_deadline(files, autojump_clock):
    async def never(path, caller):
        await trio.sleep_forever()

    files.file_status = never
    handler = ControlOps(files, {}, deadline_s=7)
    begin = trio.current_time()
    with pytest.raises(DeadlineExceededError):
        await handler.handle(codec.Request(1, "status", {"path": "/a"}), Caller(0, 0, 1))
    assert trio.current_time() - begin == pytest.approx(7)


async def test_wait_for_durability_succeeds_times_out_or_reports_broken(files, autojump_clock):
    handler, caller = ops(files), Caller(0, 0, 1)

    async def wait(until="persisted"):
        return await handler.handle(codec.Request(1, "wait", {"path": "/a", "until": until, "timeout_s": 5}), caller)

    assert (await wait()).result == {"path": "/a", "durability": "persisted"}
    files.level = "staged"
    assert (await wait("staged")).result["durability"] == "staged"
    with pytest.raises(DeadlineExceededError, match="still 'staged'"):
        await wait()
    files.level = "broken"
    with pytest.raises(TurboError, match="broken: no reason is known"):
        await wait()
    files.reason = "the target had changed"
    with pytest.raises(TurboError, match="/a is broken: the target had changed"):
        await wait()
    with pytest.raises(InvalidRequestError, match="unknown level"):
        await wait("open")


async def test_a_wait_looks_when_something_has_changed_and_only_then(files, autojump_clock):
    files.level = "open"
    began = trio.current_time()
    async with trio.open_nursery() as nursery:

        async def finish():
            await trio.sleep(100)
            files.becomes("staged")
            await trio.sleep(100)
            files.becomes("persisted")

        nursery.start_soon(finish)
        request = codec.Request(1, "wait", {"path": "/a", "timeout_s": 1000})
        assert (await ops(files).handle(request, Caller(0, 0, 1))).result["durability"] == "persisted"
    assert files.looks == 3
    assert trio.current_time() - began == pytest.approx(200, abs=1)


async def test_a_change_during_the_look_is_not_missed(files, autojump_clock):
    files.level = "open"
    look = files.durability

    async def overtaken(path, caller):
        level = await look(path, caller)
        if level == "open":
            files.becomes("persisted")
        return level

    files.durability = overtaken
    request = codec.Request(1, "wait", {"path": "/a", "timeout_s": 1000})
    began = trio.current_time()
    assert (await ops(files).handle(request, Caller(0, 0, 1))).result["durability"] == "persisted"
    assert trio.current_time() - began < 1


async def test_a_wait_ends_in_time_though_the_source_is_silent(files, autojump_clock):
    async def silent(path, caller):
        await trio.sleep_forever()

    files.durability = silent
    began = trio.current_time()
    request = codec.Request(1, "wait", {"path": "/a", "timeout_s": 0})
    with pytest.raises(DeadlineExceededError, match="no answer about it"):
        await ops(files).handle(request, Caller(0, 0, 1))
    assert trio.current_time() - began < 5


async def test_parked_bytes_are_listed_shown_published_and_dropped(files, autojump_clock):
    handler, caller = ops(files), Caller(os.getuid(), 0, 1)

    async def do(act, caller=caller, **args):
        return (await handler.handle(codec.Request(1, "conflicts", {"act": act, **args}), caller)).result

    found = {"id": 7, "path": "/run/a", "size": 3, "hidden": "/.turbofs/conflicts/7/a"}
    assert await do("ls") == {"conflicts": [found]}
    assert await do("show", id=7) == found
    with pytest.raises(NotFoundError, match="no conflict 8"):
        await do("show", id=8)
    with pytest.raises(NotPermittedError):
        await do("drop", Caller(54321, 1, 1), id=7)
    # Longer than the deadline of a request: bytes are written.
    assert await do("publish", id=7, to="/b") == {"id": 7, "path": "/b", "size": 3, "replaced": None}
    assert await do("ls") == {"conflicts": []}
    files.parked[8] = {"id": 8, "path": "/run/b"}
    assert (await do("publish", id=8))["path"] == "/run/b"
    files.parked[9] = {"id": 9}
    assert await do("drop", id=9) == {"id": 9}
    assert files.parked == {}


async def test_open_passes_a_descriptor_of_the_local_copy(path, files):
    def read():
        with ControlClient(path) as client:
            descriptor = client.open("/local")
            try:
                assert not os.get_inheritable(descriptor)
                return os.read(descriptor, 100)
            finally:
                os.close(descriptor)

    async with serving(path, ops(files)):
        before = len(os.listdir("/proc/self/fd"))
        assert await in_thread(read) == b"bytes"
        with pytest.raises(NotSupportedError):
            await call(path, "open", {"path": "/elsewhere"})
        await call(path, "open", {"path": "/local"})  # a client that does not expect it must not leak it
        await trio.testing.wait_all_tasks_blocked()
        assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("op", ["group.open", "group.seal", "group.wait"])
async def test_group_operations_say_that_there_are_none(files, op):
    with pytest.raises(NotSupportedError, match="no groups"):
        await ops(files).handle(codec.Request(1, op), Caller(0, 0, 1))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("nonsense", {}),
        ("ping", {"extra": 1}),
        ("hint", {"path": "/a"}),
        ("hint", {"path": "/a", "name": "n", "value": "text"}),
        ("hint", {"path": b"/a", "name": "n", "value": b""}),
        ("prefetch", {"path": "/a", "ranges": [[1]]}),
        ("prefetch", {"path": "/a", "ranges": [[5, 1]]}),
        ("prefetch", {"path": "/a", "ranges": [[-5, 1]]}),
        ("prefetch", {"path": "/a", "ranges": ["ab", None]}),
        ("cancel", {"job": True}),
        ("wait", {"job": 1}),
        ("wait", {"job": 1, "timeout_s": float("nan")}),
        ("wait", {"job": 1, "timeout_s": -1}),
        ("conflicts", {}),
        ("conflicts", {"act": "burn", "id": 7}),
        ("conflicts", {"act": "ls", "id": 7}),
        ("conflicts", {"act": "show"}),
        ("conflicts", {"act": "drop", "id": "7"}),
        ("conflicts", {"act": "drop", "id": 7, "to": "/b"}),
        ("conflicts", {"act": "publish", "id": 7, "to": "b"}),
        ("status", {"path": "relative"}),
        ("status", {"path": "/a/../b"}),
        ("status", {"path": "/a\0b"}),
    ],
)
async def test_wrong_arguments_are_refused(files, op, args):
    with pytest.raises((ProtocolError, InvalidRequestError)):
        await ops(files).handle(codec.Request(1, op, args), Caller(0, 0, 1))


# --- events


async def test_events_reach_whom_they_concern():
    bus, me = EventBus(), os.geteuid()
    stranger, owner, root, mount = (bus.subscribe(uid) for uid in (me + 2, me + 1, 0, me))
    bus.publish("prefetch_started", owner_uid=me + 1, path="/private/f")
    for channel in (owner, root, mount):
        assert channel.receive_nowait() == {"event": "prefetch_started", "path": "/private/f"}
    with pytest.raises(trio.WouldBlock):
        stranger.receive_nowait()
    for channel in (stranger, owner, root):
        channel.close()
    latest = bus.subscribe(me)
    assert bus.subscribers == 2
    latest.close()
    mount.close()


async def test_subscribers_get_events_and_a_slow_one_is_cut_off(path, files):
    async with serving(path, ops(files), Limits(frame_s=0.2)):
        slow, fast = await raw(path), await raw(path)
        for stream in (slow, fast):
            await stream.send(codec.encode({"id": 1, "op": "subscribe"}))
            assert (await receive(stream))["ok"] is True
        files.events.publish("hello", owner_uid=os.getuid(), number=1)
        assert await receive(fast) == {"event": "hello", "number": 1}
        while files.events.subscribers == 2:
            files.events.publish("flood", owner_uid=os.getuid(), text="x" * 60_000)
            await receive(fast)
        files.events.publish("still here", owner_uid=os.getuid())
        while (await receive(fast))["event"] == "flood":
            pass
        assert await call(path, "ping")
        slow.close()
        fast.close()
        while files.events.subscribers:
            files.events.publish("anybody?", owner_uid=os.getuid())
            await trio.sleep(0.01)


async def test_the_client_yields_events_until_the_daemon_ends(path, files):
    def first_two():
        with ControlClient(path) as client:
            events = client.events()
            return [next(events), next(events)]

    async with serving(path, ops(files)), trio.open_nursery() as nursery:
        found = []

        async def collect():
            found.extend(await in_thread(first_two))
            nursery.cancel_scope.cancel()

        nursery.start_soon(collect)
        while True:
            files.events.publish("tick", owner_uid=os.getuid())
            await trio.sleep(0.01)
    assert [event["event"] for event in found] == ["tick", "tick"]


# --- hostile clients


class Patient:
    """Answers `slow` when released, everything else at once."""

    def __init__(self):
        self.release, self.running, self.most = trio.Event(), 0, 0

    async def handle(self, request, caller):
        if request.op == "slow":
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await self.release.wait()
            finally:
                self.running -= 1
        if request.op == "defect":
            raise ZeroDivisionError
        if request.op == "huge":
            return Answer({"text": "x" * (codec.REPLY_LIMIT_BYTES + 1)})
        if request.op == "large":
            return Answer({"text": "x" * (4 << 20)})
        return Answer({"op": request.op})


async def test_requests_of_one_connection_are_answered_as_they_are_ready(path):
    handler = Patient()
    async with serving(path, handler):
        stream = await raw(path)
        await stream.send(codec.encode({"id": 1, "op": "slow"}) + codec.encode({"id": 2, "op": "quick"}))
        assert (await receive(stream))["id"] == 2
        handler.release.set()
        assert (await receive(stream))["id"] == 1
        stream.close()


async def test_too_many_requests_at_once_are_refused_and_the_connection_goes_on(path):
    handler = Patient()
    async with serving(path, handler, Limits(requests_per_connection=4)):
        stream = await raw(path)
        for number in range(6):
            await stream.send(codec.encode({"id": number, "op": "slow"}))
        refused = [await receive(stream), await receive(stream)]
        assert {reply["id"] for reply in refused} == {4, 5}
        assert all(reply["error"]["code"] == "EBUSY" for reply in refused)
        assert handler.most == 4
        handler.release.set()
        assert {(await receive(stream))["id"] for _ in range(4)} == {0, 1, 2, 3}
        stream.close()


async def test_what_a_client_left_running_is_cancelled_when_it_goes(path):
    handler = Patient()
    async with serving(path, handler):
        stream = await raw(path)
        await stream.send(codec.encode({"id": 1, "op": "slow"}))
        while not handler.running:
            await trio.sleep(0.001)
        stream.close()
        while handler.running:
            await trio.sleep(0.001)


async def test_a_defect_or_an_over_long_answer_is_an_error_reply(path):
    async with serving(path, Patient()):
        with pytest.raises(TurboError, match="see its log"):
            await call(path, "defect")
        with pytest.raises(ProtocolError, match="exceeds the limit"):
            await call(path, "huge")
        assert await call(path, "ping") == {"op": "ping"}


async def test_an_over_long_message_is_answered_and_the_connection_closed(path):
    async with serving(path, Patient()):
        stream = await raw(path)
        await stream.send(b"\xff\xff\xff\xff")
        reply = await receive(stream)
        assert (reply["id"], reply["error"]["code"]) == (None, "EPROTO")
        assert await receive(stream) is None
        stream.close()
        with pytest.raises(ProtocolError, match="exceeds the limit"):
            await call(path, "ping", {"x": b"x" * (2 << 20)})


async def test_malformed_messages_are_answered_and_the_next_one_is_served(path):
    async with serving(path, Patient()):
        stream = await raw(path)
        for bad in (b"\xc1", b"\x90", b"\x81\xa2id\x05"):
            await stream.send(codec.HEADER.pack(len(bad)) + bad)
            assert (await receive(stream))["error"]["code"] == "EPROTO"
        await stream.send(codec.encode({"id": 9, "op": "ping"}))
        assert (await receive(stream))["id"] == 9
        stream.close()


async def test_a_frame_that_never_ends_is_cut_off(path):
    async with serving(path, Patient(), Limits(frame_s=0.1)):
        stream = await raw(path)
        await stream.send(b"\x00\x00")
        assert await stream.recv(1) == b""
        stream.close()
        idle = await raw(path)  # a client that is merely quiet stays connected
        await trio.sleep(0.2)
        await idle.send(codec.encode({"id": 1, "op": "ping"}))
        assert (await receive(idle))["ok"] is True
        idle.close()


async def test_a_client_that_does_not_read_is_cut_off_and_others_are_served(path):
    async with serving(path, Patient(), Limits(frame_s=0.2)) as server:
        stream = await raw(path)
        await stream.send(codec.encode({"id": 1, "op": "large"}))
        assert await call(path, "ping") == {"op": "ping"}
        while server.connections:
            await trio.sleep(0.01)
        received = 0
        while part := await stream.recv(1 << 20):
            received += len(part)
        assert received < 4 << 20
        stream.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
async def test_one_users_connections_are_limited_and_others_get_in(path):
    async with serving(path, Patient(), Limits(connections_per_user=3)):

        def connect_as_other():
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    os.setgroups([])
                    os.setgid(12345)
                    os.setuid(12345)
                    clients = [ControlClient(path) for _ in range(3)]
                    for client in clients:
                        client.call("ping")
                    try:
                        ControlClient(path).call("ping")
                    except BusyError:
                        code = 0
                finally:
                    os._exit(code)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        for folder in path.parents:
            if folder.stat().st_uid == 0 and folder.name.startswith("pytest"):
                folder.chmod(0o755)
        path.parent.chmod(0o755)
        assert await in_thread(connect_as_other) == 0
        assert await call(path, "ping") == {"op": "ping"}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300))
def test_no_bytes_harm_the_server(data, tmp_path):
    path = tmp_path / "fuzzed"

    async def run():
        async with serving(path, Patient(), Limits(frame_s=0.05)):
            stream = await raw(path)
            await stream.send(data)
            stream.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):  # closed with some of it unread
                while await stream.recv(1 << 16):
                    pass
            stream.close()
            assert await call(path, "ping") == {"op": "ping"}

    trio.run(run)


# --- the client


async def test_no_daemon_is_not_reachable(path):
    with pytest.raises(NotReachableError, match="no daemon answers"):
        ControlClient(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    with pytest.raises(NotReachableError):
        ControlClient(path)


async def test_a_daemon_that_does_not_answer_is_a_deadline(path):
    async with serving(path, Patient()):
        with pytest.raises(DeadlineExceededError, match="did not answer `slow`"):
            await call(path, "slow", timeout_s=0.1)


async def test_a_daemon_that_ends_meanwhile_is_not_reachable(path):
    listener = trio.socket.socket(socket.AF_UNIX)
    await listener.bind(str(path))
    listener.listen()

    async def hang_up():
        connection, _ = await listener.accept()
        await connection.recv(1)
        connection.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hang_up)
        with pytest.raises(NotReachableError, match="closed the connection"):
            await call(path, "ping")
    listener.close()
