"""Hadoop's XML configuration, and the servers that it names."""

from __future__ import annotations

import pytest

from turbofs.errors import ConfigError
from turbofs.source.hdfs.hadoop_conf import HadoopConf, load_hadoop_conf, locate
from turbofs.testing.hdfs_cluster import write_site


def write(folder, core=None, hdfs=None):
    if core is not None:
        write_site(folder / "core-site.xml", core)
    if hdfs is not None:
        write_site(folder / "hdfs-site.xml", hdfs)
    return load_hadoop_conf(str(folder))


def test_later_files_override_and_variables_are_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("RACK", "r7")
    conf = write(
        tmp_path,
        {"a": "1", "base": "x", "deep": "${nested}/z", "nested": "${base}/y", "e": "${env.RACK}-${env.NONE:-none}"},
        {"a": "2", "unknown": "${no.such.setting}"},
    )
    assert conf.get("a") == "2"
    assert conf.get("deep") == "x/y/z"
    assert conf.get("e") == "r7-none"
    assert conf.get("unknown") == "${no.such.setting}"


def test_final_properties_are_not_overridden(tmp_path):
    (tmp_path / "core-site.xml").write_text(
        "<configuration><property><name>a</name><value>1</value><final>true</final></property></configuration>"
    )
    assert write(tmp_path, hdfs={"a": "2"}).get("a") == "1"


def test_included_files_are_read(tmp_path):
    write_site(tmp_path / "more.xml", {"b": "3"})
    (tmp_path / "core-site.xml").write_text(
        '<configuration xmlns:xi="http://www.w3.org/2001/XInclude"><xi:include href="more.xml"/></configuration>'
    )
    assert load_hadoop_conf(str(tmp_path)).get("b") == "3"


def test_a_file_that_includes_itself_is_refused(tmp_path):
    (tmp_path / "core-site.xml").write_text(
        '<configuration xmlns:xi="http://www.w3.org/2001/XInclude"><xi:include href="core-site.xml"/></configuration>'
    )
    with pytest.raises(ConfigError, match="included by itself"):
        load_hadoop_conf(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<configuration><property>", "not well-formed"),
        ("", "not well-formed"),
        ("<html/>", "not a Hadoop configuration"),
        ("<configuration><property><value>1</value></property></configuration>", "without a <name>"),
    ],
)
def test_malformed_files_are_refused_by_name(tmp_path, text, message):
    (tmp_path / "hdfs-site.xml").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_hadoop_conf(str(tmp_path))
    assert "hdfs-site.xml" in str(caught.value)


def test_a_named_folder_without_configuration_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="neither core-site"):
        load_hadoop_conf(str(tmp_path))


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    write(tmp_path, {"a": "1"})
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    assert load_hadoop_conf(None).get("a") == "1"
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path / "none"))
    assert load_hadoop_conf(None).settings == {}


HA = {
    "dfs.nameservices": "prod",
    "dfs.ha.namenodes.prod": "nn1, nn2",
    "dfs.namenode.rpc-address.prod.nn1": "a:8020",
    "dfs.namenode.rpc-address.prod.nn2": "b:8020",
    "dfs.namenode.http-address.prod.nn1": "a:9871",
    "dfs.namenode.http-address.prod.nn2": "0.0.0.0:50070",
}


def test_a_name_service_has_several_servers():
    servers = locate("prod", HadoopConf(HA), None)
    assert servers.authority == "prod"
    assert servers.rpc == ("a:8020", "b:8020")
    assert servers.web == ("http://a:9871", "http://b:50070")
    assert servers.rotated().rpc == ("b:8020", "a:8020")
    assert servers.rotated().settings["dfs.ha.namenodes.prod"] == "nn2,nn1"


def test_a_name_service_without_addresses_is_refused():
    with pytest.raises(ConfigError, match=r"dfs\.namenode\.rpc-address\.prod\.nn2"):
        locate("prod", HadoopConf({k: v for k, v in HA.items() if "rpc-address.prod.nn2" not in k}), None)


def test_https_only_clusters_are_asked_over_https():
    conf = HadoopConf(
        {
            "dfs.http.policy": "HTTPS_ONLY",
            "dfs.namenode.https-address": "0.0.0.0:1234",
            "fs.defaultFS": "hdfs://a:9000",
        }
    )
    assert locate("a:9000", conf, None).web == ("https://a:1234",)
    assert locate("other:9000", conf, None).web == ("https://other:9871",)


def test_defaults_without_configuration():
    servers = locate("a", HadoopConf(), None)
    assert (servers.authority, servers.web) == ("a:8020", ("http://a:9870",))
    assert servers.rotated() is servers


def test_the_users_web_address_wins():
    assert locate("prod", HadoopConf(HA), "x:1, https://y:2/").web == ("http://x:1", "https://y:2")
    for bad in ("x", "x:1/path", "ftp://x:1"):
        with pytest.raises(ConfigError, match="web_address"):
            locate("prod", HadoopConf(HA), bad)
