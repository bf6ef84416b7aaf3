"""From what a user writes as SOURCE to the source that serves it. Clients are imported only when they are needed."""

from __future__ import annotations

import trio

from turbofs.config import SourceConfig
from turbofs.source.base import Source
from turbofs.source.uri import parse_source_uri


def open_source(uri: str, config: SourceConfig, limiter: trio.CapacityLimiter) -> Source:
    """The source that *uri* names, not connected yet; its blocking calls run in threads under *limiter*.

    Raises ConfigError, which says what is accepted.
    """
    scheme = parse_source_uri(uri).scheme
    if scheme == "memory":
        from turbofs.source.memory import MemorySource

        return MemorySource(uri, config, limiter)
    if scheme == "file":
        from turbofs.source.file import FileSource

        return FileSource(uri, config, limiter)
    if scheme == "hdfs":
        from turbofs.source.hdfs import HdfsSource

        return HdfsSource(uri, config, limiter)
    from turbofs.source.arrow import ArrowSource  # s3 and gs: the parser lets nothing else through

    return ArrowSource(uri, config, limiter)
