"""For tests and benchmarks only: a real HDFS, wrappers that misbehave, the conformance suite of sources."""
