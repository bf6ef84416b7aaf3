"""The main job of TurboFS, told step by step: what a training job wrote is mounted, read, merged and verified.

    helpers/demo [SOURCE] [--keep] [--web HOST:PORT]

SOURCE is a directory on a source that TurboFS can mount; the demo works in a new directory under it and deletes that
again. Default: a temporary local directory. The mount is given to programs that know nothing of TurboFS: a directory
listing, a video decoder, `helpers/merge_checkpoint.py`, setfattr.

The part of the training job, which writes, goes to the source directly: the mount reads, for now.
Exit codes: 0 all of it worked, 1 a step failed (nothing stays mounted), 2 wrong use.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import demo_clips

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "tests" / "data" / "dcp-tiny"
TURBOFS = Path(sys.executable).with_name("turbofs")
STEP = "checkpoints/step_1000"
CLIPS = 3
HINTED_CLIP = CLIPS
"""One more, which nobody reads before the hint asks for it."""
UPLOADS = 8
"""Files written at a time: completing a small file on HDFS waits for its replicas, mostly."""
CACHED_TIMEOUT_S = 30.0


class DemoError(Exception):
    """A step did not do what it should; the message says what it did."""


@dataclass
class Story:
    """Prints one line a step, with its time."""

    number: int = 0
    step: str = ""
    mountpoint: Path | None = None

    @contextlib.contextmanager
    def tell(self, step: str) -> Iterator[list[str]]:
        """Time the step in the body; what it appends to the list is printed under its line."""
        self.number += 1
        self.step = step
        details: list[str] = []
        started = time.monotonic()
        yield details
        print(f"{self.number:2}. {step:<72} {time.monotonic() - started:6.2f} s", flush=True)
        for line in details:
            print(f"      {line}", flush=True)


def run(*command: str | Path, timeout_s: float = 120) -> str:
    """What *command* printed. Raises DemoError with its own words where it fails."""
    try:
        done = subprocess.run(
            [str(part) for part in command], check=False, capture_output=True, text=True, timeout=timeout_s
        )
    except FileNotFoundError:
        raise DemoError(f"there is no {command[0]}: run helpers/setup demo") from None
    except subprocess.TimeoutExpired:
        raise DemoError(f"`{' '.join(map(str, command))}` did not end within {timeout_s:.0f} s") from None
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise DemoError(f"`{' '.join(map(str, command))}` ended with {done.returncode}:\n{words}")
    return done.stdout


# --- the training job's part: files on the source


def write_training_output(folder: Path) -> str:
    """A checkpoint and clips, as files under *folder*; returns the clips' codec."""
    shutil.copytree(CHECKPOINT, folder / STEP)
    (folder / STEP / "expected-tensors.json").unlink()  # the verdict must not come from the tree that is tested
    (folder / "clips").mkdir()
    return [demo_clips.encode(clip_path(folder, clip), clip) for clip in range(CLIPS + 1)][-1]


def clip_path(folder: Path, clip: int) -> Path:
    return folder / "clips" / f"clip_{clip:03}.mp4"


def fill_hdfs(url: str, tree: Path, stack: contextlib.ExitStack) -> None:
    """Copy *tree* to the new HDFS directory *url*, by HDFS's own client; *stack* deletes it."""
    import hdfs_native

    parts = urlsplit(url)
    client = hdfs_native.Client(f"{parts.scheme}://{parts.netloc}")
    base = unquote(parts.path)

    def put(file: Path) -> None:
        target = f"{base}/{file.relative_to(tree)}"
        with client.create(target, hdfs_native.WriteOptions(overwrite=False)) as writer:
            writer.write(file.read_bytes())

    files = [path for path in tree.rglob("*") if path.is_file()]
    try:
        client.mkdirs(base, create_parent=True)
        stack.callback(client.delete, base, recursive=True)
        for folder in {file.parent for file in files}:
            client.mkdirs(f"{base}/{folder.relative_to(tree)}", create_parent=True)
        with ThreadPoolExecutor(UPLOADS) as pool:
            list(pool.map(put, files))
    except Exception as error:
        raise DemoError(f"HDFS at {parts.netloc} did not take the files: {error}") from error


def fill_local(path: Path, tree: Path, stack: contextlib.ExitStack) -> None:
    stack.callback(shutil.rmtree, path, ignore_errors=True)
    try:
        shutil.copytree(tree, path)
    except OSError as error:
        raise DemoError(f"{path} cannot be written: {error}") from error


# --- the reader's part: an ordinary directory


def unmount(mountpoint: Path) -> None:
    """Raises DemoError where `turbofs umount` does; even then the directory is free, or the kernel forbids it."""
    if not os.path.ismount(mountpoint):
        return
    try:
        run(TURBOFS, "umount", mountpoint)
    finally:
        if os.path.ismount(mountpoint):
            run("fusermount3", "-u", "-z", mountpoint)


def put_away(work: Path, mountpoint: Path) -> None:
    if not os.path.ismount(mountpoint):  # deleting through a mount would delete on the source
        shutil.rmtree(work, ignore_errors=True)


def compare_names(tree: Path, mountpoint: Path) -> tuple[int, int]:
    """How many files the mount shows, and their bytes. Raises DemoError where it is not exactly the tree."""
    expected = {str(path.relative_to(tree)): path.stat().st_size for path in tree.rglob("*") if path.is_file()}
    found = {
        str(Path(folder, name).relative_to(mountpoint)): Path(folder, name).stat().st_size
        for folder, _, names in os.walk(mountpoint)
        for name in names
    }
    if found != expected:
        raise DemoError(f"the mount shows {found}\nand the source holds {expected}")
    return len(found), sum(found.values())


def decode(mountpoint: Path, clip: int) -> None:
    matching = demo_clips.frames_that_match(clip_path(mountpoint, clip), clip)
    if matching != demo_clips.FRAMES:
        raise DemoError(f"clip {clip}: only {matching} of {demo_clips.FRAMES} frames are as they were drawn")


def merge(mountpoint: Path, out: Path) -> dict[str, object]:
    program = ROOT / "helpers" / "merge_checkpoint.py"
    expected = CHECKPOINT / "expected-tensors.json"
    output = run(sys.executable, program, mountpoint / STEP, out, "--only", "*", "--verify", expected, "--json")
    summary: dict[str, object] = json.loads(output)
    count = len(json.loads(expected.read_text()))
    if summary["verified"] != count:
        raise DemoError(f"{summary['verified']} tensors were verified, the checkpoint has {count}")
    return summary


def hint_prefetch(mountpoint: Path, path: str) -> str:
    """Ask for *path* as a whole, and wait until the mount's own account of it says that it is there."""
    handle = mountpoint / ".turbofs" / "hints" / path
    run("setfattr", "-n", "user.turbofs.prefetch", "-v", "all", handle)
    size = (mountpoint / path).stat().st_size
    deadline = time.monotonic() + CACHED_TIMEOUT_S
    while True:
        status = json.loads(os.getxattr(mountpoint / path, "user.turbofs.status"))
        cached = sum(stop - start for start, stop in status.get("cached_ranges", []))
        if cached == size:
            return f"{cached:,} of {size:,} bytes of {path} are in memory now, before anyone has read them"
        if time.monotonic() > deadline:
            raise DemoError(f"after {CACHED_TIMEOUT_S:.0f} s, {path} is still not cached: {status}")
        time.sleep(0.02)


def account(mountpoint: Path) -> list[str]:
    """The few lines of `turbofs status DIR` that matter here."""
    status = json.loads(run(TURBOFS, "status", mountpoint, "--json"))
    cache, source = status["cache"], status["source"]
    return [
        f"{source['uri']}, versions {'strong' if 'strong-versions' in source['capabilities'] else 'weak'}",
        f"{cache['used_bytes']:,} bytes in memory, in {cache['extents']} extents; the limit is {cache['limit_bytes']:,}",
        f"{status['hints']['entries']} hint kept",
        *status.get("notes", []),
    ]


def advice(source: str, mountpoint: Path) -> str:
    return f"""
It stays mounted. What to try next:
  ls -lR {mountpoint}
  cp {mountpoint}/clips/clip_000.mp4 .
  setfattr -n user.turbofs.prefetch -v all {mountpoint}/.turbofs/hints/{STEP}/__0_0.distcp
  getfattr -n user.turbofs.status {mountpoint}/{STEP}/__0_0.distcp
  cat {mountpoint}/.turbofs/stats
  {TURBOFS} status {mountpoint}
and when you have seen enough:
  {TURBOFS} umount {mountpoint}
The files are at {source}; delete them when you no longer want them.
"""


NEXT = """
What to try next:
  helpers/demo --keep                       the same, left mounted for you to look around
  helpers/demo hdfs://NAMENODE:PORT/DIR     the same on your HDFS
  .venv/bin/turbofs mount hdfs://NAMENODE:PORT/ MOUNTPOINT
  .venv/bin/turbofs doctor                  what commonly goes wrong, looked for
"""


def play(options: argparse.Namespace, story: Story, stack: contextlib.ExitStack) -> None:
    work = Path(tempfile.mkdtemp(prefix="turbofs-demo-"))
    tree, mountpoint, out = work / "tree", work / "mnt", work / "merged"
    story.mountpoint = mountpoint
    stack.callback(put_away, work, mountpoint)
    mountpoint.mkdir()
    source = f"{options.source.rstrip('/')}/turbofs-demo-{uuid.uuid4().hex[:8]}" if options.source else f"file://{tree}"

    with story.tell("A training job leaves a checkpoint of four ranks, and a few clips"):
        codec = write_training_output(tree)
        if source.startswith("hdfs:"):
            fill_hdfs(source, tree, stack)
        elif options.source:
            fill_local(Path(unquote(urlsplit(source).path)), tree, stack)

    mount_options = ["-o", f"log_dir={work}/log,fs.state_dir={work}/state"]
    if options.web:
        mount_options += ["-o", f"source.web_address={options.web}"]
    with story.tell(f"turbofs mount {source if options.source else 'file://…'} DIR") as details:
        stack.callback(unmount, mountpoint)
        run(TURBOFS, "mount", source, mountpoint, *mount_options)
        details.append(f"DIR is {mountpoint}")

    with story.tell("It is an ordinary directory: names and sizes as on the source") as details:
        count, size = compare_names(tree, mountpoint)
        details.append(f"{count} files, {size:,} bytes")

    with story.tell("A video decoder reads clips through it") as details:
        for clip in range(CLIPS):
            decode(mountpoint, clip)
        details.append(f"{CLIPS} clips ({codec}), {CLIPS * demo_clips.FRAMES} frames, each as it was drawn")

    with story.tell("An evaluation merges the checkpoint into one safetensors file") as details:
        summary = merge(mountpoint, out)
        details.append(
            f"{summary['items_read']} stored items, {summary['bytes_read']:,} bytes; "
            f"verified {summary['verified']} tensors by BLAKE3"
        )

    with story.tell("A hint, by setfattr: this clip will be wanted, fetch it now") as details:
        path = str(clip_path(mountpoint, HINTED_CLIP).relative_to(mountpoint))
        details.append(hint_prefetch(mountpoint, path))
        decode(mountpoint, HINTED_CLIP)

    with story.tell("turbofs status DIR, in short") as details:
        details.extend(account(mountpoint))

    if options.keep:
        stack.pop_all()  # forgotten, not run: these are plain calls
        print(advice(source, mountpoint))
        return
    with story.tell("turbofs umount DIR, and everything is put away"):
        stack.close()
        if mountpoint.exists():
            raise DemoError(f"{mountpoint} is still there")
    print(NEXT)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="helpers/demo", description="Mount, read, merge and verify a checkpoint.")
    parser.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="hdfs://HOST:PORT/DIR or file:///DIR; default: a temporary directory",
    )
    parser.add_argument("--keep", action="store_true", help="leave it mounted")
    parser.add_argument(
        "--web", metavar="HOST:PORT", help="the NameNode's HTTP server, where HADOOP_CONF_DIR does not tell"
    )
    options = parser.parse_args(arguments)
    if options.source and not options.source.startswith(("hdfs://", "file:///")):
        parser.error("SOURCE must be hdfs://HOST:PORT/DIR or file:///DIR")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a killed demo unmounts, too
    story = Story()
    started = time.monotonic()
    print("TurboFS: what a training job wrote, read through a mount by programs that know nothing of it.\n")
    try:
        with contextlib.ExitStack() as stack:
            play(options, story, stack)
    except DemoError as error:
        print(f"\nStep {story.number} failed ({story.step}): {error}", file=sys.stderr)
        print(
            "Nothing is left mounted. `.venv/bin/turbofs doctor` looks for what commonly goes wrong.", file=sys.stderr
        )
        return 1
    print(f"All of it worked, in {time.monotonic() - started:.1f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
