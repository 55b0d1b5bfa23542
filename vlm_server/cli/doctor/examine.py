"""The doctor's run: all checks in order, and their findings printed."""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Sequence

import msgspec

from vlm_server.cli import exit_codes
from vlm_server.cli.doctor import daemon, device, machine, self_test, settings, situation
from vlm_server.cli.doctor.findings import Check, Finding, within
from vlm_server.platform.terminal import GREEN, RED, YELLOW, columns_of, hanging, styled

_READ_SECONDS = 10.0
"""Time limit for reading the settings, and files named in them."""
_MARKS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}
_STYLES = {"ok": GREEN, "warning": YELLOW, "problem": RED}
CHECKS = (
    Check("machine", machine.look_at_machine),
    Check("device", device.look_at_device, device.EXAMINATION_SECONDS + 60),
    Check("settings", settings.settings, _READ_SECONDS),
    Check("model", settings.model, 150.0),
    Check("permissions", settings.look_at_permissions, _READ_SECONDS),
    Check("disk", machine.look_at_disks),
    Check("port", lambda seen: daemon.port(seen.settings.server)),
    Check("service", lambda seen: daemon.service(seen.service), 40.0),
    Check("daemon", daemon.look_at_daemon, 30.0),
)
"""The checks but for the self-test, in an order in which one depends on those before."""


def examine(arguments: argparse.Namespace) -> int:
    """Print the findings as they come; returns the exit code."""
    logging.disable(logging.CRITICAL)  # warnings of modules are findings here
    examined_situation = within(_READ_SECONDS, lambda: situation.examine(arguments))
    if examined_situation is None:
        examined_situation = situation.unread(
            arguments, f"they can't be read within {_READ_SECONDS:.0f} s"
        )
    findings: list[Finding] = []
    for check in checks(arguments, examined_situation):
        new_findings = check.run(examined_situation)
        findings += new_findings
        for finding in new_findings if not arguments.json else ():
            print_finding(finding)
    if arguments.json:
        print(msgspec.json.encode(findings).decode())
    else:
        print(f"\n{summary(findings)}")
    return exit_codes.FAILURE if any(finding.level == "problem" for finding in findings) else 0


def checks(arguments: argparse.Namespace, examined_situation: situation.Situation) -> list[Check]:
    """Checks that `arguments` ask for."""
    if arguments.no_self_test:
        return list(CHECKS)
    seconds = examined_situation.settings.engine.start_timeout_seconds + self_test.ANSWER_SECONDS
    ask = self_test.ask_embedded if arguments.embedded else self_test.ask_running
    return [*CHECKS, Check(self_test.CHECK, ask, seconds)]


def print_finding(finding: Finding) -> None:
    """Print a line, and one with advice."""
    columns, mark = columns_of(sys.stdout), _MARKS[finding.level]
    line = hanging(f"{mark}  ", f"{finding.check}: {finding.text}", columns)
    print(styled(mark, _STYLES[finding.level], sys.stdout) + line.removeprefix(mark), flush=True)
    if finding.advice:
        print(hanging("         → ", finding.advice, columns), flush=True)


def summary(findings: Sequence[Finding]) -> str:
    """The number of problems and warnings, in one line."""
    counts = Counter(finding.level for finding in findings if finding.level != "ok")
    words = [f"{n} {level}{'s' * (n != 1)}" for level, n in sorted(counts.items())]
    return " and ".join(words) + "." if words else "Everything is well."
