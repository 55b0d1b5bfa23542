"""A doctor's report contains no secret from any source, but all that helps to debug."""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import stat
from pathlib import Path

import pytest

from vlm_server.cli.doctor import report
from vlm_server.cli.doctor.findings import problem
from vlm_server.cli.doctor.secrets import Redactor, known_secrets
from vlm_server.cli.doctor.situation import Situation, examine
from vlm_server.cli.exit_codes import CommandFailed

KEY = "only-for-my-laptop"
FILE_KEY = "correct horse battery".replace(" ", "-")
TOKEN = "hf_abcDEFghiJKLmnop"
PASSWORD = "swordfish99"
PROMPT = "Which of these patients has the broken left arm?"
IMAGE = base64.b64encode(random.Random(0).randbytes(3000)).decode()
SECRETS = (KEY, FILE_KEY, TOKEN, PASSWORD, PROMPT, IMAGE[100:160])
SECRETS += ("u5er-in-url", "q-in-url", "p4th")

TRACE = f'Traceback\n  File "a.py", line 1, in f\n    {PROMPT}\nKeyError: {KEY}'
JSON_LINE = json.dumps(
    {"time": "t", "process": "engine", "level": "error", "message": "m", "body": PROMPT}
    | {"exception": TRACE}
)
LOG = f"""\
2026-11-22 18:00:00,000 front INFO POST /v1/chat/completions id=5f status=200 ms=412 key=laptop
2026-11-22 18:00:01,000 front WARNING GET https://u5er-in-url:{PASSWORD}@hub.test/x?sig=q-in-url
2026-11-22 18:00:02,000 front ERROR can't read 'data:image/png;base64,{IMAGE}'
2026-11-22 18:00:02,500 engine ERROR a library says {IMAGE}
2026-11-22 18:00:03,000 engine ERROR no template for "{PROMPT}"
2026-11-22 18:00:04,000 front WARNING Authorization: Bearer {KEY} refused, token={TOKEN}
Traceback (most recent call last):
  File "/home/me/vlm_server/engine/loop.py", line 12, in step
    answer("{PROMPT}")
ValueError: {PROMPT}
{PROMPT}
vlm-server: the settings file is not there
2026-11-22 18:00:05,000 front ERROR http://otel.test/p4th/of-2/v1/traces, /p4th-of-env: no
{{"time": "t", "process": "front", "level": "info", "logger": "l", "message": "request", "id": "77",
"x": 1}}
{JSON_LINE}
"""


@pytest.fixture
def situation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Situation:
    """A home with secrets in settings, key file, environment, URLs, hub token and log."""
    home = tmp_path / "home"
    (home / ".cache/huggingface").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("MY_SERVICE_PASSWORD", PASSWORD)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://otel.test/p4th-of-env")
    monkeypatch.setenv("HF_ENDPOINT", f"https://u5er-in-url:{PASSWORD}@hub.test/?sig=q-in-url")
    keys = home / "keys.toml"
    keys.write_text(f'[laptop]\nkey = "{FILE_KEY}"\n')
    keys.chmod(0o600)
    config = home / "my.toml"
    config.write_text(
        f'[server]\nport = 0\napi_keys = [\n  "{KEY}",\n]\napi_key_file = "{keys}"\n'
        f'[tracing]\nendpoint = "http://u5er-in-url:{PASSWORD}@otel.test/p4th/of-2/?sig=q-in-url"\n'
    )
    (home / "daemon.log").write_text(LOG)
    return examine(argparse.Namespace(config=config, set=[]))


def written(situation: Situation) -> str:
    assert not situation.fault
    findings = [problem("x", f"someone said {KEY} and {TOKEN}", f"call https://h/?key={PASSWORD}")]
    path = situation.home / "report.json"
    report.write(path, report.contents(findings, situation, situation.home / "daemon.log"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    return path.read_text()


@pytest.mark.parametrize("secret", SECRETS)
def test_doctor_report_contains_no_secret(situation: Situation, secret: str) -> None:
    assert secret not in written(situation)


def test_doctor_report_keeps_settings_packages_and_log(situation: Situation) -> None:
    found = json.loads(written(situation))
    assert found["settings"]["changed"]["server.api_keys"] == "(1 not shown)"
    assert found["settings"]["changed"]["server.port"] == 0
    assert found["settings"]["changed"]["tracing.endpoint"] == "http://***@otel.test/***/?***"
    assert found["packages"]["msgspec"]
    assert found["environment"]["HOME"] == "~"
    lines = "\n".join(found["log"])
    for part in ("status=200 ms=412", 'loop.py", line 12, in step', "ValueError", "KeyError"):
        assert part in lines
    assert "vlm-server: the settings file is not there" in lines
    assert "lines of other forms are left out" in lines


@pytest.mark.parametrize(
    "text",
    [
        f'[server]\napi_keys = ["{KEY}"\nport = ',
        f'[server]\napi_keys = [\n  "{KEY}",\n  "x",\n]\nprot = 1',
        f"[server]\napi_keys = '{KEY}'",
    ],
)
def test_keys_in_broken_settings_are_known_secrets(
    situation: Situation, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(text)
    broken = examine(argparse.Namespace(config=path, set=[f'server.api_keys=["{FILE_KEY}"]', "x"]))
    assert broken.fault
    assert {KEY, FILE_KEY} <= known_secrets(broken)


@pytest.mark.parametrize("url", ["htp://otel.test/p4th-in-url", "otel.test/p4th-in-url/"])
@pytest.mark.parametrize("is_in_file", [False, True])
def test_path_of_refused_trace_endpoint_is_redacted(
    situation: Situation, tmp_path: Path, url: str, is_in_file: bool
) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(f'[tracing]\nendpoint="{url}"\n' if is_in_file else "")
    words = [] if is_in_file else [f"tracing.endpoint={url}"]
    broken = examine(argparse.Namespace(config=path, set=words))
    assert "p4th" in broken.fault
    assert "p4th" not in Redactor(known_secrets(broken), Path("/")).text(broken.fault)


def test_keys_of_refused_key_file_are_known_secrets(situation: Situation) -> None:
    (situation.home / "keys.toml").chmod(0o644)
    assert FILE_KEY in known_secrets(situation)


def test_redactor_keeps_harmless_text() -> None:
    redactor = Redactor({"abc"}, Path("/home/me"))
    kept = (
        "abc",
        "commit 463519692444e7f3e4b7123967edc577185f995f of org/name",
        "/opt/some/quite/long/path/to/a/folder/with/models/and/more",
        "vlm_server_request_generation_tokens_bucket",
        'vlm_server_e2e_request_latency_seconds_bucket{le="0.001",model_name="demo"} 0.0',
    )
    assert [redactor.text(text) for text in kept] == list(kept)
    assert redactor.text("/home/me/x") == "~/x"
    assert redactor.value({"a": [KEY, 1, None, True]}) == {"a": [KEY, 1, None, True]}


@pytest.mark.parametrize(
    "text",
    [
        "0f3a9c4b-8d2e4f6a-91b7c3d5-e8f0a2b4-c6d8",
        "aGVsbG8gd29ybGQsIHRoaXMgaXMgYSBzZWNyZXQgbWVzc2FnZQ==",
        "Authorization: Basic dXNlcjpwYXNz",
        "https://h.test/a?token=abc",
        "X-Api-Key: abcdefgh",
        "password = 'hunter22'",
        "sk-proj-0123456789",
    ],
)
def test_redactor_masks_text_that_looks_secret(text: str) -> None:
    shown = Redactor((), Path("/")).text(text)
    assert "***" in shown
    assert not any(
        word in shown for word in ("0f3a9", "aGVs", "dXNl", "=abc", "abcdefgh", "hunter")
    )


def test_doctor_report_keeps_last_log_lines() -> None:
    line = "2026-11-22 18:00:00,000 front INFO line {}"
    shown = report.presentable(line.format(number) for number in range(1000))
    assert len(shown) == report.NUM_LINES
    assert shown[-1].endswith("line 999")


@pytest.mark.parametrize("name", ["none/report.json", ".", "/"])
def test_doctor_reports_unwritable_report_path(
    situation: Situation, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(situation.home)
    with pytest.raises(CommandFailed, match="can't write"):
        report.write(Path(name), {})
    assert "report" not in " ".join(os.listdir(situation.home))
