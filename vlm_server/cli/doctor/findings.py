"""Findings of the doctor's checks. A check has a time limit and can't stop the others."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from vlm_server.cli.doctor.situation import Situation

Level = Literal["ok", "warning", "problem"]


T = TypeVar("T")


class Finding(msgspec.Struct, frozen=True):
    """The result of a check: `text`, and `advice` unless all is well, one line each.

    A `problem` keeps the daemon from working as the settings say; a `warning` does not.
    """

    check: str
    level: Level
    text: str
    advice: str = ""


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def warning(check: str, text: str, advice: str) -> Finding:
    return Finding(check, "warning", text, advice)


def problem(check: str, text: str, advice: str) -> Finding:
    return Finding(check, "problem", text, advice)


@dataclass(frozen=True)
class Check:
    """A check: a function that examines one thing, and its time limit in seconds."""

    name: str
    examine: Callable[[Situation], Finding | Sequence[Finding]]
    seconds: float = 20.0

    def run(self, situation: Situation) -> Sequence[Finding]:
        """The findings of the check; a problem if it fails or takes too long."""

        def examine() -> Finding | Sequence[Finding]:
            try:
                return self.examine(situation)
            except Exception as error:  # noqa: BLE001  what is broken must not hide the rest
                text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                return problem(self.name, f"could not be checked: {text}", "please report this")

        findings = within(self.seconds, examine)
        if findings is None:
            advice = "something that it asks does not answer: a disk, the daemon, a system service"
            findings = problem(self.name, f"no result within {self.seconds:.0f} s", advice)
        return [findings] if isinstance(findings, Finding) else findings


def within(seconds: float, function: Callable[[], T]) -> T | None:
    """The result of `function`; None after `seconds`, while its thread keeps running."""
    returned: list[T] = []
    thread = threading.Thread(target=lambda: returned.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    return returned[0] if returned else None


def output_of(words: Sequence[str], seconds: float = 10.0) -> str | None:
    """The output of a program; None if it is missing, fails, or takes longer."""
    try:
        process = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.decode(errors="replace") if process.returncode == 0 else None
