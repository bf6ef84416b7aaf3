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

from turbofs.testing.elsewhere import Elsewhere
from turbofs.testing.hdfs_cluster import HdfsCluster
from turbofs.testing.mounts import Mount, Workplace, workplace

PLAIN, FILE, HDFS = "plain", "file", "hdfs"

_MEMORY = "/dev/shm"
"""Every Linux has a tmpfs here: the quickest file system there is, and another one than the tests' own folders are on."""
_numbers = itertools.count()


class Tree:
    """A writable directory at `path`; `mount` is None where it is a plain one."""

    def __init__(self, kind: str, path: Path, place: Workplace | None, source: str | None) -> None:
        self.kind = kind
        self.path = path
        self.mount: Mount | None = None
        self._place = place
        self._source = source
        self._mounted = ExitStack()

    def remount(self) -> None:
        """End the mount, where it is one, and make it again: what is read afterwards comes from the source."""
        self.close()
        if self._place is not None:
            self.mount = self._mounted.enter_context(self._place.mount(source=self._source))

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
            yield Tree(kind, path, None, None)
        return
    with workplace() as place:
        source = None
        if kind == HDFS:
            assert cluster is not None, "a tree on HDFS needs a cluster"
            place.environment["HADOOP_CONF_DIR"] = str(cluster.conf_dir)
            source = Elsewhere(cluster, f"/tree-{next(_numbers)}").uri
        tree = Tree(kind, place.mountpoint, place, source)
        try:
            tree.remount()
            yield tree
        finally:
            tree.close()
