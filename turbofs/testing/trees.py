"""Places to write to, for programs that know nothing of TurboFS: a plain directory, and mounts of `file:` and `hdfs:`.

The same program runs on all three. On the plain directory it proves that the program and its settings are right on this
machine; what fails on a mount only is the mount's.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import hdfs_native

from turbofs.testing.elsewhere import Elsewhere
from turbofs.testing.hdfs_cluster import HdfsCluster
from turbofs.testing.mounts import Mount, Workplace, workplace

PLAIN, FILE, HDFS = "plain", "file", "hdfs"

_MEMORY = "/dev/shm"
"""Every Linux has a tmpfs here: the quickest file system there is, and another one than the tests' own folders are on."""
_LIFETIME_S = 900
"""The programs have time limits of their own; this one is for a daemon that would outlive all of them."""
_numbers = itertools.count()


class Tree:
    """A writable directory at `path`; `mount` is None where it is a plain one."""

    def __init__(
        self, kind: str, path: Path, place: Workplace | None = None, elsewhere: Elsewhere | None = None
    ) -> None:
        self.kind = kind
        self.path = path
        self.mount: Mount | None = None
        self._place = place
        self._elsewhere = elsewhere
        self._mounted = ExitStack()

    def stored(self, folder: str) -> dict[str, bytes]:
        """Every file below *folder* as the source itself holds it, by its path from there."""
        if self._elsewhere is not None:
            root = self._elsewhere.path(folder)
            client = self._elsewhere.client
            listed = [each for each in client.list_status(root, recursive=True) if not each.isdir]
            return {each.path.removeprefix(f"{root}/"): self._read(client, each.path, each.length) for each in listed}
        base = (self._place.source if self._place else self.path) / folder
        return {str(path.relative_to(base)): path.read_bytes() for path in base.rglob("*") if path.is_file()}

    @staticmethod
    def _read(client: hdfs_native.Client, path: str, length: int) -> bytes:
        with client.read(path) as reader:
            data = bytes(reader.read(length))
        assert len(data) == length, f"{path}: {len(data)} of {length} bytes"
        return data

    def remount(self) -> None:
        """End the mount, where it is one, and make it again: what is read afterwards comes from the source."""
        self.close()
        if self._place is not None:
            self.mount = self._mounted.enter_context(
                self._place.mount(source=self._elsewhere.uri if self._elsewhere else None)
            )

    def close(self) -> None:
        self._mounted.close()
        self.mount = None


@contextmanager
def writable_tree(kind: str, cluster: HdfsCluster | None = None) -> Iterator[Tree]:
    """An empty writable directory of the *kind* `plain`, `file` or `hdfs` (of *cluster*), gone afterwards."""
    if kind == PLAIN:
        with tempfile.TemporaryDirectory(prefix="turbofs-plain-", dir=_MEMORY) as folder:
            path = Path(folder)
            path.chmod(0o755)
            yield Tree(kind, path)
        return
    with workplace() as place:
        place.lifetime_s = _LIFETIME_S
        elsewhere = None
        if kind == HDFS:
            assert cluster is not None, "a tree on HDFS needs a cluster"
            place.environment["HADOOP_CONF_DIR"] = str(cluster.conf_dir)
            elsewhere = Elsewhere(cluster, f"/tree-{next(_numbers)}")
        tree = Tree(kind, place.mountpoint, place, elsewhere)
        try:
            tree.remount()
            yield tree
        finally:
            tree.close()
