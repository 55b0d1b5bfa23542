"""Runs checks, each with a time limit and none able to stop the others."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from vlm_server.cli.doctor.finding import Finding, problem
from vlm_server.cli.doctor.situation import Situation

Findings = Sequence[Finding]
T = TypeVar("T")


@dataclass(frozen=True)
class Check:
    """A function that looks at one thing, and the seconds that it may take."""

    name: str
    look: Callable[[Situation], Findings]
    seconds: float = 20.0


def run(checks: Sequence[Check], situation: Situation) -> Iterator[Finding]:
    """What they find, one check after another. Never raises for what they meet."""
    for check in checks:
        yield from _run(check, situation)


def within(seconds: float, function: Callable[[], T]) -> T | None:
    """What `function` returns; None if it takes longer.

    One that hangs, such as on a network disk, is left behind in its thread.
    """
    returned: list[T] = []
    thread = threading.Thread(target=lambda: returned.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    return returned[0] if returned else None


def _run(check: Check, situation: Situation) -> Findings:
    found = within(check.seconds, lambda: _guarded(check, situation))
    if found is not None:
        return found
    return [
        problem(
            check.name,
            f"no result within {check.seconds:.0f} s",
            "something that it asks does not answer: a disk, the daemon, or a system service",
        )
    ]


def _guarded(check: Check, situation: Situation) -> Findings:
    try:
        return check.look(situation)
    except Exception as error:  # noqa: BLE001  what is broken must not hide the rest
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return [problem(check.name, f"could not be checked: {text}", "please report this")]


def output_of(
    words: Sequence[str], seconds: float = 10.0, environment: Mapping[str, str] | None = None
) -> str | None:
    """What a program printed; None if it is missing, fails, or takes longer."""
    try:
        done = subprocess.run(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
