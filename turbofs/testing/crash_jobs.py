"""A training job that saves, and keeps book of what it was promised, so that a test can judge what a crash has left.

    job = Job(mountpoint, Random(seed), tree)
    history = in_child(partial(run, job, plan))     # ends at the first error, as when the daemon dies
    crash_judge.difference(source_tree, history)    # None: what is there is what was promised

A tree is {path: content}, without a leading slash; directories have the content None.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from turbofs.testing.writing import acknowledge

Tree = dict[str, bytes | None]

_SIZES_BYTES = (0, 1, 4095, 4096, 20_000, 70_000, 150_000, 400_000)
_PIECE_BYTES = 16 << 10


@dataclass
class Opened:
    """A file that is open for writing: what its name was promised last, and what has been written since."""

    path: str
    promised: bytes | None
    live: bytes
    synced: bool = False
    """Whether this descriptor has made a promise: later writes may or may not be part of what is found."""


@dataclass
class History:
    """What a job knows when it ends. `states`: the promised tree after each call that made a promise, oldest first."""

    states: list[Tree]
    early: bool
    """Whether some of it was acknowledged before the source had it."""
    in_flight: Tree | None = None
    """What is promised if the call that has not returned was carried out."""
    opened: list[Opened] = field(default_factory=list)
    checkpoints: dict[bytes, Tree] = field(default_factory=dict)
    """What a tracker file of that content vouches for."""
    error: str | None = None
    """What the failed call was told, and where."""

    @property
    def names(self) -> list[str]:
        """The names of what is open."""
        return [each.path for each in self.opened]

    @property
    def candidates(self) -> list[Tree]:
        return [self.states[-1]] + ([self.in_flight] if self.in_flight is not None else [])


class Job:
    """Calls on the mount at *root*, with the book-keeping. *tree* is what the source has at the start."""

    def __init__(self, root: Path, random: Random, tree: Tree) -> None:
        self.root = root
        self.random = random
        self.history = History([dict(tree)], early=False)

    @property
    def tree(self) -> Tree:
        """What is promised now."""
        return self.history.states[-1]

    def early(self, path: str) -> None:
        """What is saved below *path* from now on is acknowledged early."""
        acknowledge(self.root / path)
        self.history.early = True

    # --- names

    def make_directory(self, path: str) -> None:
        with self._promise() as after:
            after[path] = None
            (self.root / path).mkdir()

    def rename(self, old: str, new: str) -> None:
        """A file, which may be open, or a directory."""
        with self._promise() as after:
            for path in list(after):
                if path == new or path.startswith(f"{new}/"):
                    del after[path]
            for path in list(after):
                if path == old or path.startswith(f"{old}/"):
                    after[new + path[len(old) :]] = after.pop(path)
            os.rename(self.root / old, self.root / new)
        for opened in self.history.opened:
            if opened.path == old or opened.path.startswith(f"{old}/"):
                opened.path = new + opened.path[len(old) :]

    def delete(self, path: str) -> None:
        with self._promise() as after:
            del after[path]
            (self.root / path).unlink()

    def delete_tree(self, path: str) -> None:
        """File by file, as programs do."""
        for each in sorted((each for each in self.tree if each.startswith(f"{path}/")), reverse=True):
            self.delete_directory(each) if self.tree[each] is None else self.delete(each)
        self.delete_directory(path)

    def delete_directory(self, path: str) -> None:
        with self._promise() as after:
            del after[path]
            (self.root / path).rmdir()

    def chmod(self, path: str, mode: int) -> None:
        (self.root / path).chmod(mode)

    # --- files

    def open(self, path: str, flags: int) -> JobFile:
        """Open for writing; *flags* as for os.open, without O_WRONLY."""
        fd = os.open(self.root / path, os.O_WRONLY | flags, 0o644)
        promised = self.tree.get(path)
        opened = Opened(path, promised, b"" if promised is None or flags & os.O_TRUNC else promised)
        self.history.opened.append(opened)
        return JobFile(self, fd, opened)

    def save(self, path: str, data: bytes) -> None:
        """Front to back, into a new file or over an old one."""
        file = self.open(path, os.O_CREAT | os.O_TRUNC)
        for start in range(0, len(data), _PIECE_BYTES):
            file.write(start, data[start : start + _PIECE_BYTES])
        file.close()

    @contextmanager
    def _promise(self) -> Iterator[Tree]:
        after = dict(self.tree)
        # The body changes it before it calls.
        self.history.in_flight = after
        yield after
        self.history.states.append(after)
        self.history.in_flight = None


class JobFile:
    """One descriptor."""

    def __init__(self, job: Job, fd: int, opened: Opened) -> None:
        self._job = job
        self._fd = fd
        self.opened = opened

    def write(self, offset: int, data: bytes) -> None:
        live = self.opened.live.ljust(offset, b"\0")
        self.opened.live = live[:offset] + data + live[offset + len(data) :]
        assert os.pwrite(self._fd, data, offset) == len(data)

    def truncate(self, size: int) -> None:
        self.opened.live = self.opened.live[:size].ljust(size, b"\0")
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        with self._job._promise() as after:  # noqa: SLF001 - one book for both
            after[self.opened.path] = self.opened.live
            os.fsync(self._fd)
        self.opened.promised, self.opened.synced = self.opened.live, True

    def close(self) -> None:
        with self._job._promise() as after:  # noqa: SLF001 - one book for both
            after[self.opened.path] = self.opened.live
            os.close(self._fd)
        self._job.history.opened.remove(self.opened)


# --- what jobs do


def run(job: Job, plan: Callable[[Job], None]) -> History:
    """Do *plan* until it is done or a call fails."""
    try:
        plan(job)
    except OSError as error:
        frames = traceback.extract_tb(error.__traceback__)
        calls = (frame.line for frame in frames if frame.filename == __file__)
        job.history.error = (
            f"{error} at {' < '.join(reversed([str(call) for call in calls]))}; open: {job.history.names}"
        )
    return job.history


def beginning(random: Random) -> Tree:
    """A job's folder with one checkpoint, its tracker file and a log."""
    tree: Tree = {"job": None, "job/step-1": None, "job/log": b"begun\n", "job/latest": b"step-1"}
    tree |= {f"job/step-1/{name}": random.randbytes(random.choice(_SIZES_BYTES)) for name in ("model", "optimizer")}
    return tree


def save_checkpoints(job: Job) -> None:
    """Two checkpoints, each with its log line, its tracker file and the removal of the one before."""
    random = job.random
    job.history.checkpoints[b"step-1"] = {path: data for path, data in job.tree.items() if "/step-1/" in path}
    whole_job, early = random.random() < 0.4, random.random() < 0.8
    if whole_job and early:
        job.early("job")
    log = job.open("job/log", os.O_APPEND) if random.random() < 0.6 else None
    renamed = random.random() < 0.5
    for step in (2, 3):
        final = f"job/step-{step}"
        folder = f"{final}.tmp" if renamed else final
        job.make_directory(folder)
        if early and not whole_job:
            job.early(folder)
        _save_shards(job, folder)
        if random.random() < 0.5:
            job.save(f"{folder}/COMPLETE", b"")
        if renamed:
            job.rename(folder, final)
        name = f"step-{step}".encode()
        job.history.checkpoints[name] = {path: data for path, data in job.tree.items() if path.startswith(f"{final}/")}
        _track(job, name)
        if log is not None:
            log.write(len(log.opened.live), f"saved {step}\n".encode())
            log.sync()
        job.delete_tree(f"job/step-{step - 1}")
    if log is not None:
        log.write(len(log.opened.live), b"ended\n")
        log.close()


def rewrite_files(job: Job) -> None:
    """The same few files over and over: as a whole, in part, at the end, under another name first, and renamed away."""
    random = job.random
    if random.random() < 0.7:
        job.early("job")
    names = [f"job/{name}" for name in "abc"]
    for turn in range(12):
        path = random.choice(names)
        data = _content(job)
        there = job.tree.get(path)
        kind = random.choice(("save", "beside", "append", "update", "cut", "delete", "move", "attributes"))
        if there is None or kind == "save":
            job.save(path, data)
        elif kind == "beside":
            job.save(f"{path}.{turn}", data)
            job.rename(f"{path}.{turn}", path)
        elif kind == "append":
            file = job.open(path, os.O_APPEND)
            file.write(len(there), data)
            file.close()
        elif kind == "update":
            file = job.open(path, 0)
            file.write(random.randrange(len(there) + 1), data)
            file.close()
        elif kind == "cut":
            file = job.open(path, 0)
            file.truncate(random.randrange(len(there) + 5000))
            file.close()
        elif kind == "delete":
            job.delete(path)
        elif kind == "move":
            job.rename(path, random.choice([each for each in names if each != path]))
        else:
            job.chmod(path, random.choice((0o600, 0o640, 0o644)))


def keep_logs(job: Job) -> None:
    """Logs that are synced line by line, small files beside them, and a folder that is renamed with a log open in it."""
    random = job.random
    job.make_directory("job/run")
    if random.random() < 0.6:
        job.early("job/run" if random.random() < 0.5 else "job")
    logs = [job.open(f"job/run/log-{number}", os.O_CREAT | os.O_APPEND) for number in range(2)]
    for turn in range(10):
        log = random.choice(logs)
        log.write(len(log.opened.live), _content(job)[:5000] + b"\n")
        if random.random() < 0.7:
            log.sync()
        if turn == 5 and random.random() < 0.5:
            job.rename("job/run", "job/ran")
        if random.random() < 0.4:
            folder = log.opened.path.rpartition("/")[0]
            job.save(f"{folder}/note", f"turn {turn}".encode())
    for log in logs:
        log.close()


PLANS = (save_checkpoints, rewrite_files, keep_logs)


def _save_shards(job: Job, folder: str) -> None:
    random = job.random
    for number in range(random.randint(2, 4)):
        path, data = f"{folder}/shard-{number}", _content(job)
        style = random.choice(("sequential", "random", "synced", "extended", "beside"))
        if style == "sequential":
            job.save(path, data)
            continue
        if style == "beside":
            job.save(f"{path}.part", data)
            job.rename(f"{path}.part", path)
            continue
        pieces = list(range(0, len(data), _PIECE_BYTES))
        if style == "random":
            random.shuffle(pieces)
        file = job.open(path, os.O_CREAT | os.O_EXCL)
        if style == "extended":
            file.truncate(len(data))
        for count, start in enumerate(pieces):
            file.write(start, data[start : start + _PIECE_BYTES])
            if style == "synced" and count in {0, len(pieces) // 2}:
                file.sync()
        file.close()


def _track(job: Job, name: bytes) -> None:
    if job.random.random() < 0.5:
        job.save("job/latest", name)
    else:
        job.save("job/latest.new", name)
        job.rename("job/latest.new", "job/latest")


def _content(job: Job) -> bytes:
    return job.random.randbytes(job.random.choice(_SIZES_BYTES))


# --- what may be found after a crash
