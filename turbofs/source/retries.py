"""When an act is repeated, and for how long: the policy of the retrying source, without any source."""

from __future__ import annotations

import errno
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog
import trio

from turbofs.config import SourceConfig
from turbofs.errors import DeadlineExceededError, SourceUnavailableError, TurboError
from turbofs.metrics import Metrics

T = TypeVar("T")
OnRetry = Callable[[TurboError, float], None]
"""Told before each pause: the error of the last attempt, and how many seconds are left."""

SLOWEST_BYTES_PER_S = 1 << 20
"""An attempt that carries data gets time for it on top: below 1 MiB/s per stream another attempt is worth trying."""

_log = structlog.get_logger(__name__)


class Retrier:
    """Repeats transient failures with exponential back-off and full jitter, until one deadline for all attempts.

    Full jitter (a pause anywhere between nothing and the limit) keeps hundreds of mounts from coming back together to
    a NameNode that has just restarted.
    """

    def __init__(
        self,
        config: SourceConfig,
        uri: str,
        *,
        chance: random.Random | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._config = config
        self._uri = uri
        self._metrics = metrics
        self._chance = chance or random.Random()  # noqa: S311 - spreads load, guards nothing
        self._away_since: float | None = None
        self.retries = 0
        """Attempts that were not the first of their act."""

    def deadline(self) -> float:
        """When an act that begins now has to be done, on trio's clock."""
        return trio.current_time() + self._config.deadline_s

    async def run(
        self,
        act: str,
        path: str,
        attempt: Callable[[], Awaitable[T]],
        *,
        deadline: float | None = None,
        carries_bytes: int = 0,
        on_retry: OnRetry | None = None,
        at_least_once: bool = False,
    ) -> T:
        """Do *attempt* until it succeeds; it must be safe to repeat.

        Errors that are not transient come out at once. At *deadline* (trio's clock; None: from now on) raises
        DeadlineExceededError, chained to the last attempt's error. *carries_bytes*: how much data one attempt moves.
        *at_least_once*: the first attempt gets its whole time even past the deadline.
        """
        limit = self.deadline() if deadline is None else deadline
        attempt_s = self._config.operation_timeout_s + carries_bytes / SLOWEST_BYTES_PER_S
        number = 0
        while True:
            whole = at_least_once and number == 0
            timeout_s = attempt_s if whole else min(attempt_s, limit - trio.current_time())
            outcome = await self._attempt(act, path, attempt, timeout_s)
            if isinstance(outcome, _Answer):
                self._note_answer()
                return outcome.value
            left_s, pause_s = limit - trio.current_time(), self._pause_s(number)
            if pause_s >= left_s:  # an attempt at the very end would have no time, and its error would say only that
                await trio.sleep(max(0.0, left_s))
                raise DeadlineExceededError(
                    f"cannot {act} {path}: given up after {number + 1} attempts; the last one: {outcome}"
                ) from outcome
            self._note_retry(act, outcome)
            if on_retry is not None:
                on_retry(outcome, left_s)
            await trio.sleep(pause_s)
            number += 1

    async def run_once(
        self,
        act: str,
        path: str,
        attempt: Callable[[], Awaitable[None]],
        took_effect: Callable[[], Awaitable[bool]],
        *,
        deadline: float | None = None,
    ) -> None:
        """As `run`, for an act that must not be done twice.

        An attempt without an answer may have taken effect, and one that timed out still may. So *took_effect* is asked
        before each repetition, and again where a repetition is refused.
        """
        tried = False

        async def checked() -> None:
            nonlocal tried
            again, tried = tried, True
            if again and await took_effect():
                return
            try:
                await attempt()
            except TurboError as error:
                if not again or error.transient or not await took_effect():
                    raise

        await self.run(act, path, checked, deadline=deadline)

    async def _attempt(
        self, act: str, path: str, attempt: Callable[[], Awaitable[T]], timeout_s: float
    ) -> _Answer[T] | TurboError:
        code = errno.ETIMEDOUT
        try:
            with trio.move_on_after(max(0.0, timeout_s)):
                try:
                    answer = _Answer(await attempt())
                except TurboError as error:
                    code = error.errno
                    if not error.transient:
                        raise
                    return error
                code = 0
                return answer
            return SourceUnavailableError(f"no answer to {act} {path} within {timeout_s:.1f} s")
        finally:
            if self._metrics is not None:
                self._metrics.source_act(_label(act), code)

    def _pause_s(self, number: int) -> float:
        longest_s = min(self._config.backoff_limit_s, self._config.backoff_first_s * 2.0 ** min(number, 30))
        return self._chance.uniform(0.0, longest_s)

    def _note_retry(self, act: str, error: TurboError) -> None:
        self.retries += 1
        if self._metrics is not None:
            self._metrics.source_retries.labels(_label(act)).inc()
        if self._away_since is None:  # one line for an outage, not one for each of its readers
            self._away_since = trio.current_time()
            _log.warning("source does not answer; retrying", source=self._uri, error=str(error))

    def _note_answer(self) -> None:
        if self._away_since is not None:
            seconds = round(trio.current_time() - self._away_since, 1)
            self._away_since = None
            _log.info("source answers again", source=self._uri, after_s=seconds)


@dataclass(frozen=True, slots=True)
class _Answer(Generic[T]):
    value: T


def _label(act: str) -> str:
    """The verb alone: an act may name what it is about, and a label must not have as many values as there are files."""
    return act.split(" ", 1)[0]
