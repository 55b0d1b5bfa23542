"""A soak of a few seconds against a real daemon."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.client import Client
from tests.soak.malformed import malformed
from tests.soak.mix import random_image
from tests.soak.request import Ending
from tests.support.daemons import Daemon

pytestmark = pytest.mark.e2e


async def test_malformed_soak_requests_are_refused(daemon: Daemon):
    async with Client(daemon.url) as client:
        for request in malformed(random_image(random.Random(1))):
            outcome = await client.send(request)
            assert outcome.ending is Ending.REFUSED, outcome


@pytest.mark.whole
def test_short_soak_passes_and_writes_its_report(tmp_path: Path):
    arguments = ["--minutes", "0.25", "--seed", "1", "--users", "6", "--out", str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.soak", *arguments], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "report.md").read_text() == ended.stdout
    assert (tmp_path / "memory.png").exists()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"]
    assert len(report["rests"]) == 2
    assert len(report["readings"]) > 15
    assert sum(line["count"] for line in report["requests"]) > 40
    assert report["readings"][-1]["front_footprint_bytes"] > 10**7 or sys.platform != "linux"
