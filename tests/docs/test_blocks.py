"""Every command, program, request and settings file in the documentation works as it stands."""

from __future__ import annotations

import pytest

from tests.docs.pages import Block, Page, pages
from tests.docs.running import PageRun, check_output, values_of
from tests.docs.sandbox import Sandbox
from vlm_server.errors import VlmServerError

WITH_BLOCKS = [page for page in pages() if page.blocks]
MOST_NOT_RUN = 24
"""Blocks that need a GPU, an hour or a login. Think twice before raising it."""


@pytest.mark.whole
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.name)
@pytest.mark.timeout(600)
def test_page_blocks_run_in_order(page: Page, sandbox: Sandbox) -> None:
    run = PageRun(sandbox)
    for block in page.blocks:
        try:
            run.run(block)
        except Exception as error:
            raise AssertionError(f"{page.name}:{block.line}: {error}\n{block.text}") from error


def test_skipped_blocks_stay_few(record_property: pytest.RecordProperty) -> None:
    not_run = [
        f"{page.name}:{block.line}: {block.reason_not_run}"
        for page in pages()
        for block in page.blocks
        if block.reason_not_run is not None
    ]
    print("not run:", *not_run, sep="\n  ")
    record_property("not_run", len(not_run))
    assert len(not_run) <= MOST_NOT_RUN


@pytest.mark.parametrize(
    "block",
    [
        Block(1, "sh", "vlm-server no-such-command", None),
        Block(1, "sh", "vlm-server check-config --set server.prot=1", None),
        Block(1, "sh", "vlm-server serve --set server.prot=1", None),
        Block(1, "sh", "curl http://127.0.0.1:8000/v1/no-such-route", None),
        Block(1, "sh", "false\ntrue", None),
        Block(1, "python", "print(undefined)", None),
        Block(1, "toml", "[server]\nprot = 1", None),
        Block(1, "toml", '[laptop]\nkey = "short"', ("key file", "")),
        Block(1, "json", '{"a": ', None),
        Block(1, "json", '{"model": "demo"}', ("request", "POST /v1/chat/completions")),
        Block(1, "json", '{"error": "another"}', ("answer to", "POST /v1/tokenize {}")),
        Block(1, "", "who knows", None),
        Block(1, "text", "nothing was run", ("output", "")),
        Block(1, "sh", "true", ("not run", "")),
    ],
    ids=lambda block: f"{block.kind}-{block.text[:20]}",
)
def test_wrong_blocks_fail(block: Block, sandbox: Sandbox) -> None:
    with pytest.raises((AssertionError, VlmServerError, ValueError, NameError)):
        PageRun(sandbox).run(block)


def test_request_blocks_are_sent_to_daemon(sandbox: Sandbox) -> None:
    body = '{"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}'
    PageRun(sandbox).run(Block(1, "json", body, ("request", "POST /v1/chat/completions")))


@pytest.mark.parametrize(
    ("expected", "printed", "is_same"),
    [
        ("a 1.5 b", "a   2 b", True),
        ("a … b\n…\nc", "a x b\n1\n2\nc", True),
        ("a … b\n…\nc", "a x b\nc", True),
        ("a", "a\nb", False),
        ("a\nb", "a", False),
        ("(1)", "(12)", True),
    ],
)
def test_printed_output_is_compared_with_block(expected: str, printed: str, is_same: bool) -> None:
    if is_same:
        check_output(expected, printed)
    else:
        with pytest.raises(AssertionError):
            check_output(expected, printed)


def test_json_blocks_hold_one_value_or_one_per_line() -> None:
    assert values_of('{"a":\n 1}') == [{"a": 1}]
    assert values_of('{"a": 1}\n{"b": 2}\n') == [{"a": 1}, {"b": 2}]
