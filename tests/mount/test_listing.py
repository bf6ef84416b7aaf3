"""Directories through a mount: streamed, whole, stable, and cheap."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from turbofs.testing.children import Child, in_child

pytestmark = pytest.mark.mount

MANY = 3500
"""More than three batches of a local source, and many replies to the kernel."""


def fill(folder, names):
    for name in names:
        (folder / name).touch()


def names_of(count, prefix="name"):
    return [f"{prefix}-{number:05d}" for number in range(count)]


class Directory:
    """opendir and its kin, which Python does not offer: an entry's name, and the place in the directory."""

    class _Entry(ctypes.Structure):
        _fields_ = (
            ("number", ctypes.c_uint64),
            ("offset", ctypes.c_int64),
            ("length", ctypes.c_uint16),
            ("kind", ctypes.c_uint8),
            ("name", ctypes.c_char * 256),
        )

    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.opendir.restype = ctypes.c_void_p
    _libc.readdir64.restype = ctypes.POINTER(_Entry)
    _libc.telldir.restype = ctypes.c_long

    def __init__(self, path):
        self._stream = ctypes.c_void_p(self._libc.opendir(os.fsencode(path)))
        assert self._stream

    def next(self):
        """The next name; None at the end."""
        ctypes.set_errno(0)
        entry = self._libc.readdir64(self._stream)
        assert entry or ctypes.get_errno() == 0
        return entry.contents.name.decode() if entry else None

    def rest(self):
        return list(iter(self.next, None))

    def tell(self):
        return self._libc.telldir(self._stream)

    def seek(self, offset):
        self._libc.seekdir(self._stream, ctypes.c_long(offset))

    def rewind(self):
        self._libc.rewinddir(self._stream)

    def close(self):
        self._libc.closedir(self._stream)


def test_listing_holds_every_name_once(place):
    names = names_of(MANY)
    fill(place.source, names)
    with place.mount() as mount:
        for _ in range(2):
            assert sorted(os.listdir(mount.path)) == names
        assert sorted(Directory(mount.path).rest()) == [".", "..", *names]


def test_listing_ends_while_the_directory_changes(place):
    stay, go = names_of(MANY), names_of(800, "goes")
    fill(place.source, stay + go)

    def listed():
        directory = Directory(mount.path)
        found = [directory.next() for _ in range(300)]
        for turn in range(60):  # names come as fast as they are listed, and older ones go
            found += [name for _ in range(100) if (name := directory.next())]
            fill(place.source, names_of(100, f"comes-{turn}"))
            for name in go[turn * 10 : turn * 10 + 10]:
                (place.source / name).unlink()
        return found + directory.rest()

    with place.mount() as mount:
        found = in_child(listed, limit_s=60)
    assert len(found) == len(set(found))
    assert set(stay) <= set(found)


def test_offsets_are_stable(place):
    fill(place.source, names_of(MANY))
    with place.mount() as mount:
        directory = Directory(mount.path)
        places = []
        while True:
            at = directory.tell()
            name = directory.next()
            if name is None:
                break
            places.append((at, name))
        order = [name for _, name in places]
        assert len({at for at, _ in places}) == len(places)
        for index in (0, 1, 2, 700, 3000, 5, MANY + 1, 1500):
            directory.seek(places[index][0])
            assert [directory.next() for _ in range(3)] == (order[index : index + 3] + [None] * 3)[:3]
        directory.seek(places[2000][0])
        assert directory.rest() == order[2000:]
        directory.close()


def test_large_listing_is_streamed(place):
    names = names_of(MANY)
    fill(place.source, names)
    with place.direct() as mount:
        mount.source.hold(["next_batch"], after=1)

        def first():
            directory = Directory(mount.path)
            return [directory.next() for _ in range(200)]

        assert len(set(in_child(first))) == 200  # the source has not sent more than its first batch
        with Child(lambda: sorted(os.listdir(mount.path))) as child:
            mount.source.wait_held()
            assert not child.gone
            mount.source.release()
            assert child.result() == names


@pytest.mark.parametrize("how", ["ls -l", "names, then stat"])
def test_listing_with_attributes_asks_nothing_per_entry(place, how):
    names = names_of(MANY)
    fill(place.source, names)
    with place.direct("fs.attribute_timeout=60s") as mount:
        if how == "ls -l":
            listing = subprocess.run(["ls", "-l", mount.path], capture_output=True, text=True, check=True, timeout=60)
            assert len(listing.stdout.splitlines()) == MANY + 1
        else:
            program = "import os, sys; [os.stat(os.path.join(sys.argv[1], name)) for name in os.listdir(sys.argv[1])]"
            subprocess.run([sys.executable, "-c", program, mount.path], check=True, timeout=60)
        asked = [each for each in mount.source.requests() if each.path != "/" or each.act != "next_batch"]
        assert len(asked) < 20, asked[:40]


def test_rewind_lists_anew(place):
    fill(place.source, names_of(1500))
    with place.mount() as mount:
        directory = Directory(mount.path)
        assert len(directory.rest()) == 1502
        fill(place.source, ["new"])
        (place.source / "name-00007").unlink()
        directory.rewind()
        again = directory.rest()
        assert sorted(again) == sorted([".", "..", "new", *names_of(1500)][: 3 + 7] + names_of(1500)[8:])
        directory.rewind()  # in the middle, too
        directory.next()
        fill(place.source, ["newer"])
        directory.rewind()
        assert "newer" in directory.rest()
        directory.close()


def test_empty_directory_lists_empty(place):
    (place.source / "empty").mkdir()
    with place.mount() as mount:
        assert os.listdir(mount.path / "empty") == []
        assert Directory(mount.path / "empty").rest() == [".", ".."]
        assert os.listdir(mount.path) == ["empty"]
