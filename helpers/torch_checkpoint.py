"""What is inside a torch distributed checkpoint: its index, and the tensors in its stored items.

Standard library and numpy only: no torch, no TurboFS, no I/O but reading `.metadata`. `.metadata` is a pickle that
gives for every tensor its dtype, its shape and its shards, and for every shard the file, offset and length of its item.
An item is one complete `torch.save` archive: a zip, uncompressed, with a pickle (the view) and a storage (the bytes).

Everything here treats its input as somebody else's: a damaged or hostile checkpoint ends in CheckpointError.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_pickle import DTYPES, CheckpointError, Name, Record, StoredTensor, unpickle

Elements = npt.NDArray[np.unsignedinteger[Any]]
"""Elements as unsigned integers of the dtype's width: numpy moves them and never computes with them."""

MAX_METADATA_BYTES = 1 << 30
"""A `.metadata` beyond this is damage: 100,000 items take about 25 MB."""

MAX_GRID_CELLS = 1 << 22
"""Cells of the grid that proves that shards tile a tensor: real ones have about one a shard."""


def element_type(dtype: str) -> np.dtype[np.unsignedinteger[Any]]:
    return np.dtype(f"u{DTYPES[dtype][1]}")


# --- the index: what `.metadata` says


@dataclass(frozen=True)
class Item:
    """One shard: where it is stored, and which block of the whole tensor it is."""

    file: str
    offset: int
    length: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """A whole tensor and its shards, which cover every element exactly once."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    items: tuple[Item, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass
class Index:
    """What a checkpoint holds, in the order of its own table: tensors, and objects that are none."""

    tensors: list[Tensor] = field(default_factory=list)
    objects: dict[str, Item] = field(default_factory=dict)


def read_index(folder: Path) -> Index:
    """Read `.metadata` of the checkpoint in *folder*. Raises CheckpointError, and OSError as the file system does."""
    path = folder / ".metadata"
    try:
        if path.stat().st_size > MAX_METADATA_BYTES:
            raise CheckpointError(f"larger than {MAX_METADATA_BYTES >> 20} MiB")
        return _index(unpickle(path.read_bytes(), "the table"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no torch distributed checkpoint: it has no .metadata") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (
        TypeError,
        AttributeError,
        LookupError,
        ValueError,
    ) as error:  # a field of an unexpected type, wherever it shows first
        raise CheckpointError(f"{path} is malformed: {error}") from None


def _index(metadata: Any) -> Index:
    if not isinstance(metadata, Record) or metadata.kind != "Metadata":
        raise CheckpointError("the pickle holds no Metadata")
    places = {
        (key.get("fqn"), key.fields().get("offset")): place for key, place in metadata.get("storage_data").items()
    }
    index = Index()
    for name, entry in metadata.get("state_dict_metadata").items():
        if not isinstance(name, str):
            raise CheckpointError(f"a tensor is named {name!r:.80}")
        if entry.kind == "BytesStorageMetadata":
            index.objects[name] = _item(places, name, None, ())
        else:
            index.tensors.append(_tensor(places, name, entry))
    return index


def _tensor(places: dict[tuple[Any, Any], Any], name: str, entry: Record) -> Tensor:
    shape = _naturals(entry.get("size"), f"the shape of {name}")
    items = tuple(
        _item(places, name, _naturals(chunk.get("offsets"), name), _naturals(chunk.get("sizes"), name))
        for chunk in entry.get("chunks")
    )
    tensor = Tensor(name, _dtype(entry.get("properties"), name), shape, items)
    _check_tiling(tensor)
    if tensor.size_bytes > sum(item.length for item in items):
        raise CheckpointError(f"{name} is said to have {tensor.size_bytes} bytes, more than all that is stored of it")
    return tensor


def _item(
    places: dict[tuple[Any, Any], Any], name: str, offsets: tuple[int, ...] | None, sizes: tuple[int, ...]
) -> Item:
    place = places.get((name, offsets))
    if place is None:
        raise CheckpointError(f"nothing says where {name} at {offsets} is stored")
    file = place.get("relative_path")
    if not isinstance(file, str) or not file or Path(file).is_absolute() or ".." in Path(file).parts:
        raise CheckpointError(f"{name} is said to be in {file!r:.80}, outside the checkpoint")
    if place.fields().get("transform_descriptors"):
        raise CheckpointError(f"{name} is stored compressed, which is not read here")
    return Item(
        file,
        _natural(place.get("offset"), f"the offset of {name}"),
        _natural(place.get("length"), f"the length of {name}"),
        offsets or (),
        sizes,
    )


def _dtype(properties: Record, name: str) -> str:
    state = properties.get("state")
    if not isinstance(state[0], Name) or state[0].name not in DTYPES:
        raise CheckpointError(f"{name} has no dtype that can be written: {state!r:.80}")
    return state[0].name


def _natural(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise CheckpointError(f"{what} is {value!r:.40}, not a size")
    return value


def _naturals(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, tuple):
        raise CheckpointError(f"{what} is {value!r:.40}, not a shape")
    return tuple(_natural(each, what) for each in value)


def _check_tiling(tensor: Tensor) -> None:
    """Every element is in exactly one shard: counted on the grid of all shard boundaries, a cell a shard as a rule."""
    name, shape, items = tensor.name, tensor.shape, tensor.items
    for item in items:
        if len(item.offsets) != len(shape) or len(item.sizes) != len(shape):
            raise CheckpointError(f"a shard of {name} has another number of dimensions than {shape}")
        if any(offset + size > whole for offset, size, whole in zip(item.offsets, item.sizes, shape, strict=True)):
            raise CheckpointError(f"a shard of {name} at {item.offsets}, sizes {item.sizes}, reaches outside {shape}")
    cells: list[dict[int, int]] = []  # an axis each: boundary → its number
    for axis, whole in enumerate(shape):
        ends = ((item.offsets[axis], item.offsets[axis] + item.sizes[axis]) for item in items)
        cells.append({edge: number for number, edge in enumerate(sorted({0, whole, *itertools.chain(*ends)}))})
    if math.prod(map(len, cells)) > MAX_GRID_CELLS:
        raise CheckpointError(f"the shards of {name} are cut too irregularly to be checked")
    seen = np.zeros([len(each) - 1 for each in cells], np.uint16)
    for item in items:
        block = zip(cells, item.offsets, item.sizes, strict=True)
        seen[tuple(slice(numbers[offset], numbers[offset + size]) for numbers, offset, size in block)] += 1
    if not (seen == 1).all():
        raise CheckpointError(f"the shards of {name} leave a part of {shape} out, or hold a part twice")


# --- the items: a torch.save archive in memory


def tensor_in(data: memoryview, item: Item, dtype: str) -> Elements:
    """The shard in the archive *data*, as a view of it, of shape `item.sizes`. Raises CheckpointError."""
    members, prefix = _archive(data)
    if bytes(members.get(f"{prefix}byteorder", b"little")) != b"little":
        raise CheckpointError("its bytes are big-endian, which is not read here")
    view = unpickle(members[f"{prefix}data.pkl"], "its pickle")
    if not isinstance(view, StoredTensor):
        raise CheckpointError("it holds no tensor")
    stored_dtype, key, _ = view.storage
    found = stored_dtype or view.dtype or dtype  # an untyped storage: the view says what is in it
    if found != dtype or view.shape != item.sizes or len(view.strides) != len(view.shape):
        raise CheckpointError(f"it holds {found} {view.shape}, the table says {dtype} {item.sizes}")
    storage = members.get(f"{prefix}data/{key}")
    if storage is None:
        raise CheckpointError(f"its storage {key!r} is missing")
    width = DTYPES[dtype][1]
    reach = [_natural(stride, "a stride") * (size - 1) for stride, size in zip(view.strides, view.shape, strict=True)]
    start = _natural(view.offset, "a storage offset")
    if math.prod(view.shape) and (start + sum(reach) + 1) * width > storage.nbytes:
        raise CheckpointError(f"its storage has {storage.nbytes} bytes, too few for {view.shape} at {start}")
    elements = np.frombuffer(storage[: storage.nbytes // width * width], element_type(dtype))
    return np.lib.stride_tricks.as_strided(
        elements[start:], view.shape, [stride * width for stride in view.strides], writeable=False
    )


def object_in(data: memoryview) -> Any:
    """The plain object (numbers, texts, lists, dictionaries) in the archive *data*. Raises CheckpointError."""
    members, prefix = _archive(data)
    return unpickle(members[f"{prefix}data.pkl"], "its pickle")


def _archive(data: memoryview) -> tuple[dict[str, memoryview], str]:
    """The members of a torch.save archive, and the folder that they are in ("archive/")."""
    try:
        members = dict(_zip_members(data))
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise CheckpointError(f"not a zip archive: {error}") from None
    pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError("a zip archive, but not one of torch.save")
    return members, pickles[0].removesuffix("data.pkl")


def _zip_members(data: memoryview) -> Iterator[tuple[str, memoryview]]:
    # By hand, because `zipfile` would copy every storage once more. torch writes zip64 fields and never compresses.
    tail = max(0, data.nbytes - (22 + 0xFFFF))
    end = bytes(data[tail:]).rfind(b"PK\5\6")
    if end < 0:
        raise CheckpointError("not a zip archive: it has no directory")
    end += tail
    count, _, position = struct.unpack_from("<HII", data, end + 10)
    if count == 0xFFFF or position == 0xFFFFFFFF:
        (end64,) = struct.unpack_from("<Q", data, end - 12)
        count, _, position = struct.unpack_from("<QQQ", data, end64 + 32)
    for _ in range(count):
        magic, method, stored, size, name_length, extra_length, comment_length, header = struct.unpack_from(
            "<4s6xH8xIIHHH8xI", data, position
        )
        if magic != b"PK\1\2":
            raise CheckpointError("not a zip archive: its directory is damaged")
        name_end = position + 46 + name_length
        name = bytes(data[position + 46 : name_end]).decode()
        if 0xFFFFFFFF in (stored, size, header):
            stored, size, header = _wide(data[name_end : name_end + extra_length], stored, size, header)
        if method or stored != size:
            raise CheckpointError(f"{name} is compressed, which torch.save does not do")
        header_magic, *lengths = struct.unpack_from("<4s22xHH", data, header)
        start = header + 30 + sum(lengths)
        if header_magic != b"PK\3\4" or start + size > data.nbytes:
            raise CheckpointError(f"the directory points to {name} outside the item")
        yield name, data[start : start + size]
        position = name_end + extra_length + comment_length


def _wide(extra: memoryview, stored: int, size: int, header: int) -> tuple[int, int, int]:
    """Sizes beyond 32 bits, which are in the extra field 1, in this order and only those that need it."""
    position = 0
    while position < extra.nbytes:
        kind, length = struct.unpack_from("<HH", extra, position)
        if kind == 1:
            values = (value for (value,) in struct.iter_unpack("<Q", extra[position + 4 : position + 4 + length]))
            size = next(values) if size == 0xFFFFFFFF else size
            stored = next(values) if stored == 0xFFFFFFFF else stored
            header = next(values) if header == 0xFFFFFFFF else header
            return stored, size, header
        position += 4 + length
    raise CheckpointError("not a zip archive: a 64-bit size is missing")
