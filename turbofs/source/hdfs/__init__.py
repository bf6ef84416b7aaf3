"""`hdfs://`: hdfs-native for bytes, names and replication; WebHDFS for what it lacks; libhdfs for bytes where asked."""

from turbofs.source.hdfs.source import HdfsSource

__all__ = ["HdfsSource"]
