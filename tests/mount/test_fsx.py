"""Random reads, writes, truncations and mappings of one file return exactly the bytes that were written last (`fsx`)."""

from __future__ import annotations

import pytest

from turbofs.testing.tools import run_fsx

pytestmark = pytest.mark.mount

CONFIGS = pytest.mark.parametrize("config", ["fsx.toml", "fsx-mmap.toml"], ids=["calls", "mappings"])
SEED = 20_000
"""A failure prints it with the whole command, and is repeated by running that."""


@CONFIGS
def test_random_operations_return_what_was_written(tree, need_tool, tmp_path, config):
    need_tool("fsx")
    run_fsx(tree.path / f"short-{config}", config, operations=20_000, seed=SEED, artifacts=tmp_path, limit_s=120)
