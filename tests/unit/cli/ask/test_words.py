"""Words of `ask` split into files and a question, on the command line and in a conversation."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_server.cli.ask.media import split
from vlm_server.cli.ask.typed import files_and_question, paths
from vlm_server.errors import ConfigError


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.png", "b.jpg", "my file.png", "plain"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("words", "files", "question"),
    [
        ([], [], None),
        (["What?"], [], "What?"),
        (["a.png", "What?"], ["a.png"], "What?"),
        (["a.png", "b.jpg", "Which?"], ["a.png", "b.jpg"], "Which?"),
        (["a.png"], ["a.png"], None),
        (["a.png", "b.jpg"], ["a.png", "b.jpg"], None),
        (["plain"], ["plain"], None),
        (["a.png", "absent.png"], ["a.png", "absent.png"], None),
        (["a.png", "Is this like absent.png"], ["a.png"], "Is this like absent.png"),
        (["-", "What?"], ["-"], "What?"),
        (["a.png", "-"], ["a.png"], "-"),
        (["-"], ["-"], None),
        (["x" * 5000], [], "x" * 5000),
        (["a\0b"], [], "a\0b"),
    ],
)
def test_ask_words_split_into_files_and_question(
    words: list[str], files: list[str], question: str | None
) -> None:
    assert split(words) == (files, question)


@pytest.mark.parametrize("words", [["-", "-"], ["-", "-", "What?"]])
def test_ask_refuses_two_dashes_for_stdin(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="standard input"):
        split(words)


@pytest.mark.parametrize(
    ("line", "files", "question"),
    [
        ("What is it?", [], "What is it?"),
        ("a.png What is it?", ["a.png"], "What is it?"),
        ("a.png  b.jpg Which one's it?", ["a.png", "b.jpg"], "Which one's it?"),
        ("'my file.png' What?", ["my file.png"], "What?"),
        ('"my file.png" What?', ["my file.png"], "What?"),
        (r"my\ file.png What?", ["my file.png"], "What?"),
        ("a.png", ["a.png"], ""),
        ("What's it?", [], "What's it?"),
        ("Compare it with a.png", [], "Compare it with a.png"),
        ("# what?", [], "# what?"),
        ("~10 pixels or more?", [], "~10 pixels or more?"),
        ("~no-such-user/a.png What?", ["~no-such-user/a.png"], "What?"),
        ("./my file.png What?", ["./my file.png"], "What?"),
        ("What is ./a.png?", ["./a.png"], "What is a.png?"),
        (
            "Are './my file.png' and ./b.jpg equal",
            ["./my file.png", "./b.jpg"],
            "Are my file.png and b.jpg equal",
        ),
        (r"What is in ./my\ file.png", ["./my file.png"], "What is in my file.png"),
        ("Read ./plain and ./absent.png", [], "Read ./plain and ./absent.png"),
        ("It's ./a.png", ["./a.png"], "It's a.png"),
    ],
)
def test_conversation_line_splits_into_files_and_question(
    line: str, files: list[str], question: str
) -> None:
    assert files_and_question(line) == (files, question)


@pytest.mark.parametrize("form", ["file://{}/my%20file.png", "{}/my file.png", "'{}/my file.png'"])
def test_dropped_file_is_found_in_every_form(tmp_path: Path, form: str) -> None:
    dropped, path = form.format(tmp_path), str(tmp_path / "my file.png")
    assert files_and_question(f"{dropped} What?") == ([path], "What?")
    assert files_and_question(dropped) == ([path], "")
    assert paths(dropped) == [path]


def test_command_takes_path_with_spaces_or_several_words() -> None:
    assert paths("my file.png") == ["my file.png"]
    assert paths("a.png 'my file.png'") == ["a.png", "my file.png"]
    assert paths("it's absent.png") == ["it's absent.png"]


def test_conversation_line_expands_tilde(tmp_path: Path) -> None:
    assert files_and_question("~/a.png What?") == ([str(tmp_path / "a.png")], "What?")
