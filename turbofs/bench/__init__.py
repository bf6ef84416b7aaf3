"""Benchmarks: one file a scene."""
