"""`ask` prints text, JSON and marked images; its question comes from words, pipe or terminal."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.unit.cli.screen import Terminal
from vlm_server.cli.main import main

USAGE = {
    "prompt_tokens": 90,
    "completion_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 80},
    "images": [{"width": 100, "height": 50, "tokens": 4}],
}


class ScriptedModel(BaseHTTPRequestHandler):
    """A daemon that streams `text` one character at a time, and records its requests."""

    text = "a red circle"
    reason = "stop"
    coordinates = "thousandths"
    requests: list[dict[str, Any]]

    def do_GET(self) -> None:
        model = {"id": "demo", "coordinates": self.coordinates}
        is_live = self.path == "/health/live"
        self.answer(json.dumps({"status": "live"} if is_live else {"data": [model]}))

    def do_POST(self) -> None:
        self.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        deltas = [{"delta": {"content": character}} for character in self.text]
        deltas.append({"delta": {}, "finish_reason": self.reason})
        events: list[dict[str, Any]] = [{"choices": [delta]} for delta in deltas]
        events.append({"choices": [], "usage": USAGE})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self.answer("".join([*lines, "data: [DONE]\n\n"]))

    def answer(self, body: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def model() -> type[ScriptedModel]:
    return type("OneModel", (ScriptedModel,), {"requests": []})


@pytest.fixture
def url(model: type[ScriptedModel]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), model) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


@pytest.fixture
def image(tmp_path: Path) -> str:
    Image.new("RGB", (200, 100), "white").save(tmp_path / "picture.png")
    return str(tmp_path / "picture.png")


def set_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_ask_json_prints_answer_usage_and_timings(
    url: str, image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", "--json", "--url", url, image, "What?"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    document = json.loads(out)
    timings = document.pop("timings")
    assert document == {
        "model": "demo",
        "answer": "a red circle",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 90, "cached_tokens": 80, "completion_tokens": 12},
        "regions": [],
    }
    assert 0 <= timings["first_text_seconds"] <= timings["total_seconds"]
    assert timings["tokens_per_second"] > 0


def test_ask_json_reports_regions_in_image_pixels(
    url: str, model: type[ScriptedModel], image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model.text = '{"bbox_2d": [100, 200, 500, 400], "label": "it"}'
    region = {"kind": "box", "x": 20, "y": 20, "width": 80, "height": 20, "label": "it"}
    assert main(["ask", "--json", "--url", url, image, "Where?"]) == 0
    assert json.loads(capsys.readouterr().out)["regions"] == [region]
    model.coordinates, model.text = "pixels", '{"bbox_2d": [10, 10, 50, 20], "label": "it"}'
    assert main(["ask", "--json", "--url", url, image, "Where?"]) == 0
    assert json.loads(capsys.readouterr().out)["regions"] == [region]


def test_save_boxes_writes_marked_image(
    url: str,
    model: type[ScriptedModel],
    image: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model.text = "[100, 200, 500, 400]"
    target = tmp_path / "found.png"
    assert main(["ask", "--save-boxes", str(target), "--url", url, image, "Where?"]) == 0
    assert capsys.readouterr() == ("[100, 200, 500, 400]\n", "")
    with Image.open(target) as marked:
        assert marked.getpixel((20, 30)) != (255, 255, 255)
        assert marked.getpixel((60, 30)) == (255, 255, 255)


def test_save_boxes_fails_if_answer_has_no_regions(
    url: str, image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "found.png"
    assert main(["ask", "--save-boxes", str(target), "--url", url, image, "What?"]) == 1
    out, err = capsys.readouterr()
    assert out == "a red circle\n"
    assert "no boxes or points" in err
    assert not target.exists()


@pytest.mark.parametrize(("term", "mark"), [("xterm-kitty", "\x1b_G"), ("xterm", "")])
def test_boxes_are_shown_only_on_terminals_with_graphics(
    url: str,
    model: type[ScriptedModel],
    image: str,
    monkeypatch: pytest.MonkeyPatch,
    term: str,
    mark: str,
) -> None:
    for name in ("TMUX", "TERM_PROGRAM", "LC_TERMINAL", "KITTY_WINDOW_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", term)
    model.text = "[100, 200, 500, 400]"
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    assert main(["ask", "--url", url, image, "Where?"]) == 0
    head, _, rest = screen.getvalue().partition("\n")
    assert head == "[100, 200, 500, 400]"
    assert rest.startswith(mark)
    assert bool(rest) is bool(mark)


def test_answer_text_on_terminal_has_no_escape_sequences(
    url: str, model: type[ScriptedModel], image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.text = "a\x1b]0;pwned\x07\tb\nc\x9b1m"
    for screen in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stdout", screen)
        assert main(["ask", "--url", url, image, "What?"]) == 0
        is_safe = not {"\x07", "\x9b"} & set(screen.getvalue()) and "]0" in screen.getvalue()
        assert is_safe is screen.isatty()
        assert "\x1b]" not in screen.getvalue() or not is_safe
        assert "b\nc" in screen.getvalue()


def test_answer_is_markdown_on_terminal_and_bare_in_pipe(
    url: str, model: type[ScriptedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    model.text = "# Title\n\n**bold** text"
    for words, screen in (([], Terminal()), (["--plain"], Terminal()), ([], io.StringIO())):
        monkeypatch.setattr("sys.stdout", screen)
        assert main(["ask", *words, "--url", url, "What?"]) == 0
        is_rich = screen.isatty() and not words
        assert (screen.getvalue() == f"{model.text}\n") is not is_rich
        assert ("**" in screen.getvalue()) is not is_rich


def test_stats_and_parameters_of_one_question(
    url: str, model: type[ScriptedModel], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--parameter", "temperature=0.5", "--parameter", "reasoning=low", "--stats"]
    assert main(["ask", *given, "--url", url, "What?"]) == 0
    assert "90 tokens read (80 of them known) · 12 written" in capsys.readouterr().err
    assert model.requests[0]["temperature"] == 0.5
    assert model.requests[0]["reasoning_effort"] == "low"


def test_ask_hints_at_max_tokens_if_answer_hit_limit(
    url: str, model: type[ScriptedModel], image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model.reason = "length"
    words = ["ask", "--max-tokens", "3", "--system", "Be brief.", "--url", url, image, "What?"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert out == "a red circle\n"
    assert "--max-tokens" in err
    (request,) = model.requests
    assert request["max_tokens"] == 3
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("more", [[], ["-"]])
def test_ask_reads_question_from_stdin(
    url: str,
    model: type[ScriptedModel],
    image: str,
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
) -> None:
    set_stdin(monkeypatch, b"What shape\nis this?\n")
    assert main(["ask", "--url", url, image, *more]) == 0
    (request,) = model.requests
    assert request["messages"][0]["content"][1]["text"] == "What shape\nis this?"


def test_ask_reads_image_from_stdin(
    url: str, model: type[ScriptedModel], image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_stdin(monkeypatch, Path(image).read_bytes())
    assert main(["ask", "--url", url, "-", image, "Are they the same?"]) == 0
    first, second, _ = model.requests[0]["messages"][0]["content"]
    assert first == second
    assert first["image_url"]["url"].startswith("data:image/png;base64,")


def test_ask_accepts_url_with_trailing_slash(url: str, model: type[ScriptedModel]) -> None:
    assert main(["ask", "--url", url.removesuffix("v1"), "What?"]) == 0
    assert len(model.requests) == 1


@pytest.mark.parametrize("option", [["--json"], ["--save-boxes", "x.png"]])
def test_conversation_refuses_json_and_save_boxes(
    image: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: list[str],
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("What?\n"))
    assert main(["ask", *option, image]) == 2
    assert option[0] in capsys.readouterr().err
