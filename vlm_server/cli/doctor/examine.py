"""Runs all checks, prints what they find, and writes the report."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from vlm_server.cli import exit_codes
from vlm_server.cli.doctor import report, situation
from vlm_server.cli.doctor.checks import (
    config,
    daemon,
    device,
    disk,
    machine,
    permissions,
    port,
    self_test,
    service,
)
from vlm_server.cli.doctor.finding import Finding
from vlm_server.cli.doctor.runner import Check, run, within
from vlm_server.cli.failure import CommandFailed

READ_SECONDS = 10.0
"""For the settings, and for what they name."""
_REPORT_SECONDS = 60.0
_MARKS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}


def examine(arguments: argparse.Namespace) -> int:
    """Print the findings as they come. Raises CommandFailed if the report can't be written."""
    logging.disable(logging.CRITICAL)  # what modules would warn of is a finding here
    seen = within(READ_SECONDS, lambda: situation.examine(arguments))
    if seen is None:
        seen = situation.unread(arguments, f"they can't be read within {READ_SECONDS:.0f} s")
    findings = []
    for finding in run(checks(arguments, seen), seen):
        findings.append(finding)
        if not arguments.json:
            print_finding(finding)
    if arguments.json:
        print(msgspec.json.encode(findings).decode())
    else:
        print(f"\n{summary(findings)}")
    if arguments.report is not None:
        report.write(arguments.report, contents(findings, seen, arguments.log))
        print(f"Wrote {arguments.report}. Read it before you send it.", file=sys.stderr)
    return exit_codes.FAILURE if any(each.level == "problem" for each in findings) else 0


def contents(
    findings: Sequence[Finding], seen: situation.Situation, log: Path | None
) -> dict[str, Any]:
    """Of the report. Raises CommandFailed if something that it reads does not answer."""
    found = within(_REPORT_SECONDS, lambda: report.contents(findings, seen, log))
    if found is None:
        raise CommandFailed("no report: the log, the daemon or a disk does not answer")
    return found


def checks(arguments: argparse.Namespace, seen: situation.Situation) -> list[Check]:
    """All checks, in the order in which one thing depends on another."""
    start_seconds = seen.settings.engine.start_timeout_seconds
    chosen = [
        Check("machine", machine.look),
        Check("device", device.look, device.PROBE_SECONDS + 60),
        Check("settings", config.look, READ_SECONDS),
        Check("model", config.look_at_model, 150.0),
        Check("permissions", permissions.look, READ_SECONDS),
        Check("disk", disk.look),
        Check("port", port.look),
        Check("service", service.look, 40.0),
        Check("daemon", daemon.look, 30.0),
    ]
    if arguments.no_self_test:
        return chosen
    ask = self_test.look_embedded if arguments.embedded else self_test.look
    return [*chosen, Check(self_test.CHECK, ask, start_seconds + self_test.ANSWER_SECONDS)]


def print_finding(finding: Finding) -> None:
    """One line, and one for what to do."""
    print(f"{_MARKS[finding.level]}  {finding.check}: {finding.text}", flush=True)
    if finding.advice:
        print(f"         → {finding.advice}", flush=True)


def summary(findings: Sequence[Finding]) -> str:
    """What there is to do, in one line."""
    counts = {level: sum(each.level == level for each in findings) for level in _MARKS}
    if counts["problem"] + counts["warning"] == 0:
        return "Everything is well."
    words = [
        f"{counts[level]} {level}{'s' * (counts[level] != 1)}" for level in ("problem", "warning")
    ]
    return " and ".join(word for word in words if not word.startswith("0")) + "."
