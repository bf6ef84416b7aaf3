"""What may be written as SOURCE."""

import pytest
import trio

from turbofs.config import SourceConfig
from turbofs.errors import ConfigError
from turbofs.source.arrow import ArrowSource
from turbofs.source.file import FileSource
from turbofs.source.memory import MemorySource
from turbofs.source.registry import open_source
from turbofs.source.uri import SourceUri, parse_source_uri


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hdfs://namenode:8020/user/me", SourceUri("hdfs", "namenode:8020", "/user/me")),
        ("hdfs://nameservice/", SourceUri("hdfs", "nameservice", "/")),
        ("hdfs://nameservice", SourceUri("hdfs", "nameservice", "/")),
        ("HDFS://nameservice/x/", SourceUri("hdfs", "nameservice", "/x")),
        ("file:///data/ckpt", SourceUri("file", "", "/data/ckpt")),
        ("file:///", SourceUri("file", "", "/")),
        ("file:///a%20b/%3F%23%25", SourceUri("file", "", "/a b/?#%")),
        ("file:///caf%E9", SourceUri("file", "", "/caf\udce9")),
        ("s3://bucket/a/prefix/", SourceUri("s3", "bucket", "/a/prefix")),
        ("gs://bucket", SourceUri("gs", "bucket", "/")),
        ("memory:", SourceUri("memory", "", "/")),
    ],
)
def test_accepted(text, expected):
    assert parse_source_uri(text) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no scheme"),
        ("/data", "file:///data"),
        ("data", "no scheme"),
        ("data/x:y", "no scheme"),
        ("ftp://host/x", "unknown scheme 'ftp'"),
        ("file://data/x", "three slashes"),
        ("file:data", "`//` must follow file:"),
        ("file:/data", "`//` must follow file:"),
        ("hdfs:///x", "a NameNode"),
        ("hdfs://", "a NameNode"),
        ("hdfs://host:port/x", "not a NameNode"),
        ("hdfs://host:0/x", "not a NameNode"),
        ("hdfs://host:70000/x", "not a NameNode"),
        ("hdfs://:8020/x", "not a NameNode"),
        ("hdfs://me@host/x", "a user or a key"),
        ("hdfs://host/x?user.name=me", "a query string"),
        ("hdfs://host/x#y", "a fragment"),
        ("hdfs://host/a/../b", "'..'"),
        ("hdfs://host/a//b", "an empty name"),
        ("file:///a/%2e%2e/b", "'..'"),
        ("file:///a%00b", "NUL"),
        ("s3://", "a bucket"),
        ("s3:///prefix", "a bucket"),
        ("s3://key:secret@bucket/x", "a user or a key"),
        ("s3://bucket:9000/x", "not a bucket"),
        ("memory:x", "nothing after the colon"),
        ("memory://", "nothing after the colon"),
    ],
)
def test_refused_with_what_is_accepted(text, why):
    with pytest.raises(ConfigError) as caught:
        open_source(text, SourceConfig(), trio.CapacityLimiter(1))
    assert why in str(caught.value)
    assert "hdfs://HOST[:PORT]/PATH" in caught.value.advice


@pytest.mark.parametrize(
    ("text", "kind"),
    [("memory:", MemorySource), ("file:///", FileSource), ("s3://bucket/p", ArrowSource), ("gs://bucket", ArrowSource)],
)
def test_each_scheme_has_its_source(text, kind):
    source = open_source(text, SourceConfig(), trio.CapacityLimiter(1))
    assert type(source) is kind
    assert source.uri == text


def test_hdfs_has_its_source():
    source = open_source("hdfs://127.0.0.1:8020/", SourceConfig(), trio.CapacityLimiter(1))
    assert type(source).__name__ == "HdfsSource"
