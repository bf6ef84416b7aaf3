#!/usr/bin/env python3
"""Merge a sharded torch checkpoint into one safetensors file, as an evaluation program would.

    merge_checkpoint.py CKPT_DIR OUT_DIR [--only GLOB] [--threads N] [--verify EXPECTED_JSON] [--json]

CKPT_DIR holds a `torch.distributed.checkpoint`: `.metadata` and `*.distcp`. OUT_DIR receives `model.safetensors` and,
for what is not a tensor (a learning rate, a scheduler's state), `objects.json`. Optimizer state is left out unless
`--only` asks for it (`--only '*'`: everything).

A plain program on purpose: it knows nothing of TurboFS and needs neither torch nor anything but numpy (and blake3 for
`--verify`). It reads as such programs do: each file opened once, each stored item by one pread, in the order of the
checkpoint's own table, which is not the order of the files. The benchmarks use it as their reader.

Memory: the tensors in flight (256 MiB, or one tensor where that is larger) and one item a thread. The checksums inside
the archives are not looked at, as torch does not either; `--verify` compares whole tensors.

Exit codes: 0 done, 1 the checkpoint or the output cannot be used (nothing partial is left), 2 wrong use.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fnmatch
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from torch_checkpoint import (
    Elements,
    Item,
    Tensor,
    element_type,
    object_in,
    read_index,
    tensor_in,
)
from torch_pickle import DTYPES, CheckpointError

IN_FLIGHT_BYTES = 256 << 20
"""Tensors being assembled at once: enough for many readers of 16 MiB items, little beside the model itself."""

OPTIMIZER = re.compile(r"(^|[._/])optim(izers?)?([._/]|$)", re.IGNORECASE)


class ItemReader:
    """Reads stored items by pread, any number of threads at a time. Descriptors stay open until `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._files: dict[str, tuple[int, int]] = {}
        self._buffers = threading.local()
        self.bytes_read = 0
        self.items_read = 0

    def read(self, item: Item) -> memoryview:
        """The item's bytes, valid until this thread's next read. Raises CheckpointError where the file ends early."""
        descriptor, size = self._open(item.file)
        if item.offset + item.length > size:
            raise CheckpointError(
                f"{self._folder / item.file} has {size} bytes, but the table says that an item ends at "
                f"{item.offset + item.length}: the file is truncated, or the table is of another checkpoint"
            )
        buffer = getattr(self._buffers, "buffer", None)
        if buffer is None or len(buffer) < item.length:
            buffer = self._buffers.buffer = bytearray(item.length)
        data = memoryview(buffer)[: item.length]
        done = 0
        while done < item.length:  # one call in practice; Linux carries at most 2 GiB a call
            count = os.preadv(descriptor, [data[done:]], item.offset + done)
            if count == 0:
                raise CheckpointError(
                    f"{self._folder / item.file} ended early, at {item.offset + done} of {size} bytes"
                )
            done += count
        with self._lock:
            self.bytes_read += item.length
            self.items_read += 1
        return data

    def close(self) -> None:
        for descriptor, _ in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _open(self, file: str) -> tuple[int, int]:
        with self._lock:
            if file not in self._files:
                descriptor = os.open(self._folder / file, os.O_RDONLY | os.O_CLOEXEC)
                self._files[file] = descriptor, os.fstat(descriptor).st_size
            return self._files[file]


def read_tensors(
    reader: ItemReader, tensors: Sequence[Tensor], threads: int, in_flight_bytes: int = IN_FLIGHT_BYTES
) -> Generator[tuple[Tensor, Elements], None, None]:
    """Each tensor whole and contiguous, in the order given, with *threads* items being read at any time."""

    def place(tensor: Tensor, item: Item, whole: Elements) -> None:
        block = tuple(slice(offset, offset + size) for offset, size in zip(item.offsets, item.sizes, strict=True))
        data = reader.read(item)
        try:
            whole[block] = tensor_in(data, item, tensor.dtype)
        except CheckpointError as error:
            end = item.offset + item.length
            raise CheckpointError(f"{item.file}, bytes {item.offset} to {end} ({tensor.name}): {error}") from None

    waiting: collections.deque[tuple[Tensor, Elements, list[Future[None]]]] = collections.deque()
    waiting_bytes = 0
    pool = ThreadPoolExecutor(threads, thread_name_prefix="reader")
    try:
        for tensor in tensors:
            while waiting and waiting_bytes + tensor.size_bytes > in_flight_bytes:
                done, whole, futures = waiting.popleft()
                for future in futures:
                    future.result()
                waiting_bytes -= done.size_bytes
                yield done, whole
                del whole
            whole = np.empty(tensor.shape, element_type(tensor.dtype))
            futures = [pool.submit(place, tensor, item, whole) for item in tensor.items]
            waiting.append((tensor, whole, futures))
            waiting_bytes += tensor.size_bytes
        while waiting:
            done, whole, futures = waiting.popleft()
            for future in futures:
                future.result()
            yield done, whole
    finally:
        pool.shutdown(cancel_futures=True)


def safetensors_layout(tensors: Sequence[Tensor]) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file, and where in the file each tensor's bytes begin."""
    # Wide elements first, so that every tensor is aligned to its own element for those who map the file.
    ordered = sorted(tensors, key=lambda tensor: (-DTYPES[tensor.dtype][1], tensor.name))
    entries: dict[str, Any] = {}
    starts: dict[str, int] = {}
    position = 0
    for tensor in ordered:
        stop = position + tensor.size_bytes
        entries[tensor.name] = {
            "dtype": DTYPES[tensor.dtype][0],
            "shape": list(tensor.shape),
            "data_offsets": [position, stop],
        }
        starts[tensor.name], position = position, stop
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header, {name: 8 + len(header) + at for name, at in starts.items()}


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


class Verifier:
    """Compares tensors with what a JSON file says of them: dtype, shape and the BLAKE3 of the whole bytes."""

    def __init__(self, path: Path) -> None:
        from blake3 import blake3

        self._digest: Callable[[memoryview], str] = lambda data: blake3(data).hexdigest()
        self._path = path
        try:
            self._expected = json.loads(path.read_bytes())
        except ValueError as error:
            raise CheckpointError(f"{path} is not JSON: {error}") from None
        self.count = 0

    def check(self, tensor: Tensor, data: memoryview) -> None:
        expected = self._expected.get(tensor.name)
        if expected is None:
            raise CheckpointError(f"{self._path} says nothing of {tensor.name}")
        found = {"dtype": tensor.dtype, "shape": list(tensor.shape), "blake3": self._digest(data)}
        for what, value in found.items():
            if expected.get(what) != value:
                raise CheckpointError(f"{tensor.name}: {what} is {value}, {self._path.name} says {expected.get(what)}")
        self.count += 1


def merge(
    folder: Path, out: Path, chosen: Callable[[str], bool], threads: int, verifier: Verifier | None
) -> dict[str, Any]:
    """Write *out*/model.safetensors from the tensors that are *chosen*; returns what was done, for the summary."""
    started = time.monotonic()
    index = read_index(folder)
    tensors = [tensor for tensor in index.tensors if chosen(tensor.name)]
    if not tensors:
        raise CheckpointError(f"no tensor of {folder} is chosen; it has {len(index.tensors)}, see --only")
    header, starts = safetensors_layout(tensors)
    out.mkdir(parents=True, exist_ok=True)
    partial, result = out / "model.safetensors.partial", out / "model.safetensors"
    reader = ItemReader(folder)
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            write_at(descriptor, memoryview(header), 0)
            with contextlib.closing(read_tensors(reader, tensors, threads)) as whole_tensors:
                for tensor, whole in whole_tensors:
                    data = whole.reshape(-1).view(np.uint8).data
                    if verifier:
                        verifier.check(tensor, data)
                    write_at(descriptor, data, starts[tensor.name])
        finally:
            os.close(descriptor)
        objects, skipped = read_objects(reader, {name: item for name, item in index.objects.items() if chosen(name)})
        if objects:
            (out / "objects.json").write_text(json.dumps(objects, indent=2) + "\n")
        partial.rename(result)
    finally:
        reader.close()
        partial.unlink(missing_ok=True)
    return {
        "output": str(result),
        "tensors": len(tensors),
        "tensor_bytes": sum(tensor.size_bytes for tensor in tensors),
        "left_out": len(index.tensors) - len(tensors),
        "objects": len(objects),
        "objects_skipped": skipped,
        "items_read": reader.items_read,
        "bytes_read": reader.bytes_read,
        "seconds": round(time.monotonic() - started, 3),
        **({"verified": verifier.count} if verifier else {}),
    }


def read_objects(reader: ItemReader, items: dict[str, Item]) -> tuple[dict[str, Any], list[str]]:
    """What is not a tensor, where it is plain data; the names of the rest, whose classes are not ours to load."""
    objects: dict[str, Any] = {}
    skipped = []
    for name, item in items.items():
        data = reader.read(item)
        try:
            value = object_in(data)
            json.dumps(value)
        except (CheckpointError, TypeError, ValueError):
            skipped.append(name)
        else:
            objects[name] = value
    return objects, skipped


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Merge a sharded torch checkpoint into one safetensors file.")
    parser.add_argument("checkpoint", type=Path, metavar="CKPT_DIR")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--only", metavar="GLOB", help="tensors by name; default: all but optimizer state")
    parser.add_argument("--threads", type=int, default=8, metavar="N", help="items read at a time (default 8)")
    parser.add_argument("--verify", type=Path, metavar="EXPECTED_JSON", help="compare each tensor's BLAKE3 with this")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    options = parser.parse_args(arguments)
    if options.threads < 1:
        parser.error("--threads must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)

    def chosen(name: str) -> bool:
        if options.only is not None:
            return fnmatch.fnmatchcase(name, options.only)
        return not OPTIMIZER.search(name)

    existed = options.out.exists()
    try:
        verifier = Verifier(options.verify) if options.verify else None
        summary = merge(options.checkpoint, options.out, chosen, options.threads, verifier)
    except (CheckpointError, OSError, MemoryError, ImportError) as error:
        if not existed:
            with contextlib.suppress(OSError):  # it may never have been made, or hold somebody else's file by now
                options.out.rmdir()
        print(f"merge_checkpoint: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(summary))
        return 0
    print(
        f"merged {summary['tensors']} tensors ({summary['tensor_bytes'] / 1e6:.1f} MB, {summary['items_read']} items) "
        f"into {summary['output']} in {summary['seconds']:.2f} s"
    )
    if summary["left_out"]:
        print(f"left out {summary['left_out']} tensors (--only '*' takes all)")
    for name in summary["objects_skipped"]:
        print(f"skipped {name}: an object of a class that is not plain data")
    if verifier:
        print(f"verified {verifier.count} tensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
