"""User mistakes give one error line with a remedy, and the right exit code."""

from __future__ import annotations

import io
import os
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from PIL import Image

from vlm_server.cli import exit_codes
from vlm_server.cli.main import main

WRONG, FAILED, LATER = exit_codes.WRONG_SETTINGS, exit_codes.FAILURE, exit_codes.NOT_AVAILABLE
UNREACHABLE = "--url http://127.0.0.1:9/v1"

BYTES = os.fsdecode(b"caf\xe9")
"""A name that is not UTF-8."""

LONG = "x" * 300
"""A file name too long for the system: looking it up fails, as in an unreadable folder."""

FILES = {
    "syntax.toml": b"[server]\nport = 1\nprot x\n",
    "table.toml": b"x = 1\n[model\n",
    "name.toml": b"# mine\n[server]\nprot = 1\n",
    "type.toml": b'[log]\nlevel = "info"\n[server]\nport = "x"\n',
    "choice.toml": b'[log]\nlevel = "loud"\n',
    "section.toml": b"\n[sever]\nport = 1\n",
    "top.toml": b"port = 3\n",
    "bytes.toml": b"\xff\xfe",
    "twice.toml": b"[server]\nport = 1\nport = 2\n",
    "open.toml": b'[server]\nhost = "::1\nport = 2\n',
    "quotes.toml": b"[model]\npath = org/name\n",
    "capital.toml": b"[model]\npinned = True\n",
    "home.toml": b'[model]\npath = "~no-such-user/x"\n',
    "template.toml": b'[models.x]\npath = "org/Absent"\nchat_template = "absent.jinja"\n',
    "long.toml": f'[model]\npath = "{LONG}"\n'.encode(),
    "keys.toml": b'[laptop]\nkey = "a-key-of-mine"\n',
    "text.txt": b"hello",
    "umlaut.md": b"x" * 4095 + "é".encode(),
    "marked.csv": b"\xef\xbb\xbfa;b",
    "drawing": b"<svg/>",
    "drawing.svg": b"<?xml version='1.0'?><svg/>",
    "sound.mp3": b"ID3\4\0",
    "cut.gif": b"GIF89a",
    "empty.png": b"",
    "photo.heic": b"\0\0\0\x18ftypheic0000",
    "model.gguf": b"GGUF",
}

MISTAKES = [
    ("srve", WRONG, "there is no command 'srve': did you mean serve?"),
    ("xyzzy", WRONG, "there are: serve, ask,"),
    ("run demo", WRONG, "did you mean serve, and ask in another terminal?"),
    ("start", WRONG, "did you mean serve?"),
    ("stop", WRONG, "did you mean service stop, or Ctrl-C in the daemon's terminal?"),
    ("list", WRONG, "did you mean models list?"),
    ("rm demo", WRONG, "did you mean models rm?"),
    ("show demo", WRONG, "did you mean models check?"),
    ("models show demo", WRONG, "there are: "),
    ("logs", WRONG, "did you mean service logs?"),
    ("status", WRONG, "did you mean ps?"),
    ("help", WRONG, "did you mean --help?"),
    ("version", WRONG, "did you mean --version?"),
    ("-V", WRONG, "did you mean --version?"),
    ("ps --port 9", WRONG, "did you mean --url?"),
    ("ask --port 9 What?", WRONG, "did you mean --url?"),
    ("--nosuch", WRONG, "unknown option --nosuch"),
    ("serve --modle x", WRONG, "did you mean --model?"),
    ("serve --mod x", WRONG, "did you mean --model?"),
    ("serve --port", WRONG, "--port: its value is missing"),
    ("serve --port x", WRONG, "--port: 'x' is not a whole number"),
    ("serve extra", WRONG, "unknown argument extra"),
    ("serve --port 65536", WRONG, "it has to be a whole number of at most 65535, not 65536"),
    ("serve --set server.port=x", WRONG, "it has to be a whole number, not a text ('x')"),
    ("serve --host 0.0.0.0", WRONG, "set `server.api_key_file`"),
    ("serve --set x", WRONG, "expected section.key=value"),
    ("serve --set server.prot=1", WRONG, "did you mean `server.port`?"),
    ("serve --set log.level=loud", WRONG, "debug, info, warning or error, not 'loud'"),
    ("serve --config absent.toml", WRONG, "absent.toml"),
    ("serve --config .", WRONG, "Is a directory"),
    ("serve --config syntax.toml", WRONG, "line 3"),
    ("serve --config table.toml", WRONG, "line 2"),
    ("serve --config name.toml", WRONG, "name.toml, line 3: there is no setting `server.prot`"),
    (
        "serve --config type.toml",
        WRONG,
        "type.toml, line 4: `server.port`: it has to be a whole number",
    ),
    ("serve --config choice.toml", WRONG, "choice.toml, line 2: `log.level`"),
    ("serve --config section.toml", WRONG, "line 2: there is no section `sever`: did you mean"),
    ("serve --config bytes.toml", WRONG, "not valid TOML"),
    ("serve --config twice.toml", WRONG, "line 3: not valid TOML at column 9: this name is there"),
    ("serve --config open.toml", WRONG, "line 2: not valid TOML at column 12: a quote is not"),
    (
        "serve --config quotes.toml",
        WRONG,
        "quotes.toml, line 2: not valid TOML at column 8: a text needs quotes",
    ),
    ("serve --config capital.toml", WRONG, "column 10: a text needs quotes; true and false are in"),
    ("serve --config type.toml --set server.port=y", WRONG, "vlm-server: `server.port`"),
    ("serve --model qwen-tiny", WRONG, "did you mean org/Qwen-Tiny?"),
    ("serve --model dmeo", WRONG, "did you mean demo?"),
    ("serve --model ./nothere", WRONG, "nothere"),
    ("serve --model text.txt", WRONG, "is a file"),
    (f"serve --model ./{LONG}", WRONG, "`model.path`: can't read "),
    (f"serve --set models.x.path=./{LONG}", WRONG, "`models.x.path`: can't read "),
    (f"serve --chat-template ./{LONG}", WRONG, "`model.chat_template`: there is no file"),
    ("serve --set model.drafter=absent", WRONG, "`model.drafter`: absent is no drafter"),
    ("serve --config long.toml", WRONG, "`model.path`: can't read "),
    ("serve --model model.gguf", WRONG, "GGUF"),
    (f"serve --model ./{BYTES}", WRONG, "is not UTF-8"),
    ("serve --chat-template absent.jinja", WRONG, "absent.jinja"),
    ("serve --model ~no-such-user/x", WRONG, "~no-such-user/x is not the folder of a checkpoint"),
    ("serve --config home.toml", WRONG, "~no-such-user/x is not the folder of a checkpoint"),
    ("serve --set cache.disk_folder=~no-such-user/x", WRONG, "'~no-such-user/x' is not absolute"),
    ("serve --set server.api_key_file=~no-such-user/x", WRONG, "'~no-such-user/x' is not absolute"),
    ("serve --chat-template ~no-such-user/x.jinja", WRONG, "x.jinja"),
    ("serve --hostfile ~no-such-user/x", WRONG, "can't read"),
    ("serve --config template.toml", WRONG, "`models.x.chat_template`: there is no file"),
    ("check-config --config name.toml", WRONG, "line 3"),
    (
        "check-config --config top.toml",
        WRONG,
        "`port` is in no section: did you mean `server.port`",
    ),
    ("check-config --model ./nothere", WRONG, "nothere is not the folder of a checkpoint"),
    ("check-config --set limits.max_image=1", WRONG, "did you mean `limits.max_images`?"),
    ("pull", WRONG, "missing: NAME"),
    ("pull nothere", WRONG, "ORG/NAME"),
    ("pull qwen-tiny", WRONG, "did you mean org/Qwen-Tiny?"),
    ("pull ../etc/passwd", WRONG, "ORG/NAME"),
    ("models chekc x", WRONG, "did you mean check?"),
    ("models check ./nothere", WRONG, "nothere"),
    ("models rm nothere", WRONG, "ORG/NAME"),
    ("models rm demo", WRONG, "demo is a part of vlm-server: it can't be removed"),
    ("models rm org/nothere", FAILED, "it is not here"),
    ("ask", WRONG, "no question"),
    (f"ask {UNREACHABLE} picture.png", WRONG, "no question"),
    (f"ask {UNREACHABLE} absent.png What?", FAILED, "can't read absent.png: No such file"),
    (f"ask {UNREACHABLE} absent.png", FAILED, "can't read absent.png"),
    (f"ask {UNREACHABLE} . What?", FAILED, "Is a directory"),
    (f"ask {UNREACHABLE} text.txt What?", FAILED, "text.txt is text, and ask takes pictures,"),
    (f"ask {UNREACHABLE} umlaut.md What?", FAILED, "put its text into the question"),
    (f"ask {UNREACHABLE} marked.csv What?", FAILED, "put its text into the question"),
    (f"ask {UNREACHABLE} drawing What?", FAILED, "drawing looks like SVG, and ask takes pict"),
    (f"ask {UNREACHABLE} drawing.svg What?", FAILED, "looks like XML, and ask takes pictures ("),
    (f"ask {UNREACHABLE} sound.mp3 What?", FAILED, "is of another kind, and ask takes pictures ("),
    (f"ask {UNREACHABLE} cut.gif What?", FAILED, "The image begins like GIF"),
    (f"ask {UNREACHABLE} https://a.test/x What?", FAILED, "by curl -LO https://a.test/x"),
    (f"ask {UNREACHABLE} picture.png 'http://a.test/?x;y'", FAILED, "-LO 'http://a.test/?x;y'"),
    (f"ask {UNREACHABLE} empty.png What?", FAILED, "empty.png is empty"),
    (f"ask {UNREACHABLE} photo.heic What?", FAILED, "HEIC"),
    (f"ask {UNREACHABLE} - What?", FAILED, "standard input is empty"),
    (f"ask {UNREACHABLE} - -", WRONG, "not both"),
    (f"ask {UNREACHABLE} picture.png What?", FAILED, "no daemon answers at http://127.0.0.1:9/v1"),
    ("ask --url nonsense picture.png What?", FAILED, "from http://nonsense/v1: there is no host"),
    ("ask --url http://[::1 picture.png What?", FAILED, "is no URL"),
    (f"ask {UNREACHABLE} --max-tokens 0 picture.png What?", WRONG, "max_tokens is from 1"),
    (f"ask {UNREACHABLE} --save-boxes absent/x.png picture.png What?", FAILED, "absent"),
    (f"ask {UNREACHABLE} --save-boxes . picture.png What?", WRONG, ".png"),
    (f"ask {UNREACHABLE} --save-boxes x.bmp picture.png What?", WRONG, ".png"),
    (f"ask {UNREACHABLE} --api-key-file absent picture.png What?", FAILED, "absent"),
    (
        f"ask {UNREACHABLE} --api-key-file keys.toml picture.png What?",
        FAILED,
        "is not an API key alone",
    ),
    ("ask --set server.port=9 --model nothere picture.png What?", WRONG, "--model nothere"),
    (
        "ask --set server.port=9 --model ~no-such-user/x picture.png What?",
        WRONG,
        "--model ~no-such-user/x",
    ),
    ("bench --start our", WRONG, "did you mean ours?"),
    ("bench --model org/Qwen-Tiny", WRONG, "--model is for servers that --start starts"),
    ("bench --start ours", WRONG, "--start needs --model"),
    ("bench --start ours --model nothere", WRONG, "neither a folder nor a model"),
    ("bench --start ours --model qwen-tin", WRONG, "did you mean org/Qwen-Tiny?"),
    ("bench --start ours --model org/nothere", WRONG, "vlm-server pull org/nothere"),
    ("bench --url http://127.0.0.1:9", WRONG, "NAME="),
    (
        "bench --url a=http://127.0.0.1:9/v1",
        FAILED,
        "a: no daemon answers at http://127.0.0.1:9/v1;",
    ),
    ("bench --url a=http://127.0.0.1:9/v1 --scenarios repaet", WRONG, "did you mean repeat?"),
    ("bench --url a=http://127.0.0.1:9/v1 --json absent/x", WRONG, "--json"),
    ("top --interval 0", WRONG, "expected 0.2 to 3600 seconds, not 0"),
    ("service satus", WRONG, "did you mean status?"),
    ("bench --rounds x", WRONG, "--rounds: 'x' is not a whole number"),
    ("completions", WRONG, "SHELL"),
    ("completions bahs", WRONG, "did you mean bash?"),
]


@pytest.fixture(autouse=True)
def folder_of_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with wrong files, one good image, and one model in the hub's cache."""
    folder = tmp_path / "folder_of_mistakes"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / BYTES).mkdir()
    (folder / BYTES / "config.json").write_text("{}")
    Image.new("RGB", (8, 8)).save(folder / "picture.png")
    snapshot = tmp_path / f"hub/models--org--Qwen-Tiny/snapshots/{'a' * 40}"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    return


def status_of(words: list[str]) -> int:
    """The exit code; argparse's own end counts as one."""
    try:
        return main(words)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize(("line", "code", "message"), MISTAKES)
def test_mistakes_give_one_error_line_and_exit_code(
    line: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(shlex.split(line)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("vlm-server")
    assert err.count("\n") == 1, err


def test_serve_on_taken_port_exits_with_not_available(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == LATER
    assert "choose another port with --port" in capsys.readouterr().err


def test_error_messages_contain_no_escape_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "./\x1b]0;pwned\x07"]) == WRONG
    error = capsys.readouterr().err
    assert "\x1b" not in error
    assert "\x07" not in error


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_files_are_reported_as_permission_denied(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("name.toml", "picture.png"):
        Path(name).chmod(0)
    assert main(["serve", "--config", "name.toml"]) == WRONG
    assert "Permission denied" in capsys.readouterr().err
    assert main(["ask", "picture.png", "What?", *UNREACHABLE.split()]) == FAILED
    assert "Permission denied" in capsys.readouterr().err


def test_debug_option_shows_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--debug", "pull", "x"], ["pull", "x", "--debug"]):
        assert main(words) == WRONG
        error = capsys.readouterr().err
        assert "Traceback" in error
        assert error.rstrip().endswith("ORG/NAME@REVISION)")
    assert main(["pull", "x"]) == WRONG
    assert "Traceback" not in capsys.readouterr().err


def test_unexpected_exception_gives_one_line_asking_for_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> int:
        raise LookupError("some\nthing")

    monkeypatch.setattr("vlm_server.cli.check_config.run", broken)
    assert main(["check-config"]) == exit_codes.DEFECT
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "LookupError" in error
    assert "--debug" in error
