"""Where bytes live: the Source contract, and HDFS, local trees, object stores and memory behind it."""
