"""The source of the demo, without a mount: where its files are put beforehand, and looked at afterwards."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

UPLOADS = 8
"""Files written at a time: completing a small file on HDFS waits for its replicas, mostly."""


class DemoError(Exception):
    """A step did not do what it should; the message says what it did."""


class Place(Protocol):
    """A directory of a source, reached by the source's own means."""

    def fill(self, tree: Path, stack: contextlib.ExitStack) -> None:
        """Make the directory, with a copy of *tree*; *stack* deletes it. Raises DemoError."""

    def content(self, folder: str) -> dict[str, bytes]:
        """The files of *folder*, by name; none where there is no such folder. Raises DemoError."""


def place_of(url: str) -> Place:
    """The directory *url*, which need not exist: hdfs://HOST:PORT/PATH or file:///PATH."""
    return HdfsPlace(url) if url.startswith("hdfs:") else LocalPlace(Path(unquote(urlsplit(url).path)))


class LocalPlace:
    """A local directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def fill(self, tree: Path, stack: contextlib.ExitStack) -> None:
        stack.callback(shutil.rmtree, self._path, ignore_errors=True)
        try:
            shutil.copytree(tree, self._path)
        except OSError as error:
            raise DemoError(f"{self._path} cannot be written: {error}") from error

    def content(self, folder: str) -> dict[str, bytes]:
        try:
            return {path.name: path.read_bytes() for path in (self._path / folder).iterdir()}
        except FileNotFoundError:
            return {}


class HdfsPlace:
    """A directory of HDFS, through HDFS's own client."""

    def __init__(self, url: str) -> None:
        import hdfs_native

        parts = urlsplit(url)
        self._hdfs: Any = hdfs_native
        self._authority = parts.netloc
        self._base = unquote(parts.path)
        self._client = hdfs_native.Client(f"{parts.scheme}://{parts.netloc}")

    def fill(self, tree: Path, stack: contextlib.ExitStack) -> None:
        files = [path for path in tree.rglob("*") if path.is_file()]
        with self._failing("did not take the files"):
            self._client.mkdirs(self._base, create_parent=True)
            stack.callback(self._client.delete, self._base, recursive=True)
            for folder in {file.parent for file in files}:
                self._client.mkdirs(f"{self._base}/{folder.relative_to(tree)}", create_parent=True)
            with ThreadPoolExecutor(UPLOADS) as pool:
                list(pool.map(lambda file: self._put(file, f"{self._base}/{file.relative_to(tree)}"), files))

    def content(self, folder: str) -> dict[str, bytes]:
        found = {}
        with self._failing("cannot be read"):
            try:
                entries = list(self._client.list_status(f"{self._base}/{folder}"))
            except FileNotFoundError:
                return {}
            for entry in entries:
                with contextlib.suppress(FileNotFoundError), self._client.read(entry.path) as reader:
                    found[entry.path.rsplit("/", 1)[-1]] = bytes(reader.read(entry.length))
        return found

    def _put(self, file: Path, target: str) -> None:
        with self._client.create(target, self._hdfs.WriteOptions(overwrite=False)) as writer:
            writer.write(file.read_bytes())

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise DemoError(f"HDFS at {self._authority} {what}: {error}") from error
