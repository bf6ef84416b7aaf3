"""A source around another one that keeps every act within a deadline and repeats what may succeed.

Only errors that say `transient` are repeated, and attempts that took too long. An act that must not be done twice is
checked before it is repeated, by the identity that its object had before (`FileVersion.file_id`, else size and time):
an answer may have been lost after the act took effect.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import trio

from turbofs.config import SourceConfig
from turbofs.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    NotADirectoryTurboError,
    NotFoundError,
    SourceUnavailableError,
    TurboError,
)
from turbofs.metrics import Metrics
from turbofs.model import AttributeChange, Attributes, BlockLocation, ByteRange, FileKind, FileVersion, Space
from turbofs.source.base import Capability, Listing, Source, SourceFile, SourceWriter
from turbofs.source.retries import OnRetry, Retrier
from turbofs.source.retrying_files import GOODBYE_S, RetryingFile, RetryingListing, RetryingWriter


class RetryingSource(Source):
    """*inner*, with the deadlines and the back-off of *config*; *metrics* count what it was asked.

    *chance* makes the jitter repeatable in tests.
    """

    def __init__(
        self,
        inner: Source,
        config: SourceConfig,
        *,
        chance: random.Random | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.inner = inner
        self.uri = inner.uri
        self._retrier = Retrier(config, inner.uri, chance=chance, metrics=metrics)

    @property
    def capabilities(self) -> frozenset[Capability]:  # type: ignore[override]  # HDFS's change when WebHDFS comes and goes
        return self.inner.capabilities

    async def connect(self, *, wait_s: float | None = None, progress: OnRetry | None = None) -> None:
        """Reach the source within *wait_s* seconds (None: the deadline of any act; 0: one attempt).

        *progress* is told before each pause what is wrong and how many seconds are left. Raises
        SourceUnavailableError where the source did not answer in time.
        """
        deadline = None if wait_s is None else trio.current_time() + wait_s
        try:
            await self._retrier.run(
                "connect to",
                self.uri,
                self.inner.connect,
                deadline=deadline,
                on_retry=progress,
                at_least_once=not wait_s,
            )
        except DeadlineExceededError as error:
            cause = error.__cause__ or error
            raise SourceUnavailableError(f"{self.uri} is not reachable: {cause}") from error

    # --- acts that only look: repeated as they are

    async def stat(self, path: str) -> Attributes:
        return await self._retrier.run("stat", path, lambda: self.inner.stat(path))

    async def stat_exact(self, path: str) -> Attributes:
        return await self._retrier.run("stat", path, lambda: self.inner.stat_exact(path))

    async def list(self, path: str) -> Listing:
        async def open_listing() -> Listing:
            return await self.inner.list(path)

        listing = await self._retrier.run("list", path, open_listing)
        return RetryingListing(listing, path, self._retrier, open_listing)

    async def open(self, path: str) -> SourceFile:
        async def open_file() -> SourceFile:
            return await self.inner.open(path)

        return RetryingFile(await self._retrier.run("open", path, open_file), path, self._retrier, open_file)

    async def readlink(self, path: str) -> str:
        return await self._retrier.run("read the link", path, lambda: self.inner.readlink(path))

    async def open_local(self, path: str, version: FileVersion) -> int:
        return await self._retrier.run("open", path, lambda: self.inner.open_local(path, version))

    async def space(self) -> Space:
        return await self._retrier.run("ask for the space of", "/", self.inner.space)

    async def block_locations(self, path: str, wanted: ByteRange) -> Sequence[BlockLocation]:
        return await self._retrier.run("locate", path, lambda: self.inner.block_locations(path, wanted))

    def require_name(self, path: str) -> None:
        self.inner.require_name(path)

    async def being_written(self, path: str) -> bool:
        return await self._retrier.run("look at", path, lambda: self.inner.being_written(path))

    # --- acts that come to the same when done twice

    async def append(self, path: str) -> SourceWriter:
        writer = await self._retrier.run("append to", path, lambda: self.inner.append(path))
        return RetryingWriter(writer, path, self._retrier)

    async def set_attributes(self, path: str, change: AttributeChange) -> None:
        await self._retrier.run("change the attributes of", path, lambda: self.inner.set_attributes(path, change))

    async def set_replication(self, path: str, copies: int) -> None:
        await self._retrier.run("set the replication of", path, lambda: self.inner.set_replication(path, copies))

    # --- acts that do not: checked before they are repeated

    async def create(self, path: str, *, mode: int = 0o644, replace: bool = False) -> SourceWriter:
        """Create a file.

        Where the answer to an exclusive create was lost and the name exists then, AlreadyExistsError comes: nothing
        tells our own new file from another writer's, and theirs must not be taken.
        """
        tried = False

        async def attempt() -> SourceWriter:
            nonlocal tried
            again, tried = tried, True
            if again and not replace and await self._attributes_or_none(path) is not None:
                raise AlreadyExistsError(
                    f"{path} exists, and may be ours: the answer to creating it was lost", advice="use another name"
                )
            return await self.inner.create(path, mode=mode, replace=replace)

        return RetryingWriter(await self._retrier.run("create", path, attempt), path, self._retrier)

    async def rename(self, old: str, new: str, *, replace: bool, identity: FileVersion | None = None) -> None:
        deadline = self._retrier.deadline()
        before = await self._identity(old, deadline) if identity is None else identity

        async def took_effect() -> bool:
            return not await self._still_is(old, before) and await self._still_is(new, before)

        await self._retrier.run_once(
            f"rename {old} to",
            new,
            lambda: self.inner.rename(old, new, replace=replace),
            took_effect,
            deadline=deadline,
        )

    async def delete(self, path: str) -> None:
        deadline = self._retrier.deadline()
        before = await self._identity(path, deadline)

        async def took_effect() -> bool:
            return not await self._still_is(path, before)

        await self._retrier.run_once("delete", path, lambda: self.inner.delete(path), took_effect, deadline=deadline)

    async def delete_directory(self, path: str) -> None:
        deadline = self._retrier.deadline()
        before = await self._identity(path, deadline)

        async def took_effect() -> bool:
            return not await self._still_is(path, before)

        await self._retrier.run_once(
            "delete the directory", path, lambda: self.inner.delete_directory(path), took_effect, deadline=deadline
        )

    async def make_directory(self, path: str, *, mode: int = 0o755) -> None:
        """Make a directory. One that exists after a lost answer is taken to be ours: directories are for sharing."""

        async def took_effect() -> bool:
            found = await self._attributes_or_none(path)
            return found is not None and found.kind is FileKind.DIRECTORY

        await self._retrier.run_once(
            "make the directory", path, lambda: self.inner.make_directory(path, mode=mode), took_effect
        )

    async def make_symlink(self, path: str, target: str) -> None:
        async def took_effect() -> bool:
            try:
                return await self.inner.readlink(path) == target
            except TurboError as error:
                if error.transient:
                    raise
                return False

        await self._retrier.run_once("make the link", path, lambda: self.inner.make_symlink(path, target), took_effect)

    # --- the rest

    def describe(self) -> dict[str, object]:
        return {**self.inner.describe(), "retries": self._retrier.retries}

    async def aclose(self) -> None:
        with trio.move_on_after(GOODBYE_S, shield=True):
            await self.inner.aclose()

    async def _identity(self, path: str, deadline: float) -> FileVersion:
        attributes = await self._retrier.run("stat", path, lambda: self.inner.stat_exact(path), deadline=deadline)
        return attributes.version

    async def _attributes_or_none(self, path: str) -> Attributes | None:
        try:
            return await self.inner.stat_exact(path)
        except (NotFoundError, NotADirectoryTurboError):
            return None

    async def _still_is(self, path: str, before: FileVersion) -> bool:
        """Whether *path* names the object that had the version *before*: a rename moves its ctime, a child its size."""
        found = await self._attributes_or_none(path)
        if found is None:
            return False
        if before.strong and found.version.strong:
            return before.file_id == found.version.file_id
        return (before.size, before.mtime_ns) == (found.version.size, found.version.mtime_ns)
