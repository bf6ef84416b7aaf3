"""The pickles inside torch checkpoints, read as plain data: only the names below exist, anything else is refused.

A pickle is a program, and a checkpoint is somebody else's: what is not on the list never runs. This is the deliberate
twin of the reader in `turbofs/formats/` (planned there): a program that knows nothing of TurboFS must be able to stand
alone. Whoever changes the list of names in one changes it in the other.
"""

from __future__ import annotations

import collections
import io
import pickle
from typing import Any, NamedTuple


class CheckpointError(Exception):
    """The checkpoint is not what it says it is; the message names the file and the place."""


DTYPES: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1), "float8_e8m0fnu": ("F8_E8M0", 1),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1),
    "uint64": ("U64", 8), "uint32": ("U32", 4), "uint16": ("U16", 2), "uint8": ("U8", 1),
    "bool": ("BOOL", 1), "complex64": ("C64", 8),
}  # fmt: skip
"""torch's name → safetensors' name and bytes an element."""

STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
}  # fmt: skip
"""torch's typed storages → the dtype of their elements."""


class Name(NamedTuple):
    """A torch constant (a dtype, a storage class), known by name alone."""

    name: str


class Record:
    """What a pickled dataclass becomes: its fields, hashable by what identifies an index entry."""

    kind = ""

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict) and all(isinstance(key, str) for key in state):
            self.__dict__.update(state)
        elif isinstance(state, tuple):
            self.__dict__["state"] = state
        else:
            raise pickle.UnpicklingError(f"{self.kind} with a state of type {type(state).__name__}")

    def get(self, name: str) -> Any:
        """The field *name*; raises CheckpointError where the pickle did not give it."""
        try:
            return self.__dict__[name]
        except KeyError:
            raise CheckpointError(f"a {self.kind} has no {name}") from None

    def fields(self) -> dict[str, Any]:
        return self.__dict__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and (self.kind, self.__dict__) == (other.kind, other.__dict__)

    def __hash__(self) -> int:
        return hash((self.kind, self.__dict__.get("fqn"), self.__dict__.get("offset")))


def record(kind: str) -> type[Record]:
    return type(kind, (Record,), {"kind": kind})


class StoredTensor(NamedTuple):
    """The view that an item's pickle describes: elements of a storage, by offset and strides."""

    storage: Any
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str | None


def rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> StoredTensor:
    # _rebuild_tensor_v2(…, requires_grad, hooks[, metadata]); _v3 has a dtype after the hooks.
    dtype = next((value.name for value in rest if isinstance(value, Name)), None)
    return StoredTensor(storage, offset, tuple(shape), tuple(strides), dtype)


_DCP = "torch.distributed.checkpoint.metadata"
ALLOWED: dict[tuple[str, str], Any] = {
    **{(_DCP, kind): record(kind) for kind in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta")},
    (_DCP, "_MEM_FORMAT_ENCODING"): lambda value: value,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): record("_StorageInfo"),
    ("torch.serialization", "_get_layout"): lambda name: name,
    ("torch", "Size"): tuple,
    **{("torch", dtype): Name(dtype) for dtype in DTYPES},
    **{("torch", storage): Name(dtype) for storage, dtype in STORAGES.items()},
    ("torch.storage", "UntypedStorage"): Name(""),
    ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): rebuild_tensor,
    ("collections", "OrderedDict"): collections.OrderedDict,
    **{(module, kind): lambda *parts: "/".join(map(str, parts))
       for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "WindowsPath", "PurePosixPath")},
}  # fmt: skip


class AllowListUnpickler(pickle.Unpickler):
    """Knows the names of ALLOWED and storages, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise CheckpointError(f"the pickle names {module}.{name}, which no checkpoint of tensors needs") from None

    def persistent_load(self, pid: Any) -> Any:
        match pid:
            case ("storage", Name(dtype), str(key), _, int(count)):
                return dtype, key, count
        raise CheckpointError(f"the pickle refers to something that is not a storage: {pid!r:.80}")


def unpickle(data: bytes | memoryview, where: str) -> Any:
    """The object that *data* describes. Raises CheckpointError, naming *where*, for anything but plain data."""
    try:
        return AllowListUnpickler(io.BytesIO(data), encoding="utf-8").load()
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except Exception as error:  # noqa: BLE001  a damaged pickle can raise anything at all
        raise CheckpointError(f"{where} is not a readable pickle: {error!r:.200}") from None
