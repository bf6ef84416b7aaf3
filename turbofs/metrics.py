"""Every metric's name, unit and meaning, in one place; one registry a mount.

`SPECIFICATIONS` is the list that documentation and tests read; `Metrics` the live values. What is counted for each read
is counted in plain numbers (a locked counter costs a microsecond, and a small read passes seven) and told to the
registry when somebody asks.
"""

from __future__ import annotations

import errno as _errno
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

Kind = Literal["counter", "gauge", "histogram"]
Origin = Literal["cache", "source"]

# From a cache hit (tens of microseconds) to the request deadline (a minute).
_SECONDS_BUCKETS = (25e-6, 1e-4, 2.5e-4, 1e-3, 2.5e-3, 1e-2, 2.5e-2, 0.1, 0.25, 1.0, 2.5, 10.0, 60.0)


@dataclass(frozen=True, slots=True)
class Specification:
    """One metric. Counters gain the suffix `_total` in the text format."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()


SPECIFICATIONS = (
    Specification(
        "turbofs_requests",
        "counter",
        "requests",
        "Kernel requests answered; errno is OK or a name such as ENOENT.",
        ("op", "errno"),
    ),
    Specification(
        "turbofs_request_seconds", "histogram", "seconds", "From a kernel request's arrival to its answer.", ("op",)
    ),
    Specification(
        "turbofs_read_bytes", "counter", "bytes", "Bytes handed to readers, from cache or source.", ("origin",)
    ),
    Specification(
        "turbofs_source_acts",
        "counter",
        "acts",
        "Acts asked of the source; outcome: ok or an errno.",
        ("act", "outcome"),
    ),
    Specification("turbofs_source_read_bytes", "counter", "bytes", "Bytes fetched from the source, wanted or not."),
    Specification("turbofs_source_retries", "counter", "retries", "Acts repeated after a transient error.", ("act",)),
    Specification("turbofs_fetches_in_flight", "gauge", "fetches", "Reads of the source that have not ended."),
    Specification("turbofs_cache_bytes", "gauge", "bytes", "Bytes that the extent cache holds."),
    Specification("turbofs_budget_bytes", "gauge", "bytes", "The memory budget of all buffers."),
    Specification("turbofs_budget_used_bytes", "gauge", "bytes", "What cache, fetches and replies hold of it."),
    Specification("turbofs_evictions", "counter", "extents", "Extents that the cache let go for others."),
    Specification("turbofs_hints", "counter", "hints", "Hints given: set, removed or refused.", ("name", "outcome")),
    Specification("turbofs_prefetch_wanted_bytes", "counter", "bytes", "Bytes that prefetch hints asked for."),
    Specification("turbofs_prefetch_fetched_bytes", "counter", "bytes", "Bytes that prefetches fetched."),
    Specification("turbofs_written_bytes", "counter", "bytes", "Bytes that programs wrote to the mount."),
    Specification("turbofs_uploaded_bytes", "counter", "bytes", "Bytes that were sent to the source."),
    Specification("turbofs_staged_bytes", "gauge", "bytes", "Room that written bytes take in the staging area."),
    Specification("turbofs_broken_files", "gauge", "files", "Acknowledged files that could not be persisted."),
    Specification("turbofs_open_handles", "gauge", "handles", "Files that programs hold open."),
)


class Metrics:
    """The metrics of one mount; attributes are the metrics, without the prefix `turbofs_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("turbofs_requests")
        self.request_seconds = self._histogram("turbofs_request_seconds")
        self.read_bytes = self._counter("turbofs_read_bytes")
        self.source_acts = self._counter("turbofs_source_acts")
        self.source_read_bytes = self._counter("turbofs_source_read_bytes")
        self.source_retries = self._counter("turbofs_source_retries")
        self.fetches_in_flight = self._gauge("turbofs_fetches_in_flight")
        self.cache_bytes = self._gauge("turbofs_cache_bytes")
        self.budget_bytes = self._gauge("turbofs_budget_bytes")
        self.budget_used_bytes = self._gauge("turbofs_budget_used_bytes")
        self.evictions = self._counter("turbofs_evictions")
        self.hints = self._counter("turbofs_hints")
        self.prefetch_wanted_bytes = self._counter("turbofs_prefetch_wanted_bytes")
        self.prefetch_fetched_bytes = self._counter("turbofs_prefetch_fetched_bytes")
        self.written_bytes = self._counter("turbofs_written_bytes")
        self.uploaded_bytes = self._counter("turbofs_uploaded_bytes")
        self.staged_bytes = self._gauge("turbofs_staged_bytes")
        self.broken_files = self._gauge("turbofs_broken_files")
        self.open_handles = self._gauge("turbofs_open_handles")
        self._in_flight = 0
        self._requests: dict[tuple[str, int], int] = {}
        self._seconds: dict[str, Histogram] = {}
        self._read: dict[Origin, int] = {"cache": 0, "source": 0}
        self._fetched = 0
        self._written = 0
        self._acts: dict[tuple[str, int], int] = {}

    def request_done(self, op: str, errno: int, seconds: float) -> None:
        """One kernel request was answered, with *errno* (0: success) after *seconds*."""
        key = (op, errno)
        self._requests[key] = self._requests.get(key, 0) + 1
        histogram = self._seconds.get(op)
        if histogram is None:
            histogram = self._seconds[op] = self.request_seconds.labels(op)
        histogram.observe(seconds)

    def bytes_read(self, origin: Origin, count: int) -> None:
        """*count* bytes went to a reader, from the cache or fetched for it."""
        self._read[origin] += count

    def bytes_written(self, count: int) -> None:
        """A program wrote *count* bytes to the mount."""
        self._written += count

    def fetch_began(self) -> None:
        self._in_flight += 1

    def fetch_ended(self, count: int) -> None:
        """A fetch brought *count* bytes from the source, wanted or not; none where it failed."""
        self._in_flight -= 1
        self._fetched += count

    def source_act(self, act: str, errno: int) -> None:
        """The source ended *act* (stat, list, open, read, …), with *errno* or 0."""
        key = (act, errno)
        self._acts[key] = self._acts.get(key, 0) + 1

    def hint_given(self, name: str, outcome: Literal["set", "removed", "refused"]) -> None:
        self.hints.labels(name, outcome).inc()

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        self._tell()
        return generate_latest(self.registry)

    def _tell(self) -> None:
        """Hand what was counted since the last time to the registry."""
        for (op, errno), count in self._requests.items():
            self.requests.labels(op, errno_name(errno)).inc(count)
        for origin, count in self._read.items():
            self.read_bytes.labels(origin).inc(count)
        for (act, errno), count in self._acts.items():
            self.source_acts.labels(act, "ok" if errno == 0 else errno_name(errno)).inc(count)
        self.source_read_bytes.inc(self._fetched)
        self.written_bytes.inc(self._written)
        self.fetches_in_flight.set(self._in_flight)
        self._requests.clear()
        self._acts.clear()
        self._read = {"cache": 0, "source": 0}
        self._fetched = 0
        self._written = 0

    def _counter(self, name: str) -> Counter:
        spec = _specification(name, "counter")
        return Counter(name, spec.meaning, spec.labels, registry=self.registry)

    def _gauge(self, name: str) -> Gauge:
        spec = _specification(name, "gauge")
        return Gauge(name, spec.meaning, spec.labels, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        spec = _specification(name, "histogram")
        return Histogram(name, spec.meaning, spec.labels, registry=self.registry, buckets=_SECONDS_BUCKETS)


def errno_name(errno: int) -> str:
    """OK for 0, else the symbol: ENOENT, EIO, …"""
    return "OK" if errno == 0 else _errno.errorcode.get(errno, str(errno))


def _specification(name: str, kind: Kind) -> Specification:
    return next(spec for spec in SPECIFICATIONS if spec.name == name and spec.kind == kind)
