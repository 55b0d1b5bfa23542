"""Remembered system prompts are bounded in bytes and not shared between salts."""

from __future__ import annotations

import numpy as np
import pytest

from tests.integration.harness import Load
from tests.support.integrity import check_integrity
from vlm_server.prompt import snapshot_points
from vlm_server.prompt.snapshot_points import SnapshotPoints
from vlm_server.prompt.template.chat import Chat
from vlm_server.prompt.tokenizer import PromptTokenizer
from vlm_server.protocol import Message, TextPart


def test_remembered_system_prompts_are_bounded_in_bytes(
    load_tiny: Load, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(snapshot_points, "_HEAD_BYTES", 100_000)
    prompts = PromptTokenizer(load_tiny("gemma3")[0].spec)
    points = SnapshotPoints(prompts)

    def ask(number: int, salt: str) -> tuple[int, ...]:
        text = f"{number} " + "ab cd " * 500
        chat = Chat((Message("system", (TextPart(text),)), Message("user", (TextPart("what?"),))))
        token_ids = np.array(prompts.tokenize(chat, []), dtype=np.int32)
        return points.points_in(chat, token_ids, (), salt)

    wanted = ask(0, "")
    assert len(wanted) == 2, "after the system prompt, and before the answer"
    assert ask(0, "other") == wanted
    assert points._ends.stats().entries == 2
    size_bytes = points._ends.stats().size_bytes // 2
    for number in range(1, 100_000 // size_bytes + 3):
        ask(number, "")
    check_integrity(points._ends)
    assert points._ends.stats().evictions > 0
    assert ask(0, "") == wanted
