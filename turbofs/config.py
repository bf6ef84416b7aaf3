"""Configuration: one frozen dataclass a room, the reason beside each default, unknown keys refused.

Sizes are bytes, times seconds. `load` reads TOML whose tables are the rooms' names:

    [mount]
    memory = "4GiB"
    [fs]
    attribute_timeout = "1s"
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class SourceConfig:
    """How a source is reached (`turbofs/source/`)."""

    client: str = "native"
    """`native` (hdfs-native, no JVM) or `libhdfs` (a JVM; faster for bytes)."""
    hadoop_conf_dir: str | None = None
    """Folder of core-site.xml and hdfs-site.xml; None: HADOOP_CONF_DIR, then HADOOP_HOME/etc/hadoop."""
    user: str | None = None
    """HDFS identity under simple authentication; None: HADOOP_USER_NAME, then the process's user."""
    web_address: str | None = None
    """HOST:PORT (or URL) of the NameNode's HTTP server; None: from hdfs-site.xml, else asked on the usual port 9870."""
    threads: int = 64
    """Blocking client calls in flight: a thread is 100 KiB resident; 64 readers must not wait for one another."""
    operation_timeout_s: float = 10.0
    """One attempt of one act: a healthy NameNode answers within milliseconds, a failover takes about 5 s."""
    deadline_s: float = 40.0
    """All attempts of one act: longer than a NameNode restart (20 s), shorter than an impatient user."""
    backoff_first_s: float = 0.1
    backoff_limit_s: float = 5.0
    s3_endpoint: str | None = None
    """Endpoint of an S3-compatible service, with scheme; None: AWS's own."""
    s3_region: str | None = None
    anonymous: bool = False
    """Object stores: send unsigned requests, for public buckets."""


@dataclass(frozen=True)
class ReadConfig:
    """Reading ahead and the extent cache (`turbofs/read/`)."""

    memory_bytes: int | None = None
    """Budget of all buffers; None: a quarter of the cgroup's (else the machine's) memory, at most 8 GiB."""
    extent_bytes: int = 4 * MIB
    """Largest extent: fetches below 4 MiB cost throughput on hdfs-native, above it only memory."""
    first_extent_bytes: int = 256 * KIB
    """What a sequential stream fetches first; each next one doubles, so that a header read stays cheap."""
    window_bytes: int = 32 * MIB
    """How far a sequential stream is read ahead at most: 8 extents hide a 10 ms round trip at 3 GB/s."""
    streams_per_handle: int = 16
    """Interleaved sequential streams remembered for one handle."""
    fetches: int = 4
    """Fetches ahead in flight for one mount: four saturate a local HDFS. Demanded fetches do not wait for them."""


@dataclass(frozen=True)
class WriteConfig:
    """Staging and flushing (`turbofs/write/`)."""

    staging_dir: Path | None = None
    """Where written bytes wait for the source; None: a folder of the mount on tmpfs (see `write.staging_place`)."""
    staging_size_bytes: int | None = None
    """Hard limit of staged bytes; None: half of what is free there at the start, at most a half of the memory limit."""
    staging_soft_bytes: int | None = None
    """From here on writers are slowed to the rate at which the source takes bytes; None: three quarters of the limit."""
    stream_from_bytes: int = 8 * MIB
    """A file written front to back is uploaded while it is written once it is this long; smaller ones at close."""
    piece_bytes: int = 4 * MIB
    """What is handed to the source at a time: less costs throughput, more only memory."""
    uploads: int = 16
    """Files uploaded at once: completing a small file on HDFS mostly waits (450 ms at one replica)."""
    stall_s: float = 10.0
    """How long a writer waits for room in staging while nothing is freed, before it is answered ENOSPC."""
    drain_s: float = 60.0
    """How long the end of a mount waits for staged files to reach the source; what is left then is saved on disk."""


@dataclass(frozen=True)
class FsConfig:
    """Names and attributes (`turbofs/fs/`)."""

    attribute_timeout_s: float = 1.0
    """How long the kernel may believe attributes and names; absent names are never believed."""
    request_deadline_s: float = 60.0
    """No request takes longer: then ETIMEDOUT."""
    owner_timeout_s: float = 300.0
    """How long a name → uid mapping is remembered."""
    space_refresh_s: float = 30.0
    """statfs answers from memory; this is how old the figure may be."""
    state_dir: Path | None = None
    """Where hints survive a restart; None: /var/lib/turbofs for root, else XDG_STATE_HOME/turbofs."""


@dataclass(frozen=True)
class MountConfig:
    """One mount (`turbofs/fuse/` and the daemon)."""

    source: str
    mountpoint: Path
    read_only: bool = False
    """Refuse changes; enforced by the mount itself, so that hints can still be set."""
    allow_other: bool = True
    wait_s: float = 30.0
    """How long the start waits for a source that does not answer yet."""
    read_ahead_kib: int = 4096
    """The kernel's read-ahead: 128 KiB (its default) carries 0.4 GB/s, 4 MiB 3 GB/s."""
    max_background: int = 128
    """Requests that the kernel may have in flight; its default of 12 starves parallel readers."""
    runtime_dir: Path | None = None
    """Where the control socket lives; None: /run/turbofs for root, else XDG_RUNTIME_DIR/turbofs."""
    log_format: str = "auto"
    """`json`, `console`, or `auto`: console on a terminal, JSON elsewhere."""
    log_level: str = "info"
    log_dir: Path | None = None
    """Where a daemon in the background logs; None: /var/log/turbofs for root, else the user's log folder."""


@dataclass(frozen=True)
class Config:
    """Everything that `turbofs mount` needs."""

    mount: MountConfig
    source: SourceConfig = field(default_factory=SourceConfig)
    read: ReadConfig = field(default_factory=ReadConfig)
    write: WriteConfig = field(default_factory=WriteConfig)
    fs: FsConfig = field(default_factory=FsConfig)
