"""The FUSE limit: a file system with one file in memory, whose read does nothing but hand out a view of it.

A process of its own, mounted like TurboFS (same kernel options, same library), so that the difference to TurboFS is
what TurboFS does and not what FUSE costs:

    python -m turbofs.bench.memory_fuse DIR SIZE_BYTES
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import stat

import pyfuse3
import trio

NAME = "memory.bin"
_FILE_INODE = pyfuse3.InodeT(2)
_DAY_S = 86400.0  # attributes never change: the kernel need not ask again


class MemoryFile(pyfuse3.Operations):
    """One directory, one read-only file of *size_bytes*."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        piece = os.urandom(min(size_bytes, 1 << 20))
        repeated = bytearray(piece * -(-size_bytes // len(piece)) if piece else b"")
        self._content = memoryview(repeated)[:size_bytes]

    async def getattr(
        self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext | None = None
    ) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.attr_timeout = entry.entry_timeout = _DAY_S
        entry.st_uid, entry.st_gid = os.getuid(), os.getgid()
        if inode == pyfuse3.ROOT_INODE:
            entry.st_mode = pyfuse3.ModeT(stat.S_IFDIR | 0o755)
        else:
            entry.st_mode = pyfuse3.ModeT(stat.S_IFREG | 0o444)
            entry.st_size = len(self._content)
        return entry

    async def lookup(
        self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        if parent_inode != pyfuse3.ROOT_INODE or name != NAME.encode():
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(_FILE_INODE)

    async def open(self, inode: pyfuse3.InodeT, flags: pyfuse3.FlagT, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(inode), keep_cache=True)

    async def read(self, fh: pyfuse3.FileHandleT, off: int, size: int) -> bytes:
        # pyfuse3 takes anything with the buffer protocol, its annotation says less
        return self._content[off : off + size]  # type: ignore[return-value]


async def _serve() -> None:
    async with trio.open_nursery() as nursery:

        async def stop_at_signal() -> None:
            with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for _ in signals:
                    break
            pyfuse3.terminate()

        nursery.start_soon(stop_at_signal)
        await pyfuse3.main()
        nursery.cancel_scope.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("size_bytes", type=int)
    arguments = parser.parse_args()
    options = {"default_permissions", "fsname=turbofs-bench-memory"}
    if os.geteuid() == 0:
        options.add("allow_other")
    pyfuse3.init(MemoryFile(arguments.size_bytes), arguments.directory, options)
    try:
        trio.run(_serve)
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    main()
