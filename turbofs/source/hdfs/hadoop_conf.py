"""Hadoop's XML configuration, and which servers an `hdfs://` address stands for.

hdfs-native reads the same files, but without `final` and `${…}`: it is therefore given the result as a dictionary.
"""

from __future__ import annotations

import getpass
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from turbofs.errors import ConfigError

DEFAULT_RPC_PORT = 8020
DEFAULT_WEB_PORT = 9870

_FILES = ("core-site.xml", "hdfs-site.xml")
_VARIABLE = re.compile(r"\$\{([^}$\s]+)\}")
_INCLUDE = "{http://www.w3.org/2001/XInclude}include"
_DEPTH = 20
"""Hadoop itself gives up after 20 substitutions; included files nest far less deep."""


@dataclass(frozen=True)
class HadoopConf:
    """Settings after `final` and `${…}`; `directory` is where they came from, None where there is no configuration."""

    settings: Mapping[str, str] = field(default_factory=dict)
    directory: Path | None = None

    def get(self, *names: str) -> str | None:
        """The first of *names* that is set to something."""
        return next((self.settings[name] for name in names if self.settings.get(name)), None)

    def names(self, key: str) -> list[str]:
        """A comma-separated setting."""
        return [item.strip() for item in self.settings.get(key, "").split(",") if item.strip()]


@dataclass(frozen=True)
class NameNodes:
    """The servers behind one authority. More than one: a name service with high availability."""

    authority: str
    """What hdfs-native takes after `hdfs://`: HOST:PORT or the name service."""
    rpc: tuple[str, ...]
    web: tuple[str, ...]
    """Base URLs of their HTTP servers, in the same order, unless the user named one."""
    settings: dict[str, str]
    service: str | None = None

    def rotated(self) -> NameNodes:
        """The same servers, the second first: for the client that replaces one whose NameNode vanished."""
        if self.service is None or len(self.rpc) < 2:
            return self
        key = f"dfs.ha.namenodes.{self.service}"
        first, *rest = self.settings[key].split(",")
        settings = {**self.settings, key: ",".join([*rest, first])}
        return NameNodes(self.authority, (*self.rpc[1:], self.rpc[0]), self.web, settings, self.service)


def load_hadoop_conf(directory: str | None) -> HadoopConf:
    """Read core-site.xml and hdfs-site.xml from *directory*, else HADOOP_CONF_DIR, else HADOOP_HOME/etc/hadoop.

    Raises ConfigError where a named folder is missing or a file is malformed. No folder at all is no error.
    """
    found = directory or os.environ.get("HADOOP_CONF_DIR")
    if found is None and os.environ.get("HADOOP_HOME"):
        found = os.path.join(os.environ["HADOOP_HOME"], "etc", "hadoop")
    if found is None:
        return HadoopConf()
    folder = Path(found)
    files = [folder / name for name in _FILES if (folder / name).is_file()]
    if not files:
        if directory is None:
            return HadoopConf()  # an environment variable that points nowhere is common and harmless
        raise ConfigError(
            f"hadoop_conf_dir {directory} has neither {' nor '.join(_FILES)}",
            advice="name the folder that holds Hadoop's client configuration",
        )
    raw: dict[str, str] = {}
    final: set[str] = set()
    for file in files:
        _read(file, raw, final)
    return HadoopConf({name: _substituted(value, raw) for name, value in raw.items()}, folder)


def locate(authority: str, conf: HadoopConf, web_address: str | None) -> NameNodes:
    """The servers behind `hdfs://AUTHORITY`. Raises ConfigError for a name service whose servers are not configured."""
    settings = dict(conf.settings)
    ids = conf.names(f"dfs.ha.namenodes.{authority}")
    if ids:
        settings[f"dfs.ha.namenodes.{authority}"] = ",".join(ids)
        rpc = tuple(_rpc_of(conf, authority, name) for name in ids)
        web = tuple(_web_of(conf, address, f"{authority}.{name}") for name, address in zip(ids, rpc, strict=True))
        return NameNodes(authority, rpc, _chosen(web_address) or web, settings, authority)
    if ":" not in authority and authority in conf.names("dfs.nameservices"):
        address = _rpc_of(conf, authority, None)
        web = (_web_of(conf, address, authority),)
        return NameNodes(address, (address,), _chosen(web_address) or web, settings)
    address = authority if ":" in authority else f"{authority}:{DEFAULT_RPC_PORT}"
    suffix = "" if _is_default(address, conf) else None
    return NameNodes(address, (address,), _chosen(web_address) or (_web_of(conf, address, suffix),), settings)


def _is_default(address: str, conf: HadoopConf) -> bool:
    """Whether the configuration is about this NameNode: its bare dfs.namenode.http-address then applies."""
    own = {conf.get("dfs.namenode.rpc-address"), (conf.get("fs.defaultFS") or "").removeprefix("hdfs://").rstrip("/")}
    return address in own or address.removesuffix(f":{DEFAULT_RPC_PORT}") in own


def _rpc_of(conf: HadoopConf, service: str, name: str | None) -> str:
    key = "dfs.namenode.rpc-address." + (service if name is None else f"{service}.{name}")
    address = conf.get(key)
    if address is None:
        raise ConfigError(
            f"the name service {service} is configured without {key}",
            advice=f"add {key} (HOST:PORT) to hdfs-site.xml in {conf.directory}",
        )
    return address if ":" in address else f"{address}:{DEFAULT_RPC_PORT}"


def _web_of(conf: HadoopConf, rpc: str, suffix: str | None) -> str:
    """Base URL of the HTTP server of the NameNode at *rpc*; *suffix* None: the configuration is about another one."""
    secure = conf.get("dfs.http.policy") == "HTTPS_ONLY"
    scheme = "https" if secure else "http"
    host = rpc.rpartition(":")[0]
    configured = None
    if suffix is not None:
        key = f"dfs.namenode.{scheme}-address"
        configured = conf.get(f"{key}.{suffix}" if suffix else key)
    if configured is None:
        return f"{scheme}://{host}:{9871 if secure else DEFAULT_WEB_PORT}"
    # The server's own configuration often says "all interfaces".
    web_host, _, port = configured.rpartition(":")
    return f"{scheme}://{host if web_host in {'', '0.0.0.0'} else web_host}:{port}"  # noqa: S104  compared, not bound


def _chosen(web_address: str | None) -> tuple[str, ...]:
    """The addresses that the user named: HOST:PORT or URL, several with commas."""
    if not web_address:
        return ()
    chosen = [item.strip().rstrip("/") for item in web_address.split(",") if item.strip()]
    for item in chosen:
        if not re.fullmatch(r"(https?://)?[^/\s:]+:\d{1,5}", item):
            raise ConfigError(f"web_address {item!r} is not HOST:PORT or http(s)://HOST:PORT")
    return tuple(item if "://" in item else f"http://{item}" for item in chosen)


def _read(file: Path, raw: dict[str, str], final: set[str], depth: int = 0) -> None:
    if depth > _DEPTH:
        raise ConfigError(f"{file} is included by itself")
    try:
        root = ET.parse(file).getroot()  # noqa: S314  the administrator's own file; expat bounds entity expansion
    except ET.ParseError as error:
        raise ConfigError(f"{file} is not well-formed XML: {error}", advice="correct the file at that line") from error
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    if root.tag != "configuration":
        raise ConfigError(f"{file} is not a Hadoop configuration: its top element is <{root.tag}>")
    for element in root:
        if element.tag == _INCLUDE:
            _read(file.parent / (element.get("href") or ""), raw, final, depth + 1)
        elif element.tag == "property":
            name = (element.findtext("name") or element.get("name") or "").strip()
            value = element.findtext("value")
            value = (element.get("value") or "") if value is None else value.strip()
            if not name:
                raise ConfigError(f"{file} has a <property> without a <name>")
            if name not in final:
                raw[name] = value
            if (element.findtext("final") or "").strip().lower() == "true":
                final.add(name)


def _substituted(value: str, raw: Mapping[str, str]) -> str:
    for _ in range(_DEPTH):
        replaced = _VARIABLE.sub(lambda found: _variable(found[1], found[0], raw), value)
        if replaced == value:
            break
        value = replaced
    return value


def _variable(name: str, text: str, raw: Mapping[str, str]) -> str:
    if name.startswith("env."):
        variable, _, default = name[4:].partition(":-")
        return os.environ.get(variable) or default or text
    if name == "user.name":
        return getpass.getuser()
    return raw.get(name, text)
