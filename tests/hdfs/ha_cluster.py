"""Two NameNodes with shared edits: `HdfsCluster` with high availability and a manual failover."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass

from turbofs.testing.hdfs_cluster import Daemon, HdfsCluster, free_port, write_site

_NAMENODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_HA_ADMIN = "org.apache.hadoop.hdfs.tools.DFSHAAdmin"
SERVICE = "turbo"


@dataclass
class HaCluster(HdfsCluster):
    """`hdfs://turbo`. The first NameNode is active after `start`; `fail_over` kills it and makes the second one so."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ports = {"nn1": (self.rpc_port, self.http_port), "nn2": (free_port(), free_port())}
        self.standby: Daemon | None = None

    @property
    def uri(self) -> str:
        return f"hdfs://{SERVICE}"

    def start(self) -> None:
        self._write_conf()
        self._once(_NAMENODE, *self._options("nn1"), "-format", "-nonInteractive")
        self.namenode = self._spawn("nn1", self.namenode_heap, [_NAMENODE, *self._options("nn1")])
        self._until(lambda: self.jmx("Hadoop:service=NameNode,name=NameNodeStatus").get("State") == "standby")
        self._once(_NAMENODE, *self._options("nn2"), "-bootstrapStandby", "-nonInteractive")
        self.standby = self._spawn("nn2", self.namenode_heap, [_NAMENODE, *self._options("nn2")])
        self._once(_HA_ADMIN, "-transitionToActive", "--forceactive", "nn1")
        for index in range(self.datanodes):
            self.start_datanode(index)
        self.wait_ready()

    def fail_over(self) -> None:
        """Kill the active NameNode; the other one takes over."""
        assert self.namenode is not None
        self.namenode.kill()
        self.http_port = self.ports["nn2"][1]
        self.namenode, self.standby = self.standby, None
        self._once(_HA_ADMIN, "-transitionToActive", "--forceactive", "nn2")
        self.wait_ready()

    def stop(self) -> None:
        if self.standby is not None:
            self.standby.kill()
        super().stop()

    def _options(self, name: str) -> list[str]:
        return [f"-Ddfs.ha.namenode.id={name}", f"-Ddfs.namenode.name.dir=file://{self.root}/{name}"]

    def _run(self, *arguments: str) -> str:
        """Run one of Hadoop's commands; what it printed if it failed, else nothing."""
        command = [*self._java("128m"), *arguments]
        done = subprocess.run(command, env=self._environment(), capture_output=True, text=True, timeout=60, check=False)
        return done.stdout[-1000:] + done.stderr[-2000:] or "failed" if done.returncode else ""

    def _once(self, *arguments: str) -> None:
        problem = self._run(*arguments)
        assert not problem, f"{arguments}: {problem}"

    def _until(self, condition) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "the cluster does not get there"
            time.sleep(0.1)

    def _write_conf(self) -> None:
        super()._write_conf()
        site = {
            "dfs.nameservices": SERVICE,
            f"dfs.ha.namenodes.{SERVICE}": ",".join(self.ports),
            "dfs.namenode.shared.edits.dir": f"file://{self.root}/shared",
            "dfs.ha.fencing.methods": "shell(/bin/true)",
            f"dfs.client.failover.proxy.provider.{SERVICE}": (
                "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider"
            ),
            "dfs.ha.tail-edits.period": "1s",
            "dfs.namenode.safemode.extension": "0",
            "dfs.heartbeat.interval": "1",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.replication": "2",
        }
        for name, (rpc, web) in self.ports.items():
            site[f"dfs.namenode.rpc-address.{SERVICE}.{name}"] = f"{self.host}:{rpc}"
            site[f"dfs.namenode.http-address.{SERVICE}.{name}"] = f"{self.host}:{web}"
        write_site(self.conf_dir / "hdfs-site.xml", site)
