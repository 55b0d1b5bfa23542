"""`ask` sends and prints the right things with a scripted daemon, and manages its own daemon."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support import video_files
from tests.support.daemons import SCRIPTED
from tests.support.daemons import running_daemon as scripted
from vlm_server.cli.ask.media import kind_of, read
from vlm_server.cli.client.daemon import Daemon, is_local, running_daemon
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.cli.main import main
from vlm_server.settings import Limits

UNREACHABLE = "http://127.0.0.1:9/v1"


def data_url(path: Path) -> str:
    return read(str(path), Limits()).url


def tiny(image_format: str) -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(encoded, image_format)
    return encoded.getvalue()


PNG = tiny("PNG")


@dataclass
class DaemonScript:
    """The scripted daemon's answer, and the requests and keys that it got."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    is_cut: bool = False
    status: int = 200
    not_ready_times: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


class ScriptedHandler(BaseHTTPRequestHandler):
    """One connection to the scripted daemon."""

    script: DaemonScript

    def do_GET(self) -> None:
        if self.path == "/health/ready" and self.script.not_ready_times:
            self.script.not_ready_times -= 1
            self.answer(503, json.dumps({"status": "starting"}))
        elif self.path == "/health/live":
            self.answer(200, json.dumps({"status": "live"}))
        else:
            self.answer(200, json.dumps({"data": [{"id": "demo"}]}))

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        self.script.requests.append(json.loads(self.rfile.read(size)))
        self.script.keys.add(self.headers["Authorization"])
        if self.script.status != 200:
            self.answer(self.script.status, json.dumps({"error": {"message": "Too large."}}))
            return
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in self.script.chunks]
        end = [] if self.script.is_cut else ["data: [DONE]\n\n"]
        self.answer(200, "".join([": a comment\n\n", *events, *end]))

    def answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def script() -> DaemonScript:
    return DaemonScript(chunks=[delta(""), delta("a red "), delta("circle")])


@pytest.fixture
def url(script: DaemonScript) -> Iterator[str]:
    handler = type("ScriptedHandler", (ScriptedHandler,), {"script": script})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "a picture.png"
    path.write_bytes(PNG)
    return path


def test_ask_prints_streamed_answer(
    url: str, script: DaemonScript, image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", str(image), "What is it?", "--url", url]) == 0
    assert capsys.readouterr().out == "a red circle\n"
    (request,) = script.requests
    assert request["stream"] is True
    assert request["model"] == "demo"


def test_ask_sends_images_in_order_before_question(
    url: str, script: DaemonScript, image: Path
) -> None:
    second = image.with_name("second")
    second.write_bytes(tiny("JPEG"))
    main(["ask", str(image), str(second), "Which?", "--url", url])
    *images, question = script.requests[0]["messages"][0]["content"]
    urls = [part["image_url"]["url"] for part in images]
    assert urls == [data_url(image), data_url(second)]
    assert question == {"type": "text", "text": "Which?"}


def test_ask_sends_video_as_video_url(url: str, script: DaemonScript, image: Path) -> None:
    video = image.with_name("clip.mp4")
    video.write_bytes(video_files.encode(video_files.noise(1, 3)))
    assert main(["ask", str(video), str(image), "Which way?", "--url", url]) == 0
    first, second, _ = script.requests[0]["messages"][0]["content"]
    assert first == {"type": "video_url", "video_url": {"url": data_url(video)}}
    assert second["type"] == "image_url"
    assert data_url(video).startswith("data:video/mp4;base64,")


def test_ask_refuses_truncated_video_before_sending(
    url: str, script: DaemonScript, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    video = tmp_path / "clip.mp4"
    video.write_bytes(video_files.encode(video_files.noise(1, 3))[:-1])
    assert main(["ask", str(video), "Which way?", "--url", url]) != 0
    assert "is truncated" in capsys.readouterr().err
    assert script.requests == []


def test_ask_waits_until_daemon_is_ready(url: str, script: DaemonScript, image: Path) -> None:
    script.not_ready_times = 2
    assert main(["ask", str(image), "What?", "--url", url]) == 0
    assert script.not_ready_times == 0


@pytest.mark.parametrize("form", ["{}", "{}/", "{}/v1", "http://{}", "http://{}/v1/"])
def test_ask_accepts_daemon_address_without_scheme_or_path(
    form: str, url: str, script: DaemonScript, image: Path
) -> None:
    address = url.removeprefix("http://").removesuffix("/v1")
    assert main(["ask", str(image), "What?", "--url", form.format(address)]) == 0
    assert len(script.requests) == 1


def test_ask_sends_api_key_as_bearer_token(url: str, script: DaemonScript, image: Path) -> None:
    main(["ask", str(image), "What?", "--url", url, "--api-key", "a-secret-key"])
    assert script.keys == {"Bearer a-secret-key"}


def test_ask_encodes_api_key_as_utf8(url: str, script: DaemonScript, image: Path) -> None:
    assert main(["ask", str(image), "What?", "--url", url, "--api-key", "second-key-é"]) == 0
    (sent,) = script.keys
    assert sent is not None
    assert sent.encode("latin-1") == "Bearer second-key-é".encode()


def test_ask_reads_api_key_from_file(url: str, script: DaemonScript, image: Path) -> None:
    path = image.with_name("key")
    path.write_text("a-key-in-a-file\n")
    main(["ask", str(image), "What?", "--url", url, "--api-key-file", str(path)])
    assert script.keys == {"Bearer a-key-in-a-file"}


@pytest.fixture
def key_file(image: Path) -> Path:
    """A key file of two keys, which its owner alone can read."""
    path = image.with_name("keys.toml")
    path.touch(mode=0o600)
    path.write_text('[one]\nkey = "the-first-key"\n[two]\nkey = "the-second-key"\n')
    return path


def test_ask_sends_first_key_of_settings_only_to_local_daemon(
    url: str, script: DaemonScript, image: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    words = ["ask", str(image), "What?", "--set", f"server.api_key_file={key_file}"]
    assert main([*words, "--url", url]) == 0
    assert script.keys == {"Bearer the-first-key"}
    assert main([*words, "--url", url.replace("127.0.0.1", "0.0.0.0")]) == 0
    assert script.keys == {"Bearer the-first-key", None}


def test_ask_refuses_settings_key_file_readable_by_others(
    url: str, image: Path, key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key_file.chmod(0o644)
    words = ["ask", str(image), "What?", "--set", f"server.api_key_file={key_file}"]
    assert main([*words, "--url", url]) == 2
    assert "chmod 600" in capsys.readouterr().err


def test_ask_reports_missing_key_file(
    url: str, image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(image.with_name("absent"))
    assert main(["ask", str(image), "What?", "--url", url, "--api-key-file", missing]) == 1
    assert "can't read an API key" in capsys.readouterr().err


def test_ask_prints_error_response_of_daemon(
    url: str, script: DaemonScript, image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.status = 413
    assert main(["ask", str(image), "What?", "--url", url]) == 1
    assert capsys.readouterr() == ("", "vlm-server: Too large.\n")


def test_ask_reports_error_within_stream(
    url: str, script: DaemonScript, image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.chunks = [delta("a re"), {"error": {"message": "the engine process ended"}}]
    assert main(["ask", str(image), "What?", "--url", url]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("a re")
    assert "the engine process ended" in err


def test_ask_fails_if_stream_ends_without_done(
    url: str, script: DaemonScript, image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.is_cut = True
    assert main(["ask", str(image), "What?", "--url", url]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("a red circle")
    assert "before it was complete" in err


def test_ask_names_missing_image(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["ask", "absent.png", "What?"]) == 1
    assert "absent.png" in capsys.readouterr().err


@pytest.mark.parametrize(("folder", "code"), [("demo", 0), ("other", 1)])
def test_ask_resolves_model_dot_to_folder_name(
    url: str,
    script: DaemonScript,
    image: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    folder: str,
    code: int,
) -> None:
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    assert main(["ask", str(image), "What?", "--url", url, "--model", "."]) == code
    assert len(script.requests) == 1 - code


def test_ask_suggests_nearest_model_name(
    url: str, script: DaemonScript, image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", str(image), "What?", "--url", url, "--model", "dmeo"]) == 1
    assert "did you mean demo?" in capsys.readouterr().err
    assert main(["ask", str(image), "What?", "--url", url, "--model", "demo"]) == 0
    assert len(script.requests) == 1


def test_ask_starts_no_daemon_for_remote_url(
    image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", str(image), "What?", "--url", "http://host.invalid:1/v1"]) == 1
    assert "http://host.invalid:1/v1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (PNG, "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image/webp"),
        (b"BM\0\0", "image/bmp"),
        (b"MM\0*\0\0", "image/tiff"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1avif", "image/avif"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "image/heic"),
        (b"\0\0\0\x18ftypisom\0\0\0\0isomavc1", "video/mp4"),
        (b"anything", "application/octet-stream"),
    ],
)
def test_media_kind_is_detected_from_bytes(data: bytes, kind: str) -> None:
    assert kind_of("picture", data) == kind


def test_daemon_is_absent_if_port_refuses_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    with Daemon(url) as daemon:
        assert not daemon.is_there()


def test_loopback_urls_are_local() -> None:
    assert is_local("http://127.0.0.1:8000/v1")
    assert is_local("http://[::1]:8000/v1")
    assert is_local("http://localhost/v1")
    assert not is_local("http://192.168.1.2:8000/v1")


def test_command_fails_if_own_daemon_cannot_start() -> None:
    started = running_daemon(["--set", "server.nothing=1"], stop_seconds=5)
    with pytest.raises(CommandFailed, match="did not start"), started:
        pass


def test_own_daemon_ends_after_keyboard_interrupt() -> None:
    urls: list[str] = []

    def interrupted() -> None:
        with running_daemon([], stop_seconds=20) as url:
            urls.append(url)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with Daemon(urls[0]) as daemon:
        assert not daemon.is_there()


@pytest.mark.parametrize("content", [None, b"# no picture"])
def test_ask_refuses_unreadable_image_before_starting_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    path = tmp_path / "README.md"
    if content is not None:
        path.write_bytes(content)
    assert main(["ask", str(path), "What?"]) == 1
    error = capsys.readouterr().err
    assert str(path) in error
    assert "starting" not in error


def test_ask_starts_no_daemon_for_explicit_local_url(
    image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", str(image), "What?", "--url", "http://127.0.0.1:9/v1"]) == 1
    assert "http://127.0.0.1:9/v1" in capsys.readouterr().err


def test_ask_names_other_daemons_of_user_if_none_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until they end, in whatever way."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def complaint() -> str:
        assert main(["ask", "--url", UNREACHABLE, "What is that?"]) == 1
        return capsys.readouterr().err

    alone = f"vlm-server: no daemon answers at {UNREACHABLE}; 'vlm-server serve' starts one\n"
    assert complaint() == alone
    with scripted(tmp_path, program=SCRIPTED) as daemon:
        assert f"at {UNREACHABLE}, but one does at {daemon.url}/v1 (--url); '" in complaint()
    assert complaint() == alone
    with scripted(tmp_path, program=SCRIPTED) as daemon:
        daemon.process.kill()
        daemon.process.wait()
        assert complaint() == alone
    assert not any((tmp_path / "vlm-server/daemons").iterdir())
