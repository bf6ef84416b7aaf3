"""Is the source there, for this identity, with the right time? Through the Source, as the mount would ask it."""

from __future__ import annotations

import email.utils
import time
from collections import deque
from collections.abc import Mapping, Sequence

import httpx
import trio

from turbofs.cli.checks.result import CheckResult, fail, ok, warn
from turbofs.errors import TurboError
from turbofs.model import ROOT, Attributes, FileKind, join
from turbofs.source.base import Source

_ATTEMPT_S = 10.0
_SAMPLE_DIRECTORIES, _SAMPLE_NAMES, _SAMPLE_OPENED = 32, 2000, 16
_SKEW_WARN_S = 30.0  # modification times that lie in the future confuse build tools and resuming trainers


async def reachable(source: Source) -> CheckResult:
    """The source answers, and its root is a directory."""
    name = "source"
    started = trio.current_time()
    with trio.move_on_after(_ATTEMPT_S):
        try:
            await source.connect()
        except TurboError as error:
            return fail(name, str(error), error.advice)
        return ok(name, f"{source.uri} answers in {(trio.current_time() - started) * 1e3:.0f} ms")
    return fail(name, f"{source.uri} does not answer within {_ATTEMPT_S:g} s", "check the service and the network")


async def web(description: Mapping[str, object]) -> list[CheckResult]:
    """The NameNode's HTTP server, which versions and files being written need, and its clock against ours.

    *description* is the source's; without `web` in it (the server's address) there is nothing to check.
    """
    if "web" not in description:
        return []
    address = description["web"]
    if not isinstance(address, str):
        return [_no_web("no address of it is known")]
    url = address if "://" in address else f"http://{address}"
    try:
        async with httpx.AsyncClient(timeout=_ATTEMPT_S, trust_env=False) as client:
            sent = time.time()
            answer = await client.get(url, follow_redirects=False)
            midway = (sent + time.time()) / 2
    except httpx.HTTPError as error:
        return [_no_web(f"{url}: {error or type(error).__name__}")]
    return [ok("web", f"{url} answers"), clock(answer.headers.get("date"), midway)]


def clock(date: str | None, now: float) -> CheckResult:
    """The clock of the server that sent *date* (an HTTP header, whole seconds) against *now*."""
    name = "clock"
    try:
        theirs = email.utils.parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return warn(name, "the server sent no date", "compare the clocks by hand: `date`")
    skew_s = theirs + 0.5 - now
    if abs(skew_s) > _SKEW_WARN_S:
        ahead = "ahead of" if skew_s > 0 else "behind"
        return warn(name, f"the NameNode's clock is {abs(skew_s):.0f} s {ahead} ours", "run an NTP client on both")
    return ok(name, f"within {max(1.0, abs(skew_s)):.0f} s of the NameNode's")


async def files(source: Source) -> list[CheckResult]:
    """A sample of the files near the root: can the mount's identity open them, and are their versions proofs?"""
    try:
        with trio.fail_after(2 * _ATTEMPT_S):
            sample = [(path, found) for path, found in await _sample(source) if found.kind is FileKind.FILE]
            return [await readable(source, sample), await versions(source, sample)]
    except trio.TooSlowError:
        return [warn("files", f"no answer within {2 * _ATTEMPT_S:g} s", "the source is slow; try again")]
    except TurboError as error:
        return [fail("files", str(error), error.advice)]


async def versions(source: Source, sample: Sequence[tuple[str, Attributes]]) -> CheckResult:
    """Whether the source proves that a file is still the same one."""
    name = "versions"
    if not sample:
        return ok(name, "no file near the root to try")
    if (await source.stat_exact(sample[0][0])).version.strong:
        return ok(name, "strong: caches are kept between opens")
    why = source.describe().get("versions", "the source tells no file ids")
    return warn(name, f"{why}: caches are dropped at each open", "make the NameNode's HTTP port reachable")


async def readable(source: Source, sample: Sequence[tuple[str, Attributes]]) -> CheckResult:
    """Whether the identity that the mount has on the source may open the files, and others on the mount read them."""
    name = "readable files"
    opened = sample[:_SAMPLE_OPENED]
    refused = [error for path, _ in opened if (error := await _open_error(source, path)) is not None]
    private = [path for path, attributes in sample if not attributes.mode & 0o044]
    if refused:
        advice = "give the identity that TurboFS uses read permission, or choose another with [source] user"
        return fail(name, f"{len(refused)} of {len(opened)} cannot be opened: {'; '.join(refused[:3])}", advice)
    if private:
        advice = "`hdfs dfs -chmod -R a+rX DIR`, or a umask of 022 where they are written"
        shown = ", ".join(private[:3])
        return warn(name, f"{len(private)} of {len(sample)} are for their owner alone, such as {shown}", advice)
    return ok(name, f"{len(sample)} seen, {len(opened)} opened")


async def _open_error(source: Source, path: str) -> str | None:
    try:
        file = await source.open(path)
    except TurboError as error:
        return str(error)
    await file.aclose()
    return None


async def _sample(source: Source) -> list[tuple[str, Attributes]]:
    """Names near the root, breadth first, so many and no more. Directories that cannot be listed are passed over."""
    pending, found, listed = deque([ROOT]), list[tuple[str, Attributes]](), 0
    while pending and listed < _SAMPLE_DIRECTORIES and len(found) < _SAMPLE_NAMES:
        directory = pending.popleft()
        listed += 1
        try:
            async with await source.list(directory) as listing:
                while len(found) < _SAMPLE_NAMES and (entries := await listing.next_batch()):
                    found += [(join(directory, entry.name), entry.attributes) for entry in entries]
                    pending += [
                        join(directory, entry.name) for entry in entries if entry.attributes.kind is FileKind.DIRECTORY
                    ]
        except TurboError:
            if directory == ROOT:
                raise
    return found[:_SAMPLE_NAMES]


def _no_web(reason: str) -> CheckResult:
    return fail(
        "web",
        f"the NameNode's HTTP server cannot be used ({reason}): versions are weak, unfinished blocks are not readable",
        "open its port (9870), or name it with [source] web_address",
    )
