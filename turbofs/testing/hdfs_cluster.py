"""A real HDFS for tests and benchmarks: one process a daemon, ports of its own, ready when JMX says so.

Nothing here is a mock: the NameNode and the DataNodes are Hadoop's own classes, started from the jars that
`helpers/setup` fetched. Every daemon dies with the process that started it (PR_SET_PDEATHSIG), so a killed test
run leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from xml.sax.saxutils import escape

import httpx

_NAMENODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_DATANODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
_READY_TIMEOUT_S = 90.0
_PR_SET_PDEATHSIG = 1

# Short intervals, so that a test sees a dead DataNode or a finished replication within seconds.
_QUICK_SETTINGS = {
    "dfs.namenode.safemode.extension": "0",
    "dfs.heartbeat.interval": "1",
    "dfs.namenode.heartbeat.recheck-interval": "2000",
    "dfs.namenode.redundancy.interval.seconds": "1s",
    "dfs.namenode.datanode.registration.ip-hostname-check": "false",
    "dfs.namenode.fs-limits.min-block-size": "4096",
    "dfs.namenode.redundancy.considerLoad": "false",
    "dfs.client.read.shortcircuit": "false",
    "dfs.permissions.superusergroup": "supergroup",
    "hadoop.proxyuser.root.hosts": "*",
    "hadoop.proxyuser.root.groups": "*",
}


def default_jars_dir() -> Path:
    """Where `helpers/setup` keeps Hadoop's jars; TURBOFS_HADOOP_JARS overrides it."""
    configured = os.environ.get("TURBOFS_HADOOP_JARS")
    if configured:
        return Path(configured)
    return Path(__file__).resolve().parents[2] / ".cache" / "hadoop-jars"


def hadoop_class_path(jars: Path, root: Path) -> str:
    """Class path with the stub web applications that the Maven jar of HDFS lacks, made under *root*."""
    for application in ("hdfs", "datanode", "secondary", "journal"):
        folder = root / "webstub" / "webapps" / application / "WEB-INF"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "web.xml").write_text('<web-app xmlns="http://java.sun.com/xml/ns/javaee" version="2.4"/>\n')
    return os.pathsep.join([str(root / "conf"), str(root / "webstub"), f"{jars}/*"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class Daemon:
    """One JVM of the cluster. `pid` is the JVM's own, also where it runs inside a network namespace."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self, sig: int = signal.SIGKILL) -> None:
        if self.alive():
            self.process.send_signal(sig)
        self.process.wait(30)

    def freeze(self) -> None:
        """SIGSTOP: the daemon keeps its sockets and answers nothing, the nastiest way of being dead.

        Returns once all its threads have stopped.
        """
        self.process.send_signal(signal.SIGSTOP)
        while self.alive() and not all(state == "T" for state in self._thread_states()):
            time.sleep(0.001)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def _thread_states(self) -> list[str]:
        states = []
        for stat in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # that thread ended
                states.append(stat.read_text().rpartition(")")[2].split()[0])
        return states


@dataclass
class HdfsCluster:
    """A NameNode and *datanodes* DataNodes on loopback (or each in the network namespace that is named for it).

    Use as a context manager. `uri` is what `turbofs mount` takes as SOURCE; `conf_dir` holds core-site.xml and
    hdfs-site.xml for Hadoop's own clients. Raises RuntimeError with the daemon's last log lines if one fails.
    """

    root: Path
    datanodes: int = 3
    settings: dict[str, str] = field(default_factory=dict)
    namenode_heap: str = "256m"
    datanode_heap: str = "128m"
    host: str = "127.0.0.1"
    netns: str | None = None
    jars: Path = field(default_factory=default_jars_dir)

    def __post_init__(self) -> None:
        self.rpc_port = free_port()
        self.http_port = free_port()
        self.namenode: Daemon | None = None
        self.workers: list[Daemon] = []

    @property
    def authority(self) -> str:
        return f"{self.host}:{self.rpc_port}"

    @property
    def uri(self) -> str:
        return f"hdfs://{self.authority}"

    @property
    def web(self) -> str:
        return f"http://{self.host}:{self.http_port}"

    @property
    def conf_dir(self) -> Path:
        return self.root / "conf"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        if not any(self.jars.glob("hadoop-hdfs-3*.jar")):
            raise RuntimeError(f"no Hadoop jars in {self.jars}: run helpers/setup first (or set TURBOFS_HADOOP_JARS)")
        self._write_conf()
        name_dir = self.root / "name"
        if not name_dir.exists():
            subprocess.run(
                [*self._java(self.namenode_heap), _NAMENODE, "-format", "-nonInteractive"],
                check=True,
                env=self._environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_READY_TIMEOUT_S,
            )
        self.start_namenode(wait=False)
        for index in range(self.datanodes):
            self.start_datanode(index)
        self.wait_ready()

    def start_namenode(self, wait: bool = True) -> None:
        self.namenode = self._spawn("namenode", self.namenode_heap, [_NAMENODE])
        if wait:
            self.wait_ready()

    def start_datanode(self, index: int) -> Daemon:
        daemon = self._spawn(
            f"datanode{index}",
            self.datanode_heap,
            [
                _DATANODE,
                f"-Ddfs.datanode.data.dir=file://{self.root}/data{index}",
                f"-Ddfs.datanode.address={self.host}:0",
                f"-Ddfs.datanode.http.address={self.host}:0",
                f"-Ddfs.datanode.ipc.address={self.host}:0",
                f"-Ddfs.datanode.hostname={self.host}",
            ],
        )
        self.workers[index : index + 1] = [daemon]
        return daemon

    def stop(self) -> None:
        for daemon in [*self.workers, *([self.namenode] if self.namenode else [])]:
            daemon.kill()
        self.workers.clear()
        self.namenode = None

    def destroy(self) -> None:
        """Stop, and delete everything under `root`."""
        self.stop()
        shutil.rmtree(self.root, ignore_errors=True)

    def wait_ready(self, live: int | None = None, timeout_s: float = _READY_TIMEOUT_S) -> None:
        """Wait until the NameNode is out of safe mode and sees *live* DataNodes (default: all of them)."""
        wanted = self.datanodes if live is None else live
        deadline = time.monotonic() + timeout_s
        while True:
            for daemon in [*self.workers, *([self.namenode] if self.namenode else [])]:
                if live is None and not daemon.alive():
                    raise RuntimeError(f"{daemon.name} ended:\n" + "".join(_tail(daemon.log)))
            state = self.jmx("Hadoop:service=NameNode,name=FSNamesystemState")
            info = self.jmx("Hadoop:service=NameNode,name=NameNodeInfo")
            if state.get("NumLiveDataNodes") == wanted and info.get("Safemode") == "":
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"HDFS is not ready after {timeout_s:.0f} s: {state}")
            time.sleep(0.1)

    def jmx(self, query: str) -> dict[str, Any]:
        """One JMX bean of the NameNode; empty while it does not answer."""
        try:
            reply = httpx.get(f"{self.web}/jmx", params={"qry": query}, timeout=5, trust_env=False)
            beans = reply.json()["beans"]
        except (httpx.HTTPError, ValueError, KeyError):
            return {}
        bean: dict[str, Any] = beans[0] if beans else {}
        return bean

    def shell(self, *arguments: str, user: str | None = None, admin: bool = False) -> str:
        """Run `hdfs dfs …` (or `hdfs dfsadmin …`), a JVM start each; returns what it printed."""
        main = "org.apache.hadoop.hdfs.tools.DFSAdmin" if admin else "org.apache.hadoop.fs.FsShell"
        environment = self._environment()
        if user:
            environment["HADOOP_USER_NAME"] = user
        done = subprocess.run(
            [*self._java("128m"), main, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)} failed: {done.stdout}{done.stderr[-2000:]}")
        return done.stdout

    def _spawn(self, name: str, heap: str, arguments: list[str]) -> Daemon:
        log = self.root / f"{name}.log"
        with log.open("ab") as sink:
            process = subprocess.Popen(
                [*self._java(heap), *arguments],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent,  # noqa: PLW1509  the cluster is started before any thread is
            )
        return Daemon(name, process, log)

    def _java(self, heap: str) -> list[str]:
        command = ["nsenter", f"--net=/run/netns/{self.netns}"] if self.netns else []
        return [
            *command,
            "java",
            f"-Xmx{heap}",
            "-Xshare:auto",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1" if heap == "96m" else "-XX:+TieredCompilation",
            "--add-opens=java.base/java.lang=ALL-UNNAMED",
            "-Djava.net.preferIPv4Stack=true",
            f"-Dhadoop.log.dir={self.root}",
            f"-Djava.io.tmpdir={self.root}",
            "-cp",
            hadoop_class_path(self.jars, self.root),
        ]

    def _environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HADOOP_")}
        environment["HADOOP_CONF_DIR"] = str(self.conf_dir)
        return environment

    def _write_conf(self) -> None:
        self.conf_dir.mkdir(parents=True, exist_ok=True)
        site = {
            **_QUICK_SETTINGS,
            "dfs.replication": str(min(self.datanodes, 2)),
            "dfs.namenode.name.dir": f"file://{self.root}/name",
            "dfs.namenode.rpc-address": self.authority,
            "dfs.namenode.http-address": f"{self.host}:{self.http_port}",
            **self.settings,
        }
        write_site(self.conf_dir / "core-site.xml", {"fs.defaultFS": self.uri, "hadoop.tmp.dir": f"{self.root}/tmp"})
        write_site(self.conf_dir / "hdfs-site.xml", site)
        (self.conf_dir / "log4j.properties").write_text(
            "log4j.rootLogger=WARN,out\nlog4j.appender.out=org.apache.log4j.ConsoleAppender\n"
            "log4j.appender.out.layout=org.apache.log4j.PatternLayout\n"
            "log4j.appender.out.layout.ConversionPattern=%d %p %c: %m%n\n"
        )


def write_site(path: Path, properties: dict[str, str]) -> None:
    """Write one of Hadoop's XML configuration files."""
    rows = "".join(
        f"  <property><name>{escape(name)}</name><value>{escape(value)}</value></property>\n"
        for name, value in properties.items()
    )
    path.write_text(f"<configuration>\n{rows}</configuration>\n")


def _tail(log: Path, lines: int = 20) -> list[str]:
    with log.open(errors="replace") as text:
        return text.readlines()[-lines:]
