"""A conversation continues on another daemon that shares the disk cache folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_disk import (
    FIRST,
    ask,
    disk,
    expected_answers,
    on_disk,
    second_turn,
    wait_written,
)
from tests.support.daemons import running_daemon

__all__ = ["expected_answers"]

pytestmark = [pytest.mark.e2e, pytest.mark.whole]  # two engines: tests/integration


def test_conversation_moves_between_daemons_sharing_folder(
    expected_answers: tuple[str, str], tmp_path: Path
) -> None:
    first, second = expected_answers
    options = on_disk(tmp_path / "cache")
    homes = [tmp_path / name for name in ("one", "other")]
    for home in homes:
        home.mkdir()
    with running_daemon(homes[0], *options) as one, running_daemon(homes[1], *options) as other:
        assert ask(one, FIRST) == (first, 0)
        wait_written(one, tmp_path / "cache", 3)  # an image, its prompt, the answer
        answer, known = ask(other, second_turn(first))
        assert answer == second
        assert known > 50, "the image is in it"
        wait_written(other, tmp_path / "cache", 4)
        again, known_later = ask(one, second_turn(first))
        assert again == second
        assert known_later > known, "what the other one computed is known too"
        one.kill_engine()
        one.wait_ready()
        assert ask(one, second_turn(first)) == (second, known_later)
        assert disk(one)["damaged"] == disk(other)["damaged"] == 0
