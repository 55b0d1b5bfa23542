"""The documentation's pages: their code blocks, links, headings and code within sentences.

A block is fenced with its kind (```sh). What stands in a comment before it says more:

    <!-- not run: the reason -->          it can't be run here
    <!-- output -->                       what the block before it prints; `…` stands for anything
    <!-- output of: a command -->        what that prints, where a reader has no such model
    <!-- request: POST /v1/tokenize -->   JSON that is sent, and must be answered with 200; after
                                          `POST 8001` to the daemon that makes vectors
    <!-- answer to: POST /v1/tokenize {} -->  JSON that is the answer to that
    <!-- key file -->                     TOML that is `server.api_key_file`
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
KINDS = frozenset({"sh", "python", "json", "toml", "yaml", "text"})
"""`text` is shown and not run: diagrams, and outputs."""
_ALIASES = {"bash": "sh", "shell": "sh", "console": "sh", "py": "python", "yml": "yaml"}
_COMMANDS = frozenset(
    (
        ".venv/bin/python", ".venv/bin/vlm-server", "brew", "cat", "cd", "curl", "docker", "echo",
        "eval", "export", "git", "journalctl", "launchctl", "pip", "pipx", "podman", "python",
        "python3", "sudo", "systemctl", "uv", "uvx", "vlm-server"
    )
)  # fmt: skip
_COMMENT = re.compile(r"\s*<!--\s*(?P<name>[a-z ]+?)\s*(?::\s*(?P<value>.*?)\s*)?-->\s*", re.DOTALL)
_ANNOTATIONS = frozenset({"not run", "output", "output of", "request", "answer to", "key file"})


@dataclass(frozen=True)
class Block:
    """A code block. `note` is its annotation: its name and what follows the colon."""

    line: int
    kind: str
    text: str
    note: tuple[str, str] | None

    @property
    def reason_not_run(self) -> str | None:
        return self.note[1] if self.note and self.note[0] == "not run" else None


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def tokens(self) -> list[Token]:
        parser = MarkdownIt("commonmark").enable("table")
        return parser.parse(self.path.read_text(encoding="utf-8"))

    @cached_property
    def blocks(self) -> list[Block]:
        found = []
        note: tuple[str, str] | None = None
        for token in self.tokens:
            if token.type == "html_block":
                note = _note(token.content) or note
            elif token.type in ("fence", "code_block"):
                line = (token.map or [0])[0] + 1
                found.append(Block(line, _kind(token), token.content, note))
                note = None
        return found

    @cached_property
    def anchors(self) -> set[str]:
        """The fragments of links to this page's headings, as GitHub makes them."""
        found: set[str] = set()
        for token, inline in zip(self.tokens, self.tokens[1:], strict=False):
            if token.type == "heading_open":
                slug = base = _slug(inline)
                number = 0
                while slug in found:
                    number += 1
                    slug = f"{base}-{number}"
                found.add(slug)
        return found

    def links(self) -> Iterator[str]:
        """The targets of its links and images."""
        for token in self._inline():
            target = token.attrGet("href") or token.attrGet("src")
            if target:
                yield str(target)

    def inline_code(self) -> Iterator[str]:
        """The code in backticks within sentences and tables."""
        for token in self._inline():
            if token.type == "code_inline":
                yield token.content

    def prose(self) -> Iterator[str]:
        """The text of sentences, headings and tables, without code."""
        for token in self._inline():
            if token.type == "text":
                yield token.content

    def _inline(self) -> Iterator[Token]:
        for token in self.tokens:
            yield from token.children or ()


@cache
def pages() -> tuple[Page, ...]:
    """The pages for users and operators, whose commands are run."""
    return tuple(map(Page, [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]))


@cache
def all_pages() -> tuple[Page, ...]:
    """All Markdown files except those of tests."""
    found = [ROOT.glob("*.md"), (ROOT / "docs").rglob("*.md"), (ROOT / "vlm_server").rglob("*.md")]
    found.append((ROOT / "packaging").rglob("*.md"))
    return tuple(Page(path) for paths in found for path in sorted(paths))


def _note(html: str) -> tuple[str, str] | None:
    """The annotation in a comment; None if it is another comment."""
    match = _COMMENT.fullmatch(html)
    if match is None or match["name"] not in _ANNOTATIONS:
        return None
    return match["name"], " ".join((match["value"] or "").split())


def _kind(token: Token) -> str:
    """The fence's language, or a guess if it has none; empty if unknown.

    Blocks should say it: this is for pages that were written before.
    """
    named = token.info.strip().split(" ")[0]
    if named:
        return _ALIASES.get(named, named)
    if _begins_with_command(token.content):
        return "sh"
    if token.content.startswith("["):
        return "toml"
    is_program = "import " in token.content and _parses(token.content)
    return "python" if is_program else ""


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _begins_with_command(text: str) -> bool:
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        try:
            words = shlex.split(line)
        except ValueError:
            words = line.split()
        named = [word for word in words if not re.fullmatch(r"[A-Z_]+=.*", word)]
        return bool(named) and (named[0] in _COMMANDS or named[0].startswith("scripts/"))
    return False


def _slug(heading: Token) -> str:
    text = "".join(child.content for child in heading.children or ())
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
