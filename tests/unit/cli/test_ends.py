"""Commands end cleanly as processes: on Ctrl-C at every stage, and on unwritable output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
from PIL import Image

from tests.support.daemons import PROGRAM, SCRIPTED
from tests.unit.cli.stalling import SECONDS, daemon
from vlm_server.cli import exit_codes
from vlm_server.cli.client.daemon import Daemon


@pytest.fixture
def image(tmp_path: Path) -> str:
    Image.new("RGB", (8, 8)).save(tmp_path / "picture.png")
    return str(tmp_path / "picture.png")


def start(words: Sequence[str], program: str = PROGRAM, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", program, *words],
        **{
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            **options,
        },
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code (negative: by which signal), stdout and stderr."""
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


@pytest.mark.parametrize(
    "stage",
    [
        "/health/live",
        *(pytest.param(path, marks=pytest.mark.whole) for path in ("/v1/models", "/health/ready")),
        pytest.param("prefill", marks=pytest.mark.whole),
        "decode",
    ],
)
def test_ctrl_c_ends_ask_silently(stage: str, image: str) -> None:
    with daemon(stage) as (url, reached):
        process = start(["ask", image, "What?", "--url", url])
        assert reached.wait(SECONDS)
        if stage == "decode":
            assert process.stdout is not None
            assert process.stdout.read(5) == "a red"
        process.send_signal(signal.SIGINT)
        code, _, err = ended(process)
    assert (code, err) == (-signal.SIGINT, "")


def test_ctrl_c_ends_bench_with_results_so_far(tmp_path: Path) -> None:
    with daemon("prefill") as (url, reached):
        process = start(["bench", "--url", f"it={url}", "--size", "40x20", "--rounds", "1"])
        assert reached.wait(SECONDS)
        process.send_signal(signal.SIGINT)
        code, out, err = ended(process)
    assert code == -signal.SIGINT
    assert "it: 0 requests" in out
    assert "Traceback" not in err


def test_ctrl_c_ends_pull_and_announces_resumption(tmp_path: Path) -> None:
    with daemon("/api/models/org/name") as (url, reached):
        environment = {
            **os.environ,
            "HF_ENDPOINT": url.removesuffix("/v1"),
            "HF_HUB_CACHE": str(tmp_path),
            "HF_HUB_OFFLINE": "0",
        }
        process = start(["pull", "org/name"], env=environment)
        assert reached.wait(SECONDS)
        process.send_signal(signal.SIGINT)
        code, _, err = ended(process)
    assert code == -signal.SIGINT
    assert "pull goes on from there" in err
    assert "Traceback" not in err


def test_ctrl_c_stops_serve_while_model_loads() -> None:
    process = start(["serve", "--port", "0"])
    assert process.stdout is not None
    wait_for(process.stdout, lambda line: line.startswith("Listening"))
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert code == exit_codes.DONE
    assert "Traceback" not in err


def wait_for(lines: IO[str], is_it: Callable[[str], bool]) -> None:
    assert any(is_it(line) for line in lines)


def test_ask_ends_quietly_if_reader_closes_pipe(image: str) -> None:
    with daemon() as (url, _):
        process = start(["ask", image, "What?", "--url", url])
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(SECONDS) == exit_codes.CLOSED_PIPE
        assert process.stderr.read() == ""
        process.stderr.close()


@pytest.mark.parametrize(
    "words", ["--help", "ask --help", "check-config --print-defaults", "completions bash"]
)
def test_commands_end_quietly_on_closed_pipe(words: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = start(words.split(), stdout=writing)
    os.close(writing)
    code, _, err = ended(process)
    assert (code, err) == (exit_codes.CLOSED_PIPE, "")


@pytest.mark.parametrize("words", ["--help", "check-config --print-defaults", "ask"])
def test_commands_report_full_disk_of_output(words: str, image: str) -> None:
    with daemon() as (url, _), Path("/dev/full").open("w") as full:
        more = [image, "What?", "--url", url] if words == "ask" else []
        code, _, err = ended(start([*words.split(), *more], stdout=full))
    assert code == exit_codes.FAILURE
    assert err == "vlm-server: can't write the output: No space left on device\n"


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_ask_succeeds_with_closed_standard_file(closed: int, image: str) -> None:
    """A file opened later must not get the closed number, and with it the printed text."""
    with daemon() as (url, _):
        process = start(["ask", image, "What?", "--url", url], preexec_fn=lambda: os.close(closed))
        code, out, err = ended(process)
    assert code == exit_codes.DONE
    assert ("a red" in out) is (closed != 1)
    assert err == ""


def test_serve_survives_closed_stdout_until_ctrl_c(tmp_path: Path) -> None:
    """A program may read the address of the daemon and then close the pipe."""
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = start(["serve", "--port", "0"], SCRIPTED, stderr=stderr)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        process.stdout.close()
        with Daemon(url) as served:
            served.wait_ready(SECONDS)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            assert served.check_readiness().state == "ready"
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == exit_codes.DONE
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()
        process.wait()


def test_unencodable_output_is_replaced_by_question_marks(tmp_path: Path) -> None:
    folder = tmp_path / "models" / os.fsdecode(b"caf\xe9")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"vision_config": {}}')
    (folder / "model.safetensors").touch()
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONIOENCODING": "utf-8"}
    environment["HF_HUB_CACHE"] = str(tmp_path / "none")
    words = ["models", "list", "--set", f'model.search_folders=["{folder.parent}"]']
    code, out, err = ended(start(words, env=environment))
    assert (code, err) == (0, "")
    assert "caf?" in out
