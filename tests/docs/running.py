"""Runs the blocks of one page, in their order."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.docs.pages import KINDS, Block
from tests.docs.sandbox import Sandbox
from vlm_server import settings
from vlm_server.api.http.access import key_file

_FILE_NAME = re.compile(r"# (?P<name>[\w-]+\.(toml|json|py|yml|yaml))\s*\n")


@dataclass
class PageRun:
    """The state of a page: its folder, Python's names, and what the last block printed."""

    sandbox: Sandbox
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    printed: str | None = None

    def run(self, block: Block) -> None:
        """Raises whatever shows that the block is wrong."""
        assert block.kind in KINDS, f"say what it is: one of {', '.join(sorted(KINDS))}"
        if block.note and block.note[0] == "output":
            assert self.printed is not None, "there is no block before it that was run"
            check_output(block.text, self.printed)
            return
        if block.note and block.note[0] == "output of":
            check_output(block.text, self.sandbox.shell(block.note[1]))
            return
        if block.reason_not_run is not None:
            assert block.reason_not_run, "say why it is not run"
            self.printed = None
            return
        self._keep(block)
        self.printed = getattr(self, f"_{block.kind}")(block)

    def _keep(self, block: Block) -> None:
        """A block whose first line is `# my.toml` is that file."""
        if (match := _FILE_NAME.match(block.text)) and block.kind != "sh":
            path = self.sandbox.folder / match["name"]
            path.write_text(self.sandbox.placed(block.text))
            path.chmod(0o600)

    def _sh(self, block: Block) -> str:
        return self.sandbox.shell(block.text)

    def _python(self, block: Block) -> str:
        printed = io.StringIO()
        if re.match("(import|from) ", block.text):  # a program: it is copied alone
            self.names = {"__name__": "__main__"}
        code = compile(self.sandbox.placed(block.text), f"line {block.line}", "exec")
        with contextlib.redirect_stdout(printed), contextlib.chdir(self.sandbox.folder):
            exec(code, self.names)
        return printed.getvalue()

    def _toml(self, block: Block) -> None:
        path = self.sandbox.folder / f"line-{block.line}.toml"
        path.write_text(self.sandbox.placed(block.text))
        path.chmod(0o600)
        if block.note and block.note[0] == "key file":
            key_file.read(path)
        else:
            settings.load(path)

    def _json(self, block: Block) -> None:
        values = values_of(block.text)
        name, text = block.note or ("", "")
        if name == "request":
            for value in values:
                answer = self._answer(text, value)
                assert answer.is_success, answer.text
        elif name == "answer to":
            method, route, body = text.split(maxsplit=2)
            answer = self._answer(f"{method} {route}", json.loads(body))
            assert [answer.json()] == values, answer.text

    def _answer(self, target: str, body: Any) -> httpx.Response:
        method, route = target.split()
        is_embedding = route.startswith("8001")
        port = self.sandbox.embedding_port if is_embedding else self.sandbox.port
        url = f"http://127.0.0.1:{port}{route.removeprefix('8001')}"
        return httpx.request(method, url, json=body, timeout=60)

    def _yaml(self, block: Block) -> None:
        assert yaml.safe_load(block.text)

    def _text(self, _: Block) -> None:
        """Shown, not run."""


def values_of(text: str) -> list[Any]:
    """The JSON value of a block, or of each of its lines."""
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def check_output(expected: str, printed: str) -> None:
    """Line by line: `…` is anything, a line of it any lines, a number any number."""
    pattern = "".join(_line_pattern(line) for line in expected.strip().splitlines())
    lines = "".join(f"{' '.join(line.split())}\n" for line in printed.strip().splitlines())
    assert re.fullmatch(pattern, lines), f"expected:\n{expected}\nprinted:\n{printed}"


def check_words(parser: argparse.ArgumentParser, command: str) -> None:
    """Raises AssertionError if `vlm-server ...` names a command or an option that there is not."""
    text = re.sub(r"[\[\]|…]|\.\.\.", " ", command)
    for word in shlex.split(text.replace("'", ""))[1:]:
        if word.startswith("-"):
            option = word.partition("=")[0]
            assert option in parser._option_string_actions, f"no option {option}: {command}"
            continue
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                parser = action.choices[word]
                break
        else:
            takes = [
                action
                for action in parser._actions
                if isinstance(action, argparse._SubParsersAction)
            ]
            is_name = Path(word).suffix or not word.islower()
            assert not takes or is_name, f"no command {word}: {command}"


def _line_pattern(line: str) -> str:
    if line.strip() == "…":
        return r"(.*\n)*"
    words = re.escape(" ".join(line.split())).replace("…", ".*")
    return re.sub(r"\d+(\\\.\d+)?", r"\\d+(\\.\\d+)?", words) + r"\n"
