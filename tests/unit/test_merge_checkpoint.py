"""helpers/merge_checkpoint.py: right bytes from a good checkpoint; from a bad one a clear refusal and nothing left."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

import merge_checkpoint
from torch_checkpoint import Item, Tensor, _check_tiling, read_index, tensor_in
from torch_pickle import CheckpointError, unpickle

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "data" / "dcp-tiny"
SAFETENSORS_NAMES = {"bfloat16": "BF16", "uint8": "U8", "int64": "I64"}


def merge(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "helpers" / "merge_checkpoint.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(TINY, tmp_path / "checkpoint"))


def read_safetensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Read by the format's own rules, not by the writer's code."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__")
    data = content[8 + length :]
    spans = sorted(entry["data_offsets"] for entry in header.values())
    assert spans[0][0] == 0
    assert spans[-1][1] == len(data)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(spans)), "gaps are not allowed"
    return {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]) for name, entry in header.items()
    }


def replace_once(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    assert len(old) == len(new)
    path.write_bytes(content.replace(old, new, 1))


def assert_refused(result: subprocess.CompletedProcess[str], out: Path, *words: str) -> None:
    assert result.returncode == 1
    assert result.stderr.startswith("merge_checkpoint: ")
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr
    assert not out.exists()


# --- the right bytes


@pytest.mark.parametrize("threads", [1, 16])
def test_every_tensor_has_the_bytes_that_torch_loads(tmp_path: Path, threads: int) -> None:
    done = merge(TINY, tmp_path / "out", "--threads", threads)
    assert done.returncode == 0, done.stderr
    merged = read_safetensors(tmp_path / "out" / "model.safetensors")
    expected = json.loads((TINY / "expected-tensors.json").read_text())
    assert merged.keys() == expected.keys()
    for name, (dtype, shape, data) in merged.items():
        assert dtype == SAFETENSORS_NAMES[expected[name]["dtype"]]
        assert shape == expected[name]["shape"]
        assert blake3(data).hexdigest() == expected[name]["blake3"], name
    assert [path.name for path in (tmp_path / "out").iterdir() if "partial" in path.name] == []


def test_verify_counts_the_tensors_and_says_so_last(tmp_path: Path) -> None:
    done = merge(TINY, tmp_path / "out", "--verify", TINY / "expected-tensors.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "verified 94 tensors"


def test_only_chooses_by_name_and_json_summarises(tmp_path: Path) -> None:
    done = merge(TINY, tmp_path / "out", "--only", "model.projector.*", "--json")
    summary = json.loads(done.stdout)
    assert (summary["tensors"], summary["left_out"]) == (2, 92)
    assert read_safetensors(Path(summary["output"])).keys() == {"model.projector.bias", "model.projector.weight"}


def test_optimizer_state_is_left_out_unless_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    table = checkpoint / ".metadata"
    table.write_bytes(table.read_bytes().replace(b"model.vision.", b"optim.vision."))
    assert merge(checkpoint, tmp_path / "some").returncode == 0
    assert merge(checkpoint, tmp_path / "all", "--only", "*").returncode == 0
    some, everything = (read_safetensors(tmp_path / name / "model.safetensors") for name in ("some", "all"))
    left_out = everything.keys() - some.keys()
    assert left_out
    assert all(name.startswith("optim.vision.") for name in left_out)
    assert len(everything) == 94


def test_plain_objects_go_to_json(tmp_path: Path) -> None:
    assert merge(TINY, tmp_path / "out").returncode == 0
    assert json.loads((tmp_path / "out" / "objects.json").read_text()) == {
        "extra.lr": 0.0003,
        "extra.tokens": 123456789,
    }


def test_a_small_memory_budget_changes_nothing_but_the_pace(tmp_path: Path) -> None:
    tensors = read_index(TINY).tensors
    reader = merge_checkpoint.ItemReader(TINY)
    expected = json.loads((TINY / "expected-tensors.json").read_text())
    try:
        for tensor, whole in merge_checkpoint.read_tensors(reader, tensors, threads=4, in_flight_bytes=1):
            assert blake3(whole.tobytes()).hexdigest() == expected[tensor.name]["blake3"]
    finally:
        reader.close()
    assert reader.items_read == sum(len(tensor.items) for tensor in tensors)


def test_the_program_stands_alone() -> None:
    script = (
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'helpers')!r})\n"
        "import merge_checkpoint\n"
        "assert not {'turbofs', 'torch', 'blake3'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# --- refusals


def test_a_hostile_table_is_refused_before_it_runs(checkpoint: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"

    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(trap),)

    (checkpoint / ".metadata").write_bytes(pickle.dumps(Hostile()))
    assert_refused(merge(checkpoint, tmp_path / "out"), tmp_path / "out", "posix.mkdir", ".metadata")
    assert not trap.exists()


def test_a_hostile_item_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    replace_once(checkpoint / "__2_0.distcp", b"torch._utils\n_rebuild_tensor_v2", b"torch._utils\n_rebuild_tensor_v9")
    assert_refused(
        merge(checkpoint, tmp_path / "out"), tmp_path / "out", "torch._utils._rebuild_tensor_v9", "__2_0.distcp"
    )


def test_a_truncated_file_is_named(checkpoint: Path, tmp_path: Path) -> None:
    os.truncate(checkpoint / "__1_0.distcp", 100_000)
    assert_refused(merge(checkpoint, tmp_path / "out"), tmp_path / "out", "__1_0.distcp", "100000", "truncated")


@pytest.mark.parametrize(("offset", "words"), [(10**8, "truncated"), (166_643, "not a zip archive")])
def test_a_lying_offset_is_refused(checkpoint: Path, tmp_path: Path, offset: int, words: str) -> None:
    replace_once(checkpoint / ".metadata", b"J" + struct.pack("<i", 166_707), b"J" + struct.pack("<i", offset))
    assert_refused(merge(checkpoint, tmp_path / "out"), tmp_path / "out", words)


def test_a_path_outside_the_checkpoint_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    replace_once(checkpoint / ".metadata", b"__3_0.distcp", b"../../passwd")
    assert_refused(merge(checkpoint, tmp_path / "out"), tmp_path / "out", "outside the checkpoint")


def test_missing_parts_are_named(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "__0_0.distcp").unlink()
    assert_refused(merge(checkpoint, tmp_path / "out"), tmp_path / "out", "__0_0.distcp")
    (checkpoint / ".metadata").unlink()
    assert_refused(merge(checkpoint, tmp_path / "out"), tmp_path / "out", "has no .metadata")
    assert_refused(merge(tmp_path / "nowhere", tmp_path / "out"), tmp_path / "out", "nowhere")


def test_a_wrong_digest_fails_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    expected = json.loads((checkpoint / "expected-tensors.json").read_text())
    expected["model.norm.weight"]["blake3"] = "0" * 64
    (checkpoint / "expected-tensors.json").write_text(json.dumps(expected))
    result = merge(checkpoint, tmp_path / "out", "--verify", checkpoint / "expected-tensors.json")
    assert_refused(result, tmp_path / "out", "model.norm.weight", "blake3")


def test_a_failure_keeps_an_earlier_result(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert merge(checkpoint, out).returncode == 0
    before = (out / "model.safetensors").read_bytes()
    os.truncate(checkpoint / "__3_0.distcp", 10)
    assert merge(checkpoint, out).returncode == 1
    assert (out / "model.safetensors").read_bytes() == before
    assert not (out / "model.safetensors.partial").exists()


def test_nothing_chosen_and_wrong_use(tmp_path: Path) -> None:
    assert_refused(merge(TINY, tmp_path / "out", "--only", "nothing*"), tmp_path / "out", "--only")
    assert merge(TINY).returncode == 2
    assert merge(TINY, tmp_path / "out", "--threads", 0).returncode == 2


# --- the planner's parts


def shard(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Item:
    return Item("__0_0.distcp", 0, 1 << 20, offsets, sizes)


@pytest.mark.parametrize(
    ("shape", "shards"),
    [
        ((), [((), ())]),
        ((0, 4), []),
        ((5, 4), [((0, 0), (3, 4)), ((3, 0), (2, 4))]),
        ((4, 4), [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2)), ((2, 2), (2, 2))]),
        ((3,), [((0,), (3,)), ((3,), (0,))]),
    ],
)
def test_shards_that_tile_are_accepted(shape: tuple[int, ...], shards: list[tuple[tuple[int, ...], ...]]) -> None:
    _check_tiling(Tensor("w", "uint8", shape, tuple(shard(*each) for each in shards)))


@pytest.mark.parametrize(
    ("shape", "shards"),
    [
        ((), []),
        ((4,), [((0,), (3,))]),
        ((4,), [((0,), (3,)), ((2,), (2,))]),
        ((4,), [((0,), (5,))]),
        ((4, 4), [((0,), (4,))]),
        ((4, 4), [((0, 0), (4, 2)), ((0, 0), (4, 2))]),
    ],
)
def test_shards_that_do_not_tile_are_refused(shape: tuple[int, ...], shards: list[tuple[tuple[int, ...], ...]]) -> None:
    with pytest.raises(CheckpointError, match="w"):
        _check_tiling(Tensor("w", "uint8", shape, tuple(shard(*each) for each in shards)))


def _one_item() -> tuple[bytes, Item, str]:
    tensor = next(tensor for tensor in read_index(TINY).tensors if tensor.name == "model.projector.bias")
    item = tensor.items[0]
    with (TINY / item.file).open("rb") as file:
        file.seek(item.offset)
        return file.read(item.length), item, tensor.dtype


ITEM_BYTES, ITEM, ITEM_DTYPE = _one_item()
TABLE_BYTES = (TINY / ".metadata").read_bytes()

# LONG_BINPUT makes CPython's unpickler allocate as much memo as its argument says: not a thing to fuzz.
damaging_bytes = st.integers(0, 255).filter(lambda value: value != ord("r"))


@settings(max_examples=300, deadline=None)
@given(
    damage=st.lists(st.tuples(st.integers(0, len(ITEM_BYTES) - 1), damaging_bytes), min_size=1, max_size=4),
    length=st.integers(0, len(ITEM_BYTES)) | st.just(len(ITEM_BYTES)),
)
def test_a_damaged_item_gives_a_tensor_of_the_right_shape_or_an_error(
    damage: list[tuple[int, int]], length: int
) -> None:
    content = bytearray(ITEM_BYTES)
    for position, value in damage:
        content[position] = value
    try:
        view = tensor_in(memoryview(content)[:length], ITEM, ITEM_DTYPE)
    except CheckpointError:
        return
    assert view.shape == ITEM.sizes
    assert view.tobytes() is not None


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, len(TABLE_BYTES) - 1), value=damaging_bytes)
def test_a_damaged_table_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    content = bytearray(TABLE_BYTES)
    content[position] = value
    (folder / ".metadata").write_bytes(content)
    with contextlib.suppress(CheckpointError):  # no other error may come out
        read_index(folder)


@pytest.mark.parametrize(
    "name", [b"builtins\neval", b"os\nsystem", b"torch\nload", b"numpy\nload", b"torch\n__builtins__"]
)
def test_names_off_the_list_are_refused(name: bytes) -> None:
    with pytest.raises(CheckpointError, match=name.replace(b"\n", b".").decode()):
        unpickle(b"\x80\x02c" + name + b"\n.", "here")
