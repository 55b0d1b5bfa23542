"""What is typed is kept within bounds, and its loss is no reason to stop."""

from __future__ import annotations

from pathlib import Path

import pytest
from prompt_toolkit.history import InMemoryHistory

from vlm_server.cli.ask import prompt
from vlm_server.cli.ask.prompt import PrivateHistory, history_in


def test_history_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "_MAX_HISTORY_BYTES", 2000)
    path = tmp_path / "state/ask-history"
    for round_ in range(3):
        history = PrivateHistory(path)
        for number in range(60):
            history.append_string(f"question {round_}.{number}\nsecond line")
    kept = list(PrivateHistory(path).load_history_strings())
    assert kept[0] == "question 2.59\nsecond line"
    assert all(line.startswith("question") for line in kept)
    assert path.stat().st_size <= 2000
    history.append_string("x" * 5000)
    assert "xxx" not in path.read_text()


def test_history_without_folder_is_kept_in_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert isinstance(history_in(tmp_path / "file/ask-history"), InMemoryHistory)
    assert "is not kept" in capsys.readouterr().err
    assert isinstance(history_in(None), InMemoryHistory)
