"""Documents in the real program: answers, caches, the context, the terminal."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support import pdf
from tests.support.daemons import Daemon

pytestmark = pytest.mark.e2e

GREEDY: Any = {"model": "demo", "temperature": 0, "max_tokens": 20}
CONTEXT_TOKENS = 8192
WORDS = ("RED", "SUN", "MAP", "BOX", "KEY", "CUP")


def asked(data: bytes, question: str = "What does it say?", **options: Any) -> Any:
    part = {"type": "file", "file": {"file_data": pdf.data_url(data), **options}}
    return [{"role": "user", "content": [part, {"type": "text", "text": question}]}]


def answer(daemon: Daemon, messages: Any) -> Any:
    return daemon.client().chat.completions.create(messages=messages, **GREEDY)


def count(daemon: Daemon, messages: Any) -> int:
    """Tokens of a prompt."""
    body = {"model": "demo", "messages": messages}
    told = httpx.post(f"{daemon.url}/v1/tokenize", json=body, timeout=120)
    assert told.status_code == 200, told.text
    return int(told.json()["count"])


def encoded_media(daemon: Daemon) -> int:
    """Pictures that were encoded since the start, of all requests."""
    lines = httpx.get(f"{daemon.url}/metrics").text.splitlines()
    values = {
        line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if "{" in line
    }
    prefix = "vlm_server_mm_cache"
    return int(values[f"{prefix}_queries_total"] - values[f"{prefix}_hits_total"])


def test_pages_are_read_one_by_one(daemon: Daemon) -> None:
    data = pdf.write([pdf.Page((300, 300)).text(60, 130, 70, word) for word in WORDS])
    for number, word in enumerate(WORDS, 1):
        said = answer(daemon, asked(data, pages=str(number)))
        assert said.choices[0].message.content == word


def test_text_layer_reaches_prompt(daemon: Daemon) -> None:
    data = pdf.write([pdf.Page().text(50, 700, 30, "x" * 40)])
    counts = [
        answer(daemon, asked(data, **options)).usage.prompt_tokens
        for options in ({}, {"include_text": True})
    ]
    assert counts[1] - counts[0] > 40


def test_second_question_and_changed_page_cost_new_content_alone(daemon: Daemon) -> None:
    data, changed = pdf.numbered(20), pdf.numbered(20, changed=13)
    before, started = encoded_media(daemon), time.monotonic()
    answer(daemon, asked(data))
    first_seconds = time.monotonic() - started
    assert encoded_media(daemon) - before in range(17, 21)
    before, started = encoded_media(daemon), time.monotonic()
    second = answer(daemon, asked(data, "What number is it?"))
    assert encoded_media(daemon) == before
    assert second.usage.prompt_tokens_details.cached_tokens > 0.95 * second.usage.prompt_tokens
    assert time.monotonic() - started < first_seconds / 2
    answer(daemon, asked(changed))
    assert encoded_media(daemon) == before + 1


@pytest.mark.parametrize("option", ["pages", "max_pixels"])
def test_proposal_of_refused_document_fits(daemon: Daemon, option: str) -> None:
    data = pdf.numbered(100)
    with pytest.raises(openai.BadRequestError) as refusal:
        answer(daemon, asked(data))
    error: Any = refusal.value
    assert error.code == "context_length_exceeded"
    proposals = re.search(r"at most (\d+) of the 100 pages .* of (\d+) pixels", error.message)
    assert proposals, error.message
    pages, pixels = map(int, proposals.groups())
    fitting = {"pages": f"1-{pages}"} if option == "pages" else {"max_pixels": pixels}
    assert 0.75 * CONTEXT_TOKENS < count(daemon, asked(data, **fitting)) < CONTEXT_TOKENS


def test_ask_answers_about_file(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "report.pdf"
    path.write_bytes(pdf.write([pdf.Page((300, 300)).text(60, 130, 70, "CUP")]))
    command = [sys.executable, "-m", "vlm_server.cli", "ask", "--url", daemon.url, str(path)]
    result = subprocess.run(
        [*command, "What does it say?"], capture_output=True, text=True, timeout=120, check=False
    )
    assert (result.stdout.strip(), result.returncode) == ("CUP", 0), result.stderr
    path.write_bytes(pdf.encrypted())
    result = subprocess.run(
        [*command, "What?"], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode != 0
    assert "encrypted with a password" in result.stderr
