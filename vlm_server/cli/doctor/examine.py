"""Runs all checks, prints what they find, and writes the report."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

import msgspec

from vlm_server.cli import exit_codes
from vlm_server.cli.doctor import (
    config,
    daemon,
    device,
    disk,
    machine,
    permissions,
    port,
    report,
    self_test,
    service,
    situation,
)
from vlm_server.cli.doctor.finding import Finding
from vlm_server.cli.doctor.runner import Check, run

_MARKS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}


def examine(arguments: argparse.Namespace) -> int:
    """Print the findings as they come. Raises CommandFailed if the report can't be written."""
    logging.disable(logging.CRITICAL)  # what modules would warn of is a finding here
    seen = situation.examine(arguments)
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
        report.write(arguments.report, findings, seen, arguments.log)
        print(f"Wrote {arguments.report}. Read it before you send it.", file=sys.stderr)
    return exit_codes.FAILURE if _any(findings, "problem") else 0


def checks(arguments: argparse.Namespace, seen: situation.Situation) -> list[Check]:
    """All checks, in the order in which one thing depends on another."""
    start_seconds = seen.settings.engine.start_timeout_seconds
    chosen = [
        Check("machine", machine.look),
        Check("device", device.look, device.PROBE_SECONDS + 60),
        Check("settings", config.look, 150.0),
        Check("permissions", permissions.look),
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


def _any(findings: Sequence[Finding], level: str) -> bool:
    return any(each.level == level for each in findings)
