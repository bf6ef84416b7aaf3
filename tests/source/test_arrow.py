"""Object stores."""

from contextlib import asynccontextmanager

import pytest
import trio

from turbofs.config import SourceConfig
from turbofs.errors import (
    AccessDeniedError,
    BadNameError,
    ConfigError,
    IsADirectoryTurboError,
    NameTooLongError,
    NotFoundError,
    NotSupportedError,
    SourceUnavailableError,
    StaleFileError,
    TurboError,
)
from turbofs.model import FileKind
from turbofs.source.arrow import ArrowSource
from turbofs.source.arrow_errors import from_arrow_error
from turbofs.source.base import Capability
from turbofs.testing.conformance import SourceConformance
from turbofs.testing.conformance_base import content, names_in, read_file, write_file


@pytest.fixture
def bucket(s3_server):
    return s3_server.make_bucket()


@asynccontextmanager
async def connected(uri, endpoint):
    config = SourceConfig(s3_endpoint=endpoint, s3_region="us-east-1")
    source = ArrowSource(uri, config, trio.CapacityLimiter(32))
    await source.connect()
    try:
        yield source
    finally:
        await source.aclose()


class TestS3Source(SourceConformance):
    many_entries = 1010  # an S3 listing has 1000 keys a page
    large_bytes = 12 << 20  # more than one part of an upload

    @pytest.fixture(autouse=True)
    def _server(self, s3_server, bucket):
        self.endpoint, self.bucket = s3_server.endpoint, bucket

    def make_source(self):
        return connected(f"s3://{self.bucket}", self.endpoint)

    async def seed_entry(self, source, path):
        """One request instead of the three of a create: the server takes milliseconds for each."""
        key = self.bucket + path
        await trio.to_thread.run_sync(lambda: source._client.open_output_stream(key).close())


async def test_a_prefix_is_the_root(s3_server, bucket):
    async with connected(f"s3://{bucket}", s3_server.endpoint) as whole:
        await write_file(whole, "/runs/one/f", b"f")
        await write_file(whole, "/other", b"o")
    async with connected(f"s3://{bucket}/runs/", s3_server.endpoint) as source:
        assert await names_in(source, "/") == ["one"]
        assert await read_file(source, "/one/f") == b"f"
        assert (await source.stat("/one")).kind is FileKind.DIRECTORY


@pytest.mark.parametrize("rest", ["", "/prefix"])
async def test_a_bucket_or_prefix_that_is_not_there(s3_server, rest):
    with pytest.raises(NotFoundError, match="no such bucket"):
        async with connected(f"s3://not-there{rest}", s3_server.endpoint):
            pass


async def test_an_endpoint_that_does_not_answer_is_worth_a_retry(bucket):
    with pytest.raises(SourceUnavailableError) as caught:
        async with connected(f"s3://{bucket}", "http://127.0.0.1:1"):
            pass
    assert caught.value.transient


async def test_an_object_and_a_prefix_of_one_name(s3_server, bucket):
    async with connected(f"s3://{bucket}", s3_server.endpoint) as source:
        await write_file(source, "/both/below", b"b")
        with source._client.open_output_stream(f"{bucket}/both") as upload:
            upload.write(b"object")
        assert await names_in(source, "/") == ["both"]
        assert (await source.stat("/both")).kind is FileKind.FILE
        assert await read_file(source, "/both") == b"object"


async def test_keys_that_no_tree_can_show_are_left_out(s3_server, bucket):
    async with connected(f"s3://{bucket}", s3_server.endpoint) as source:
        await write_file(source, "/d/f", b"f")
        source._client.open_output_stream(f"{bucket}/d/{'x' * 300}").close()
        assert await names_in(source, "/d") == ["f"]


async def test_a_replaced_object_is_never_mixed(s3_server, bucket):
    """pyarrow's own reads would give the new object's bytes, whatever its length."""
    async with connected(f"s3://{bucket}", s3_server.endpoint) as source:
        for seed, new_size in enumerate((5000, 10, 9000)):
            await write_file(source, "/f", content(5000, seed=seed))
            file = await source.open("/f")
            await write_file(source, "/f", content(new_size, seed=99))
            for offset in (0, 4000):
                with pytest.raises(StaleFileError):
                    await file.read_into(offset, memoryview(bytearray(1000)))
            with pytest.raises(StaleFileError):
                await file.refresh()
            await file.aclose()


async def test_reads_that_end_together_share_the_check(s3_server, bucket):
    async with connected(f"s3://{bucket}", s3_server.endpoint) as source:
        await write_file(source, "/f", content(100_000))
        file = await source.open("/f")
        async with trio.open_nursery() as nursery:
            for offset in range(0, 100_000, 1000):
                nursery.start_soon(file.read_into, offset, memoryview(bytearray(1000)))
        assert file._begun < 100
        await file.aclose()


async def test_nothing_of_an_aborted_upload_appears(s3_server, bucket):
    async with connected(f"s3://{bucket}", s3_server.endpoint) as source:
        await write_file(source, "/f", b"before")
        writer = await source.create("/f", replace=True)
        await writer.write(memoryview(content(20 << 20)))
        await writer.abort()
        assert await read_file(source, "/f") == b"before"


async def test_refusals(s3_server, bucket):
    async with connected(f"s3://{bucket}", s3_server.endpoint) as source:
        assert Capability.EXCLUSIVE_CREATE not in source.capabilities
        with pytest.raises(NotSupportedError):
            await source.create("/f")
        await write_file(source, "/d/f", b"f")
        with pytest.raises(IsADirectoryTurboError):
            await source.delete("/d")
        with pytest.raises(IsADirectoryTurboError):
            await source.create("/d", replace=True)
        with pytest.raises(NameTooLongError):
            await source.stat("/" + "/".join(["x" * 200] * 6))
        with pytest.raises(BadNameError):
            await source.stat("/caf\udce9")
    with pytest.raises(TurboError, match="not connected"):
        await source.stat("/d")


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "ftp://x", "http://", "http://x/path"])
def test_an_endpoint_that_is_none(endpoint):
    with pytest.raises(ConfigError, match="s3_endpoint"):
        ArrowSource("s3://b", SourceConfig(s3_endpoint=endpoint), trio.CapacityLimiter(1))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("AWS Error ACCESS_DENIED during HeadObject operation: No response body.", AccessDeniedError),
        ("AWS Error SLOW_DOWN during GetObject operation: Please reduce your request rate.", SourceUnavailableError),
        ("AWS Error UNKNOWN (HTTP status 503) during HeadObject operation: No response body.", SourceUnavailableError),
        ("AWS Error UNKNOWN (HTTP status 403) during HeadObject operation: No response body.", AccessDeniedError),
        ("AWS Error UNKNOWN (HTTP status 404) during HeadObject operation: No response body.", NotFoundError),
        ("AWS Error UNKNOWN (HTTP status 301) during HeadObject operation: No response body.", ConfigError),
        ("google::cloud::Status(UNAVAILABLE: Retry policy exhausted)", SourceUnavailableError),
        ("google::cloud::Status(PERMISSION_DENIED: no)", AccessDeniedError),
        ("something new", TurboError),
    ],
)
def test_errors_without_an_errno(text, kind):
    error = from_arrow_error(OSError(text), "read", "/f")
    assert type(error) is kind
    assert text in str(error)
