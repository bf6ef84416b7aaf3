"""Is the source there, for this identity, with the right time? Through the Source, as the mount would ask it."""

from __future__ import annotations

import email.utils
import time
from collections.abc import AsyncIterator, Mapping

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

    *description* is the source's; without a web address in it there is nothing to check.
    """
    address = description.get("web_address")
    if "web_address" not in description:
        return []
    reason = description.get("web_error")
    if not isinstance(address, str) or reason:
        return [_no_web(str(reason or "no address of it is known"))]
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


async def versions(source: Source, description: Mapping[str, object]) -> CheckResult:
    """Whether the source proves that a file is still the same one."""
    name = "versions"
    with trio.move_on_after(_ATTEMPT_S):
        async for path, attributes in _sample(source):
            if attributes.kind is FileKind.FILE:
                try:
                    strong = (await source.stat_exact(path)).version.strong
                except TurboError as error:
                    return warn(name, f"{path}: {error}", error.advice)
                if strong:
                    return ok(name, "strong: caches are kept between opens")
                why = description.get("weak_versions", "the source tells no file ids")
                return warn(name, f"weak ({why}): caches are dropped at each open", "make the HTTP port reachable")
        return ok(name, "no file near the root to try")
    return warn(name, f"no answer within {_ATTEMPT_S:g} s", "the source is slow; try again")


async def readable(source: Source) -> CheckResult:
    """A sample of the files near the root can be opened by the identity that the mount has on the source."""
    name = "readable files"
    seen = opened = 0
    private: list[str] = []
    refused: list[str] = []
    with trio.move_on_after(2 * _ATTEMPT_S):
        try:
            async for path, attributes in _sample(source):
                if attributes.kind is not FileKind.FILE:
                    continue
                seen += 1
                if not attributes.mode & 0o044:
                    private.append(path)
                if opened < _SAMPLE_OPENED:
                    opened += 1
                    error = await _open_error(source, path)
                    if error is not None:
                        refused.append(error)
        except TurboError as error:
            return fail(name, f"the root cannot be listed: {error}", error.advice)
    if refused:
        advice = "give the identity that TurboFS uses read permission, or choose another with [source] user"
        return fail(name, f"{len(refused)} of {opened} cannot be opened: {'; '.join(refused[:3])}", advice)
    if private:
        advice = "`hdfs dfs -chmod -R a+rX DIR`, or a umask of 022 where they are written"
        shown = ", ".join(private[:3])
        return warn(name, f"{len(private)} of {seen} are for their owner alone, such as {shown}", advice)
    return ok(name, f"{seen} seen, {opened} opened")


async def _open_error(source: Source, path: str) -> str | None:
    try:
        file = await source.open(path)
    except TurboError as error:
        return str(error)
    await file.aclose()
    return None


async def _sample(source: Source) -> AsyncIterator[tuple[str, Attributes]]:
    """Names near the root, breadth first, so many and no more. Directories that cannot be listed are passed over."""
    pending, listed, seen = [ROOT], 0, 0
    while pending and listed < _SAMPLE_DIRECTORIES:
        directory = pending.pop(0)
        listed += 1
        try:
            async with await source.list(directory) as listing:
                while entries := await listing.next_batch():
                    for entry in entries:
                        path = join(directory, entry.name)
                        if entry.attributes.kind is FileKind.DIRECTORY:
                            pending.append(path)
                        yield path, entry.attributes
                        seen += 1
                        if seen >= _SAMPLE_NAMES:
                            return
        except TurboError:
            if directory == ROOT:
                raise


def _no_web(reason: str) -> CheckResult:
    return fail(
        "web",
        f"the NameNode's HTTP server cannot be used ({reason}): versions are weak, unfinished blocks are not readable",
        "open its port (9870), or name it with [source] web_address",
    )
