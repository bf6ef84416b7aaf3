"""Which of a few open readers serves a read.

A reader keeps the block locations that it got when it was opened and always starts with the first of them. A few
readers in rotation spread the load over the replicas, and none lives so long that it misses new ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from turbofs.source.hdfs.native import ByteReader

_READERS = 4
"""Four streams saturate a local HDFS; more locations than that are rare."""
_USERS_SMALL = 8
"""Small reads at once on one reader, before another one takes its share."""
_AGE_LIMIT_S = 30.0
"""Replicas that were added since (a replication hint) are used within this time."""
_BYTES_LIMIT = 128 << 20
"""An open costs the NameNode one call; one for each 128 MiB read is what Hadoop's own client asks for."""


@dataclass(eq=False)
class Lease:
    """One reader, and how busy and how worn it is."""

    reader: ByteReader
    born_s: float = field(default_factory=time.monotonic)
    users: int = 0
    served_bytes: int = 0

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.born_s


class ReaderPool:
    """At most four readers of one file. Used in the trio thread only; readers themselves are used in threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._leases: list[Lease] = []
        self._clock = clock

    def __len__(self) -> int:
        return len(self._leases)

    def pick(self, length: int, *, large: bool) -> Lease | None:
        """The least used reader for *length* bytes; None: open another one and `add` it.

        Large reads that find all readers busy get one of their own, while there are few; small ones share longer.
        """
        now = self._clock()
        self._leases = [
            lease for lease in self._leases if now - lease.born_s < _AGE_LIMIT_S and lease.served_bytes < _BYTES_LIMIT
        ]
        if not self._leases:
            return None
        lease = min(self._leases, key=lambda candidate: (candidate.users, candidate.served_bytes))
        if lease.users >= (1 if large else _USERS_SMALL) and len(self._leases) < _READERS:
            return None
        lease.users += 1
        lease.served_bytes += length
        return lease

    def add(self, reader: ByteReader, length: int) -> Lease:
        """Take in a new reader, busy with its first *length* bytes."""
        lease = Lease(reader, self._clock(), 1, length)
        if len(self._leases) < _READERS:
            self._leases.append(lease)
        return lease

    def give_back(self, lease: Lease) -> None:
        lease.users -= 1

    def discard(self, lease: Lease) -> None:
        """A reader that failed: its locations may be gone, or its DataNode hangs."""
        if lease in self._leases:
            self._leases.remove(lease)

    def clear(self) -> None:
        self._leases.clear()
