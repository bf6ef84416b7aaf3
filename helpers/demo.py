"""The main job of TurboFS, told step by step: a checkpoint is read, merged and verified, then saved and not lost.

    helpers/demo [SOURCE] [--keep] [--web HOST:PORT]

SOURCE is a directory on a source that TurboFS can mount; the demo works in a new directory under it and deletes that
again. Default: a temporary local directory. The mount is given to programs that know nothing of TurboFS: a directory
listing, a video decoder, `helpers/merge_checkpoint.py`, setfattr.

What the mount reads was put on the source without it, and what it writes is looked at there without it, so that neither
half of the mount vouches for the other. Saving is acknowledged early, and the daemon is killed right then.
Exit codes: 0 all of it worked, 1 a step failed (nothing stays mounted), 2 wrong use.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import demo_clips
from demo_source import DemoError, Place, place_of

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "tests" / "data" / "dcp-tiny"
TURBOFS = Path(sys.executable).with_name("turbofs")
TEMPORARY = re.compile(r"\.turbofs-.*\.tmp")
"""What a file is called on the source until it is complete."""
STEP = "checkpoints/step_1000"
CLIPS = 3
HINTED_CLIP = CLIPS
"""One more, which nobody reads before the hint asks for it."""
CACHED_TIMEOUT_S = 30.0
SAVED = "merged"
"""The directory, on the source, into which the merged checkpoint is saved."""
DEATH_TIMEOUT_S = 30.0


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


# --- the reader's part: an ordinary directory


def is_mounted(mountpoint: Path) -> bool:
    """From the kernel's table: a mount whose daemon is dead answers nothing, and is one all the same."""
    points = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines())
    return str(mountpoint) in points  # no name of the demo's own needs an escape there


def unmount(mountpoint: Path) -> None:
    """Raises DemoError where `turbofs umount` does; even then the directory is free, or the kernel forbids it."""
    if not is_mounted(mountpoint):
        return
    try:
        run(TURBOFS, "umount", mountpoint)
    finally:
        if is_mounted(mountpoint):
            run("fusermount3", "-u", "-z", mountpoint)


def put_away(work: Path, mountpoint: Path) -> None:
    if not is_mounted(mountpoint):  # deleting through a mount would delete on the source
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


# --- the writer's part: an ordinary directory, and a daemon that dies at the worst moment


def prepare_saving(mountpoint: Path) -> None:
    (mountpoint / SAVED).mkdir()
    run("setfattr", "-n", "user.turbofs.ack", "-v", "staged", mountpoint / SAVED)


def save_and_kill(merged: Path, mountpoint: Path, daemon: int) -> str:
    """Save the files of *merged* through the mount; the last close is followed by SIGKILL, and by nothing else."""
    contents = {path.name: path.read_bytes() for path in merged.iterdir()}
    started = time.monotonic()
    for name, content in contents.items():
        with (mountpoint / SAVED / name).open("wb") as file:
            file.write(content)
    closed = time.monotonic()
    signal.pidfd_send_signal(daemon, signal.SIGKILL)
    killed = time.monotonic()
    if not select.select([daemon], [], [], DEATH_TIMEOUT_S)[0]:
        raise DemoError(f"the daemon does not die within {DEATH_TIMEOUT_S:.0f} s")
    size = sum(map(len, contents.values()))
    return (
        f"{size:,} bytes written and closed in {1e3 * (closed - started):.1f} ms, "
        f"killed {1e6 * (killed - closed):.0f} µs later"
    )


def complete(content: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in content.items() if not TEMPORARY.fullmatch(name)}


def what_was_there(place: Place, merged: Path) -> str:
    """What the source has of the saving when the daemon has just died. Raises DemoError for half a file."""
    found = complete(place.content(SAVED))
    for name, data in found.items():
        if data != (merged / name).read_bytes():
            raise DemoError(f"the source shows {len(data):,} bytes of {SAVED}/{name}, which is not what was written")
    count = len(list(merged.iterdir()))
    return f"the source had {len(found)} of its {count} files at that moment, the others are in staging alone"


def verify_on_source(place: Place, merged: Path) -> list[str]:
    """One line a file. Raises DemoError unless the source has exactly what was written."""
    from blake3 import blake3

    expected = {path.name: blake3(path.read_bytes()).hexdigest() for path in merged.iterdir()}
    content = complete(place.content(SAVED))
    found = {name: blake3(data).hexdigest() for name, data in content.items()}
    if found != expected:
        raise DemoError(f"what was written is {expected}\nand the source has {found}")
    return [f"{name}: {len(content[name]):,} bytes, BLAKE3 {digest[:16]}…" for name, digest in sorted(found.items())]


def advice(source: str, mountpoint: Path) -> str:
    return f"""
It stays mounted. What to try next:
  ls -lR {mountpoint}
  cp {mountpoint}/clips/clip_000.mp4 .
  setfattr -n user.turbofs.prefetch -v all {mountpoint}/.turbofs/hints/{STEP}/__0_0.distcp
  getfattr -n user.turbofs.status {mountpoint}/{STEP}/__0_0.distcp
  cat {mountpoint}/.turbofs/stats
  {TURBOFS} status {mountpoint}
  cp /etc/hosts {mountpoint}/{SAVED}/ && {TURBOFS} wait {mountpoint}/{SAVED}
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
    place = place_of(source)

    with story.tell("A training job leaves a checkpoint of four ranks, and a few clips"):
        codec = write_training_output(tree)
        if options.source:
            place.fill(tree, stack)

    mount_options = ["--staging-dir", f"{work}/staging", "-o", f"log_dir={work}/log,fs.state_dir={work}/state"]
    if options.web:
        mount_options += ["-o", f"source.web_address={options.web}"]

    def mount() -> int:
        """Returns a descriptor of the daemon, for which no other process can be taken."""
        daemon = os.pidfd_open(json.loads(run(TURBOFS, "mount", source, mountpoint, *mount_options, "--json"))["pid"])
        stack.callback(os.close, daemon)
        return daemon

    with story.tell(f"turbofs mount {source if options.source else 'file://…'} DIR") as details:
        stack.callback(unmount, mountpoint)
        daemon = mount()
        details.append(f"DIR is {mountpoint}")
    read(story, mountpoint, tree, out, codec)
    save(story, mountpoint, out, place, daemon, mount)

    if options.keep:
        stack.pop_all()  # forgotten, not run: these are plain calls
        print(advice(source, mountpoint))
        return
    with story.tell("turbofs umount DIR, and everything is put away"):
        stack.close()
        if work.exists():
            raise DemoError(f"{work} is still there")
    print(NEXT)


def read(story: Story, mountpoint: Path, tree: Path, out: Path, codec: str) -> None:
    """The reading half: names, clips, the checkpoint (merged into *out*), a hint."""
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


def save(
    story: Story, mountpoint: Path, merged: Path, place: Place, daemon: int, mount_again: Callable[[], object]
) -> None:
    """The writing half: *merged* is saved and acknowledged, its daemon dies, and the source has it all the same."""
    with story.tell("A new directory; by setfattr: what is saved in it is acknowledged early"):
        prepare_saving(mountpoint)

    with story.tell("The merged checkpoint is saved into it; at the last close: kill -9") as details:
        details.append(save_and_kill(merged, mountpoint, daemon))
        details.append(what_was_there(place, merged))

    with story.tell("turbofs mount again, on the same DIR"):
        mount_again()

    with story.tell(f"turbofs wait DIR/{SAVED} --until persisted"):
        run(TURBOFS, "wait", mountpoint / SAVED, "--until", "persisted", "--timeout", "60s")

    with story.tell("Every byte is on the source: read there, not through the mount") as details:
        details.extend(verify_on_source(place, merged))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="helpers/demo",
        description="Mount, read, merge and verify a checkpoint; save it, kill the daemon, and verify it again.",
    )
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
    print("TurboFS: a checkpoint read, merged and saved through a mount by programs that know nothing of it.\n")
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
