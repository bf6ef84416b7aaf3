"""Seeded crash runs: a job saves, its daemon is killed somewhere, and what was promised is there in the end.

A seed picks the job, the point at which the daemon is killed (`crashing.POINTS`, or any moment), and up to two more while
the next mount recovers. `pytest tests/crash -k "[17]"` repeats run 17.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from random import Random

import pytest

from turbofs.errors import NotReachableError
from turbofs.source.orphans import is_temporary_name
from turbofs.testing.children import Child, in_child
from turbofs.testing.crash_daemons import Kill, defects
from turbofs.testing.crash_jobs import PLANS, Job, beginning, run
from turbofs.testing.crash_judge import broken_promise, difference
from turbofs.testing.crashing import POINTS
from turbofs.testing.waiting import eventually

pytestmark = pytest.mark.mount

OPTIONS = ("write.stream_from=64KiB", "write.piece=16KiB")
QUICK, ALL = 30, 230
WHILE_RECOVERING = ("upload", "rename", "names", "questions", "publish", "journal", "recovery")
JOB_LIMIT_S, SETTLE_LIMIT_S = 60.0, 20.0


def tree_of(root, hidden=()):
    """{path: content} of a real folder, and the temporary names in it."""
    tree, temporaries = {}, []
    for folder, directories, files in os.walk(root):
        directories[:] = [name for name in directories if name not in hidden]
        for name in directories:
            tree[os.path.relpath(f"{folder}/{name}", root)] = None
        for name in files:
            path = os.path.relpath(f"{folder}/{name}", root)
            if is_temporary_name(name):
                temporaries.append(path)
            else:
                with open(f"{folder}/{name}", "rb") as file:
                    tree[path] = file.read()
    return tree, temporaries


def lay_out(root, tree):
    for path, data in tree.items():
        if data is None:
            (root / path).mkdir(parents=True, exist_ok=True)
    for path, data in tree.items():
        if data is not None:
            (root / path).write_bytes(data)


def some_point(random, places):
    return Kill(random.choice(POINTS[random.choice(places)]), 1 + int(random.expovariate(0.4)))


def is_settled(daemon):
    """Whether nothing is pending; also where the daemon is dead."""
    try:
        writing = daemon.status()["writing"]
    except NotReachableError:
        return False
    return not writing["files"] and not writing["acts"]


def settle_or_die(daemon):
    """Return once nothing is pending any more, or the daemon has met its end."""
    try:
        eventually(lambda: daemon.ended or is_settled(daemon), "all is published", limit_s=SETTLE_LIMIT_S)
    except AssertionError as error:
        error.add_note(f"{daemon.status()['writing']}\n{daemon.log()}")
        raise


@pytest.mark.parametrize(
    "seed", [*range(QUICK), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(QUICK, ALL))]
)
def test_what_was_promised_outlives_crashes(house, place, seed):
    random = Random(seed)
    plan = random.choice(PLANS)
    tree = beginning(random)
    lay_out(place.source, tree)
    anywhere = random.random() < 0.15
    first = None if anywhere else some_point(random, tuple(POINTS))
    again = [some_point(random, WHILE_RECOVERING) for _ in range(random.choice((0, 0, 1, 1, 2)))]
    print(f"seed {seed}: {plan.__name__}, killed at {first or 'any moment'}, then at {again}")

    daemon = house.start(place, first, *OPTIONS)
    job = Job(place.mountpoint, random, tree)
    with Child(partial(run, job, plan)) as working:
        if anywhere:
            time.sleep(random.uniform(0, 0.4))  # the moment is the point here
            daemon.kill()
        history = working.result(JOB_LIMIT_S)
    if history.error is not None:
        eventually(lambda: daemon.ended, f"the daemon is dead, for the job was told {history.error!r}", limit_s=5)
    settle_or_die(daemon)
    print(f"reached: {daemon.ended}; {len(history.states)} promises, early: {history.early}, {history.error}")
    daemon.kill()
    assert broken_promise(tree_of(place.source)[0], history) is None

    for kill in again:
        daemon = house.start(place, kill, *OPTIONS)
        settle_or_die(daemon)
        print(f"{kill} reached: {daemon.ended}")
        assert not daemon.ended or daemon.wait() == -signal.SIGKILL, daemon.log()
        daemon.kill()
        assert broken_promise(tree_of(place.source)[0], history) is None

    daemon = house.start(place, None, *OPTIONS)
    assert daemon.usable, daemon.log()
    shown, _ = in_child(partial(tree_of, place.mountpoint, hidden=(".turbofs",)))
    assert difference(shown, history) is None, f"what the mount shows\n{daemon.status()['writing']}\n{daemon.log()}"
    settle_or_die(daemon)
    assert not daemon.ended, daemon.log()
    writing = daemon.status()["writing"]
    assert writing["broken"] == []
    assert writing["conflicts"] == 0
    eventually(lambda: tree_of(place.source)[1] == [], "nothing temporary is left")
    found, _ = tree_of(place.source)
    assert difference(found, history) is None, "what the source has"
    eventually(lambda: os.listdir(place.staging / "data") == [], "staging is empty", limit_s=10)
    assert daemon.status()["writing"]["staging"]["used_bytes"] == 0
    daemon.stop()
    assert defects(daemon.log()) == [], daemon.log()
