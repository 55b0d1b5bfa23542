"""A service that is killed while a batch runs: no line is lost, and none has two results."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx

from tests.support.daemons import SCRIPTED, Daemon, running_daemon, wait_until, with_settings
from tests.unit.api.requests import ROUTE, chat, user

NUM_LINES, NUM_KILLS = 2000, 3


def begun(daemon: Daemon) -> str:
    """The id of a new batch."""
    body = chat(user("accept prefill token finish"))
    lines = [
        {"custom_id": str(i), "method": "POST", "url": ROUTE, "body": body}
        for i in range(NUM_LINES)
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    form: Any = {"files": {"file": ("b", data)}, "data": {"purpose": "batch"}}
    file_id = httpx.post(f"{daemon.url}/v1/files", **form).json()["id"]
    wanted = {"input_file_id": file_id, "endpoint": ROUTE, "completion_window": "24h"}
    return str(httpx.post(f"{daemon.url}/v1/batches", json=wanted).json()["id"])


def batch_of(daemon: Daemon, batch_id: str) -> Any:
    return httpx.get(f"{daemon.url}/v1/batches/{batch_id}").json()


def num_done(daemon: Daemon, batch_id: str) -> int:
    return int(batch_of(daemon, batch_id)["request_counts"]["completed"])


def killed(daemon: Daemon, batch_id: str) -> int:
    """Kill the daemon after some lines more; returns how many results it had counted."""
    goal = num_done(daemon, batch_id) + 20
    wait_until(lambda: num_done(daemon, batch_id) >= goal, 60, daemon.log)
    done = num_done(daemon, batch_id)
    os.kill(daemon.process.pid, signal.SIGKILL)
    daemon.process.wait()
    return done


def test_killed_service_finishes_batch_with_one_result_per_line(tmp_path: Path) -> None:
    settings = with_settings(
        f"files.folder={tmp_path / 'files'}",
        "batches.min_idle_seconds=0",
        "batches.on_battery=true",
        "engine.openblas=off",
    )
    batch_id, done = "", 0
    for _ in range(NUM_KILLS):
        with running_daemon(tmp_path, *settings, program=SCRIPTED) as daemon:
            batch_id = batch_id or begun(daemon)
            assert num_done(daemon, batch_id) >= done, "a result that was counted is lost"
            done = killed(daemon, batch_id)
    assert done < NUM_LINES, "nothing was left to do after the last kill"
    with running_daemon(tmp_path, *settings, program=SCRIPTED) as daemon:
        ended = daemon
        wait_until(lambda: batch_of(ended, batch_id)["status"] == "completed", 60, daemon.log)
        batch = batch_of(daemon, batch_id)
        text = httpx.get(f"{daemon.url}/v1/files/{batch['output_file_id']}/content").text
        files = httpx.get(f"{daemon.url}/v1/files?purpose=batch_output").json()["data"]
    assert [json.loads(line)["custom_id"] for line in text.splitlines()] == [
        str(i) for i in range(NUM_LINES)
    ]
    assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    assert [file["id"] for file in files] == [batch["output_file_id"]]
    assert "Traceback" not in daemon.log.read_text()
