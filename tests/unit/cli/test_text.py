"""Tables and texts fit a terminal, and are whole in a file."""

from __future__ import annotations

import io
import os

import pytest

from tests.support.terminal import session
from tests.unit.cli.screen import Terminal
from vlm_server.cli import text
from vlm_server.cli.model_actions import _table_of
from vlm_server.platform import terminal

PATH = "/a/long/folder/of/many/models/that/never/ends/model"
HEAD = ("NAME", "SIZE", "FAMILY", "WHERE")
ROWS = [HEAD, ("org/name", "15 MB", "qwen3_vl", PATH)]


def test_table_cuts_start_of_last_cell_at_terminal_only() -> None:
    assert PATH in text.table(ROWS)
    shown = text.table(ROWS, 60)
    assert max(map(len, shown.splitlines())) <= 60
    assert "…" in shown
    assert shown.endswith("ends/model")


def test_list_of_models_leaves_out_families_where_they_do_not_fit() -> None:
    assert "qwen3_vl" in _table_of(ROWS, None)
    assert "qwen3_vl" in _table_of(ROWS, 120)
    assert "FAMILY" not in _table_of(ROWS, 60)


QUOTED = "no daemon answers here; 'vlm-server serve --port 9' starts one, and it can't wait"


def test_message_wraps_by_words_at_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text.say(QUOTED, "vlm-server: ")
    assert capsys.readouterr().err == f"vlm-server: {QUOTED}\n"
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    text.say(f"{QUOTED}\n  a command that is copied as a whole, however long", "vlm-server: ")
    *wrapped, command = stream.getvalue().splitlines()
    assert [line[:12] for line in wrapped] == ["vlm-server: ", *[" " * 12] * (len(wrapped) - 1)]
    assert max(map(len, wrapped)) <= 40
    assert " ".join(line[12:] for line in wrapped) == QUOTED
    assert any("'vlm-server serve --port 9'" in line for line in wrapped)
    assert command == "  a command that is copied as a whole, however long"


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_errors_and_warnings_of_commands_wrap_by_words(columns: int) -> None:
    for words in (
        ("serve", "--host", "0.0.0.0"),
        ("connect", "nothing"),
        ("check-config", "--set", "model.path=/absent/model"),
    ):
        with session(*words, columns=columns) as command:
            assert command.ended() == (0 if words[0] == "check-config" else 2)
            lines = command.plain.replace("\r", "").splitlines()
        assert max(map(len, lines)) <= columns
        with session(*words, columns=1000) as command:
            command.ended()
            whole = command.plain.split()
        assert " ".join(lines).split() == whole
        assert columns > 80 or any(line.startswith("  ") for line in lines)


def test_facts_go_on_below_themselves() -> None:
    rows = [("memory", "23.5 GiB on cpu, of which 11.8 GiB may be used"), ("model", "demo")]
    assert text.facts(rows) == f"memory  {rows[0][1]}\nmodel   demo"
    shown = text.facts(rows, 40).splitlines()
    assert shown[1].startswith("        ")
    assert max(map(len, shown)) <= 40
    assert " ".join(" ".join(shown[:2]).split()) == f"memory {rows[0][1]}"


def test_terminal_has_columns_and_file_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    assert terminal.columns_of(Terminal()) == 72
    assert terminal.columns_of(io.StringIO()) is None


def test_home_folder_is_tilde() -> None:
    home = os.path.expanduser("~")
    assert text.from_home(f"{home}/models/x") == "~/models/x"
    assert text.from_home(f"{home}x") == f"{home}x"
