"""`--client libhdfs`: bytes through a JVM. In a process of its own, because a JVM never leaves the one it started in."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import hdfs_native
import pytest

from turbofs.config import SourceConfig
from turbofs.errors import ConfigError
from turbofs.source.hdfs.libhdfs import require_libhdfs
from turbofs.testing.conformance_base import content

ROOT = Path(__file__).resolve().parents[2]


def test_every_missing_part_is_named(tmp_path, monkeypatch):
    for variable in ("JAVA_HOME", "CLASSPATH", "HADOOP_HOME", "ARROW_LIBHDFS_DIR"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigError, match="JAVA_HOME"):
        require_libhdfs()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"has no libjvm\.so"):
        require_libhdfs()
    (tmp_path / "lib" / "server").mkdir(parents=True)
    (tmp_path / "lib" / "server" / "libjvm.so").touch()
    for class_path in (None, "/hadoop/*"):
        if class_path:
            monkeypatch.setenv("CLASSPATH", class_path)
        with pytest.raises(ConfigError, match="CLASSPATH") as caught:
            require_libhdfs()
        assert "hadoop classpath --glob" in caught.value.advice
    monkeypatch.setenv("CLASSPATH", "/hadoop/a.jar")
    with pytest.raises(ConfigError, match=r"libhdfs\.so"):
        require_libhdfs()
    (tmp_path / "libhdfs.so").touch()
    monkeypatch.setenv("ARROW_LIBHDFS_DIR", str(tmp_path))
    require_libhdfs()
    assert SourceConfig().client == "native", "nobody needs a JVM who does not ask for it"


@pytest.mark.hdfs
@pytest.mark.long
def test_bytes_come_through_libhdfs(hdfs, hdfs_dir):
    library = subprocess.run([ROOT / "helpers" / "build-libhdfs"], capture_output=True, text=True, check=True).stdout
    javac = Path(
        subprocess.run(["which", "javac"], capture_output=True, text=True, check=True).stdout.strip()
    ).resolve()
    data = content(3 << 20)
    client = hdfs_native.Client(hdfs.uri)
    with client.create(f"{hdfs_dir}/f", hdfs_native.WriteOptions(block_size=1 << 20)) as writer:
        writer.write(data)
    script = f"""
        import sys, trio
        from turbofs.config import SourceConfig
        from turbofs.errors import StaleFileError
        from turbofs.source.hdfs import HdfsSource

        async def main():
            config = SourceConfig(web_address="{hdfs.web}", client="libhdfs", operation_timeout_s=60)
            source = HdfsSource("{hdfs.uri}{hdfs_dir}", config, trio.CapacityLimiter(8))
            await source.connect()
            assert source.describe()["client"] == "libhdfs"
            file = await source.open("/f")
            buffer = bytearray(file.version.size)
            async with trio.open_nursery() as nursery:
                for start in range(0, len(buffer), 1 << 20):
                    nursery.start_soon(file.read_into, start, memoryview(buffer)[start : start + (1 << 20)])
            small = bytearray(100)
            assert await file.read_into(12345, memoryview(small)) == 100
            assert small == buffer[12345:12445]
            assert await file.read_into(len(buffer) - 5, memoryview(small)) == 5
            writer = await source.append("/f")
            await writer.write(memoryview(b"tail"))
            await writer.sync()
            await file.refresh()
            assert await file.read_into(len(buffer), memoryview(small)) == 4 and small[:4] == b"tail"
            await writer.aclose()
            await source.delete("/f")
            file._pool.clear()
            try:
                await file.read_into(0, memoryview(small))
            except StaleFileError:
                print("stale")
            await source.aclose()
            sys.stdout.flush()
            with open(sys.argv[1], "wb") as out:
                out.write(buffer)

        trio.run(main)
    """
    environment = {
        **os.environ,
        "JAVA_HOME": str(javac.parents[1]),
        "ARROW_LIBHDFS_DIR": str(Path(library.strip()).parent),
        "CLASSPATH": ":".join(str(jar) for jar in hdfs.jars.glob("*.jar")),
        "LIBHDFS_OPTS": "-Xmx128m",
    }
    out = hdfs.root / "through-libhdfs"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "stale" in done.stdout
    assert out.read_bytes() == data
