"""Names to numbers and back, also while the name service is slow or dead."""

from __future__ import annotations

import os
import pwd
import threading

import pytest
import trio
import trio.testing

from turbofs.fs.owners import OwnerMap


class NameService:
    """Counts what it is asked, and can be made to hang."""

    def __init__(self, **known):
        self.known = known
        self.asked = []
        self.healthy = threading.Event()
        self.healthy.set()

    def __call__(self, name):
        self.asked.append(name)
        self.healthy.wait(60)
        return self.known[name]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def users():
    service = NameService(alice=1001, bob=1002)
    yield service
    service.healthy.set()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def owners(users, clock):
    return OwnerMap(300, clock=clock, lookup_deadline_s=0.2, uid_of=users, gid_of=NameService(staff=50))


async def test_names_are_translated_and_remembered(owners, users):
    assert owners.resolve_nowait("alice", "staff") is None
    assert await owners.resolve("alice", "staff") == (1001, 50)
    assert owners.resolve_nowait("alice", "staff") == (1001, 50)
    assert await owners.resolve("alice", "staff") == (1001, 50)
    assert users.asked == ["alice"]


async def test_unknown_names_become_nobody_and_are_remembered_too(owners, users):
    assert await owners.resolve("mallory", "wheel") == (owners.overflow_uid, owners.overflow_gid)
    assert owners.resolve_nowait("mallory", "wheel") == (owners.overflow_uid, owners.overflow_gid)
    assert users.asked == ["mallory"]


async def test_answers_are_forgotten_after_the_timeout(owners, users, clock):
    await owners.resolve("alice", 0)
    users.known["alice"] = 2001
    clock.now = 299
    assert owners.resolve_nowait("alice", 0) == (1001, 0)
    clock.now = 300
    assert owners.resolve_nowait("alice", 0) is None
    assert await owners.resolve("alice", 0) == (2001, 0)


async def test_numbers_pass_through_without_asking(owners, users):
    assert owners.resolve_nowait(7, 8) == (7, 8)
    assert await owners.resolve(7, 8) == (7, 8)
    assert users.asked == []


async def test_name_of_digits_is_that_number_unless_a_user_has_it(owners, users):
    users.known["1234"] = 9
    assert await owners.resolve("1234", "77") == (9, 77)
    assert await owners.resolve("5678", 0) == (5678, 0)
    assert await owners.resolve("99999999999", 0) == (owners.overflow_uid, 0)


async def test_dead_name_service_costs_one_deadline_and_shows_nobody(owners, users, clock):
    users.healthy.clear()
    with trio.fail_after(10):
        assert await owners.resolve("alice", 0) == (owners.overflow_uid, 0)
    assert owners.resolve_nowait("alice", 0) == (owners.overflow_uid, 0)
    clock.now = 5
    assert owners.resolve_nowait("alice", 0) is None


async def test_dead_name_service_does_not_take_back_what_it_said(owners, users, clock):
    await owners.resolve("alice", 0)
    users.healthy.clear()
    clock.now = 301
    assert await owners.resolve("alice", 0) == (1001, 0)


async def test_late_answer_serves_the_next_request(owners, users):
    users.healthy.clear()
    assert await owners.resolve("bob", 0) == (owners.overflow_uid, 0)
    users.healthy.set()
    with trio.fail_after(10):
        while owners.resolve_nowait("bob", 0) != (1002, 0):
            await trio.sleep(0.001)


async def test_many_who_ask_at_once_cause_one_lookup(owners, users):
    users.healthy.clear()
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(owners.resolve, "alice", 0)
        await trio.testing.wait_all_tasks_blocked()
        users.healthy.set()
    assert users.asked == ["alice"]


async def test_dead_name_service_holds_few_threads(owners, users):
    users.healthy.clear()
    with trio.fail_after(30):
        await owners.prepare((f"user{i}", 0) for i in range(50))
    assert len(users.asked) <= 4


async def test_prepare_answers_a_whole_directory_at_once(owners, users):
    await owners.prepare([("alice", "staff"), ("bob", "staff"), ("alice", 0), (5, 6)])
    assert owners.resolve_nowait("bob", "staff") == (1002, 50)
    assert owners.resolve_nowait("alice", "staff") == (1001, 50)
    assert sorted(users.asked) == ["alice", "bob"]


async def test_lookup_that_fails_oddly_is_an_unknown_name():
    def broken(name):
        raise OSError("name service went away")

    owners = OwnerMap(300, uid_of=broken, gid_of=broken)
    assert await owners.resolve("a", "b") == (owners.overflow_uid, owners.overflow_gid)
    assert await OwnerMap(300).resolve("a\0b", 0) == (owners.overflow_uid, 0)


async def test_this_machines_own_users_both_ways():
    owners = OwnerMap(300)
    me = pwd.getpwuid(os.getuid())
    assert await owners.resolve(me.pw_name, "root") == (me.pw_uid, 0)
    assert await owners.user_name(0) == "root"
    assert await owners.group_name(0) == "root"
    assert await owners.user_name(2_000_000_000) is None
