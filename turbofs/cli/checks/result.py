"""One answer of the doctor."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(enum.StrEnum):
    OK = "ok"
    WARN = "warn"
    """Works, but slower or less safely than it could."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found, and what to do about it (empty where nothing is to be done)."""

    name: str
    verdict: Verdict
    message: str
    advice: str = ""


def ok(name: str, message: str) -> CheckResult:
    return CheckResult(name, Verdict.OK, message)


def warn(name: str, message: str, advice: str) -> CheckResult:
    return CheckResult(name, Verdict.WARN, message, advice)


def fail(name: str, message: str, advice: str) -> CheckResult:
    return CheckResult(name, Verdict.FAIL, message, advice)
