"""Random reads, writes, truncations and mappings of one file return exactly the bytes that were written last (`fsx`)."""

from __future__ import annotations

import pytest

from turbofs.testing.tools import run_fsx

pytestmark = pytest.mark.mount

CONFIGS = pytest.mark.parametrize("config", ["fsx.toml", "fsx-mmap.toml"], ids=["calls", "mappings"])
SEED = 20_000
"""A failure prints it with the whole command, and is repeated by running that."""


@CONFIGS
@pytest.mark.parametrize("operations", [2_000, pytest.param(20_000, marks=pytest.mark.long)])
def test_random_operations_return_what_was_written(tree, need_tool, tmp_path, config, operations):
    need_tool("fsx")
    run_fsx(
        tree.path / f"{config}-{operations}", config, operations=operations, seed=SEED, artifacts=tmp_path, limit_s=600
    )
