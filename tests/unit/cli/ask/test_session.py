"""A conversation at a terminal: what people type, and what they see."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.terminal import Session, session

MODELS = [
    {"id": "demo", "capabilities": ["completion", "vision"], "max_model_len": 8192},
    {"id": "other", "capabilities": ["completion"], "state": "unloaded"},
]
WRONG_COMMANDS = {
    "/modle": "did you mean /model?",
    "/set warmth 1": "there is no parameter 'warmth'",
    "/load /absent.json": "can't read /absent.json",
    "/stats": "there is no answer yet",
}


class SlowModel(BaseHTTPRequestHandler):
    """A daemon that tells its progress, and answers in two parts; what it waits for is scripted."""

    requests: list[dict[str, Any]]
    go_on: threading.Event
    progress: str = ""
    refusal: tuple[int, str] | None = None

    def do_GET(self) -> None:
        self.begin(200)
        told = {"status": "live"} if self.path == "/health/live" else {"data": MODELS}
        self.wfile.write(json.dumps(told).encode())

    def do_POST(self) -> None:
        self.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.refusal is not None:
            status, message = self.refusal
            self.begin(status)
            self.wfile.write(json.dumps({"error": {"message": message}}).encode())
            return
        self.begin(200)
        if self.progress:
            self.wfile.write(f": progress {self.progress}\n\n".encode())
            self.wfile.flush()
            time.sleep(0.5)
        self.event(choices=[{"delta": {"content": "**a red** "}}])
        self.wfile.flush()
        self.go_on.wait(30)
        usage = {"prompt_tokens": 90, "completion_tokens": 12}
        self.event(choices=[{"delta": {"content": "circle"}, "finish_reason": "stop"}])
        self.event(choices=[], usage=usage)
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, **content: Any) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())

    def begin(self, status: int) -> None:
        self.send_response(status)
        self.end_headers()

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client that stopped its answer
            super().handle()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def model() -> type[SlowModel]:
    go_on = threading.Event()
    go_on.set()
    return type("OneModel", (SlowModel,), {"requests": [], "go_on": go_on})


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    Image.new("RGB", (20, 10), "white").save(tmp_path / "a picture.png")
    return tmp_path / "a picture.png"


@contextmanager
def asking(
    model: type[SlowModel], folder: Path, *words: str, **environment: str
) -> Iterator[Session]:
    """`ask` at a terminal; its state is in `folder`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), model)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        with session("ask", "--url", url, *words, XDG_STATE_HOME=str(folder), **environment) as ask:
            ask.wait_until_seen(">>>")
            yield ask
    finally:
        model.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()


def parts(request: dict[str, Any], message: int = -1) -> list[str]:
    return [part["type"] for part in request["messages"][message]["content"]]


def test_conversation_sends_its_turns_until_new(
    model: type[SlowModel], tmp_path: Path, picture: Path
) -> None:
    with asking(model, tmp_path, str(picture)) as ask:
        ask.wait_until_seen("demo at http://127.0.0.1")
        ask.wait_until_seen("+ picture a picture.png (20\u00d710")
        ask.type("What is it?\r")
        ask.wait_until_seen("a red circle")
        ask.wait_until_seen("context 102 of 8,192 tokens")
        ask.type(f"{picture} And this?\r")  # a dropped file whose space nobody escaped
        ask.wait_for("a red circle", 2)
        ask.type("/new\r")
        ask.wait_until_seen("a new conversation (2 answers forgotten)")
        ask.type(f"Compare '{picture}' with nothing\r")
        ask.wait_until_seen("a red circle\n\n>>>")
        ask.type("/bye\r")
        assert ask.ended() == 0
    first, second, third = model.requests
    assert [len(request["messages"]) for request in model.requests] == [1, 3, 1]
    assert parts(first) == parts(second) == parts(third) == ["image_url", "text"]
    assert second["messages"][0] == first["messages"][0]
    assert second["messages"][1] == {"role": "assistant", "content": "**a red** circle"}
    assert second["messages"][2]["content"][1]["text"] == "And this?"
    assert third["messages"][0]["content"][1]["text"] == "Compare a picture.png with nothing"


def test_refused_file_waits_until_it_is_dropped(
    model: type[SlowModel], tmp_path: Path, picture: Path
) -> None:
    model.refusal = (400, "The picture can't be read.")
    with asking(model, tmp_path) as ask:
        ask.wait_until_seen("demo at http://127.0.0.1")
        ask.type(f"{picture} What is it?\r")
        ask.wait_until_seen("/drop leaves them out")
        for command, complaint in WRONG_COMMANDS.items():
            ask.type(f"{command}\r")
            ask.wait_until_seen(complaint)
        ask.type("/drop\r")
        ask.wait_until_seen("left out: 1 picture")
        assert ask.scrolled.count("/drop leaves them out") == 1
        model.refusal = None
        ask.type("Hello\r")
        ask.wait_until_seen("a red circle")
        ask.type("/drop\r")
        ask.wait_until_seen("nothing waits for the next question")
        ask.type("/bye\r")
        assert ask.ended() == 0
    assert [len(parts(request, 0)) for request in model.requests] == [2, 1]


def test_terminal_shows_reason_of_wait(model: type[SlowModel], tmp_path: Path) -> None:
    """The wait is one line, which the answer replaces; keys of meanwhile are the next question."""
    model.go_on.clear()
    model.progress = json.dumps({"state": "prefill", "done": 512, "total": 2048})
    with asking(model, tmp_path) as ask:
        ask.type("What?\r")
        ask.wait_for("reading: 512 of 2,048 tokens")
        ask.wait_until_seen("a red")
        ask.type("Next?\r")
        time.sleep(0.3)
        assert "Next?" not in ask.seen
        model.go_on.set()
        ask.wait_until_seen(">>> Next?\na red circle")
        assert "512" not in ask.scrolled
        ask.type("\x04")
        assert ask.ended() == 0


def test_stopped_answer_is_kept_and_can_be_asked_again(
    model: type[SlowModel], tmp_path: Path
) -> None:
    model.go_on.clear()
    with asking(model, tmp_path) as ask:
        ask.type("What?\r")
        ask.wait_until_seen("a red")
        ask.type("\x03")
        ask.wait_until_seen("(stopped)")
        model.go_on.set()
        ask.type("Go on\r")
        ask.wait_until_seen("a red circle")
        ask.type("/retry\r")
        ask.wait_for("a red circle", 2)
    assert model.requests[1]["messages"][1] == {"role": "assistant", "content": "**a red** "}
    assert model.requests[2] == model.requests[1]


def test_several_lines_are_one_question(model: type[SlowModel], tmp_path: Path) -> None:
    with asking(model, tmp_path) as ask:
        ask.type("one\\\rtwo\x0athree\x1b\rfour\r")
        ask.wait_until_seen("a red circle")
        ask.type('"""five\r\rsix"""\r')
        ask.wait_for("a red circle", 2)
        ask.type("\x1b[200~seven\r\neight\x1b[201~\r")
        ask.wait_for("a red circle", 3)
    texts = [request["messages"][-1]["content"][-1]["text"] for request in model.requests]
    assert texts == ["one\ntwo\nthree\nfour", "five\n\nsix", "seven\neight"]


def test_commands_change_model_instructions_and_parameters(
    model: type[SlowModel], tmp_path: Path
) -> None:
    with asking(model, tmp_path) as ask:
        ask.type("/help\r")
        ask.wait_until_seen("/set [NAME VALUE")
        ask.type("/model other\r")
        ask.wait_until_seen("now with other")
        ask.type("/system Be brief.\r/set temperature 0.5\r/set temperature 9\r")
        ask.wait_until_seen("temperature is from 0.0 to 2.0, not 9")
        ask.type("/set reasoning low\r/stats\r")
        ask.wait_until_seen("there is no answer yet")
        ask.type("/stats on\r")
        ask.wait_until_seen("figures after each answer")
        ask.type("What?\r")
        ask.wait_until_seen("90 tokens read · 12 written")
        ask.type("/modle\r")
        ask.wait_until_seen("there is no command /modle: did you mean /model?")
        ask.type("/model nothing\r")
        ask.wait_until_seen("the daemon has no model 'nothing'")
    (request,) = model.requests
    assert request["model"] == "other"
    assert request["temperature"] == 0.5
    assert request["reasoning_effort"] == "low"
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}


def test_conversation_survives_errors(
    model: type[SlowModel], tmp_path: Path, picture: Path
) -> None:
    """The pictures of a question that failed wait for the next one."""
    with asking(model, tmp_path) as ask:
        ask.type("absent.png What?\r")
        ask.wait_until_seen("can't read absent.png: No such file or directory")
        model.refusal = (429, "The queue is full.")
        ask.type(f"/image {picture}\r")
        ask.wait_until_seen("1 picture for the next question")
        ask.type("What?\r")
        ask.wait_until_seen("The queue is full.")
        model.refusal = None
        ask.type("What?\r")
        ask.wait_until_seen("a red circle")
    assert parts(model.requests[-1]) == ["image_url", "text"]
    assert len(model.requests[-1]["messages"]) == 1


def test_saved_conversation_goes_on(model: type[SlowModel], tmp_path: Path, picture: Path) -> None:
    with asking(model, tmp_path) as ask:
        ask.type(f"{picture} What?\r")
        ask.wait_until_seen("a red circle")
        ask.type(f"/save {tmp_path}/it.json\r/save {tmp_path}/it.md\r/save {tmp_path}/it.md\r")
        ask.wait_until_seen("choose another name")
        ask.type(f"/new\r/load {tmp_path}/it.json\r")
        ask.wait_until_seen("1 answer of demo")
        ask.type("And now?\r")
        ask.wait_for("a red circle", 2)
    first, second = model.requests
    assert second["messages"][0] == first["messages"][0]
    assert second["messages"][1]["content"] == "**a red** circle"
    for name in ("it.json", "it.md"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert "> What?\n\n**a red** circle" in (tmp_path / "it.md").read_text()


def test_tab_completes_commands_models_and_files(
    model: type[SlowModel], tmp_path: Path, picture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(picture.parent)  # a long path would be folded
    with asking(model, tmp_path) as ask:
        ask.type("/mo")
        ask.wait_until_seen("go on with another one")
        ask.type("\t")
        ask.wait_until_seen(">>> /model")
        ask.type(" d")
        ask.wait_until_seen("  demo\n")
        ask.type("\t")
        ask.wait_until_seen(">>> /model demo")
        ask.type("\x03")
        ask.wait_until_gone("/model demo")
        ask.type("./a\t")
        ask.wait_until_seen("./a\\ picture.png")
        ask.type(" What?\r")
        ask.wait_until_seen("a red circle")
    assert parts(model.requests[0]) == ["image_url", "text"]


def test_clipboard_gives_picture_or_says_why_not(
    model: type[SlowModel], tmp_path: Path, picture: Path
) -> None:
    program = tmp_path / "bin/xclip"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nexec cat '{picture}'\n")
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    with asking(model, tmp_path, DISPLAY=":9", WAYLAND_DISPLAY="", PATH=path) as ask:
        ask.type("/image\r")
        ask.wait_until_seen("+ picture clipboard.png (20\u00d710")
        program.write_text("#!/bin/sh\necho 'Error: Can not open display' >&2; exit 1\n")
        ask.type("\x16")
        ask.wait_until_seen(
            "can't read the clipboard: xclip error: Error: Can not open display\n>>>"
        )
        ask.type("What?\r")
        ask.wait_until_seen("a red circle")
    assert parts(model.requests[0]) == ["image_url", "text"]


def test_history_is_private_and_kept_between_conversations(
    model: type[SlowModel], tmp_path: Path
) -> None:
    with asking(model, tmp_path) as ask:
        ask.type("What is it?\r")
        ask.wait_until_seen("a red circle")
        ask.type(" a secret\r")
        ask.wait_for("a red circle", 2)
    kept = tmp_path / "vlm-server/ask-history"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert "What is it?" in kept.read_text()
    assert "secret" not in kept.read_text()
    with asking(model, tmp_path) as ask:
        ask.type("\x1b[A")
        ask.wait_until_seen(">>> What is it?")
    with asking(model, tmp_path, "--no-history") as ask:
        ask.type("Unkept\r")
        ask.wait_until_seen("a red circle")
    assert "Unkept" not in kept.read_text()
