"""Links, headings, files, settings and commands that pages name exist."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import cast
from urllib.parse import unquote

import msgspec
import pytest
from starlette.routing import Route

from tests.docs.pages import ROOT, Page, all_pages, pages
from tests.docs.running import check_words
from tests.unit.api.scripted_engine import OneModel, ScriptedEngine
from vlm_server.api.app import create_app
from vlm_server.cli.main import build_parser
from vlm_server.cli.usage import all_commands
from vlm_server.protocol import MemoryStats
from vlm_server.settings import Settings

_PATH = re.compile(r"(?:tests|scripts|configs|docs|vlm_server|packaging)/[\w./-]*\w/?")
_SETTING = re.compile(r"(?P<section>[a-z]+)\.(?P<key>[a-z_]+)(=.*)?")
_OTHER_SPELLING = re.compile(
    r"\b\w*(?:color|behavior|favor|neighbor|(?:gn|mal|tim|mar|gan|ial|ken|chron)is(?:e|ing|ation))\w*",
    re.IGNORECASE,
)
_SECTIONS = {
    field.name: type(field.default)
    for field in msgspec.structs.fields(Settings)
    if isinstance(field.default, msgspec.Struct)
}
_NO_SETTINGS = {field.name for field in msgspec.structs.fields(MemoryStats)} | {
    "py",
    "png",
    "decisions",
    "max",
    "high",
}
"""Words after a section's name and a dot that are no settings: readings, file types, limits."""
_PACKAGES = {"openai": "openai", "anthropic": "anthropic", "httpx": "httpx", "PIL": "pillow"}
"""Packages of programs on pages, by the names that they are imported by."""
_OF_CODE = ("docs/architecture.md",)
"""Pages on which names with dots are methods."""
_CURRENT = [page for page in all_pages() if "decisions" not in page.path.parts]
"""Pages about the present; decisions are history."""
IDS = {"ids": lambda page: page.name}


@pytest.mark.parametrize("page", all_pages(), **IDS)
def test_doc_links_have_targets(page: Page) -> None:
    broken = [link for link in page.links() if not leads_to_target(page, link)]
    assert broken == []


def leads_to_target(page: Page, link: str) -> bool:
    """Whether a link within the repository leads to a file, and to a heading if it names one."""
    if re.match(r"[a-z]+:", link):
        return True
    path, _, anchor = link.partition("#")
    target = (page.path.parent / unquote(path)).resolve() if path else page.path
    if not target.exists():
        return False
    return not anchor or target.suffix != ".md" or anchor in _page(target).anchors


@cache
def _page(path: Path) -> Page:
    return Page(path)


@pytest.mark.parametrize("page", all_pages(), **IDS)
def test_prose_has_one_spelling(page: Page) -> None:
    """Oxford's: colour and behaviour, but recognize. Code keeps its own."""
    assert [word for text in page.prose() for word in _OTHER_SPELLING.findall(text)] == []


@pytest.mark.parametrize("page", all_pages(), **IDS)
def test_decision_links_match_their_numbers(page: Page) -> None:
    text = page.path.read_text(encoding="utf-8")
    links = re.findall(r"\[(?:[Dd]ecision )?(\d{4})\]\((?:[\w./]*/)?(\d{4})-", text)
    assert [link for link in links if link[0] != link[1]] == []


def test_decision_index_lists_every_decision() -> None:
    folder = ROOT / "docs/decisions"
    listed = {link for link in Page(folder / "README.md").links() if link[:4].isdecimal()}
    assert listed == {path.name for path in folder.glob("[0-9]*.md")}


def test_docs_index_lists_every_page() -> None:
    folder = ROOT / "docs"
    listed = {link.partition("#")[0] for link in Page(folder / "README.md").links()}
    assert {path.name for path in folder.glob("*.md")} - {"README.md"} - listed == set()


def test_readme_tree_matches_packages() -> None:
    """Its paths exist, and it names all packages and all modules at the root."""
    named = set(_tree())
    assert sorted(str(path) for path in named if not path.exists()) == []
    root = ROOT / "vlm_server"
    packages = [path.parent for depth in ("*", "*/*") for path in root.glob(f"{depth}/__init__.py")]
    assert sorted(str(path) for path in {*packages, *root.glob("[!_]*.py")} - named) == []


def test_architecture_page_names_actual_request_handler() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = re.search(
        r"`(\w+)` in `([\w/]+)\.py` is the handler, for all dialects \(here that of `([\w/]+)\.py`",
        text,
    )
    assert named is not None
    routes = cast("list[Route]", create_app(Settings(), OneModel(ScriptedEngine())).routes)
    route = next(route for route in routes if route.path == "/v1/chat/completions")
    endpoint, named_module = route.endpoint, f"vlm_server/{named[3]}".replace("/", ".")
    assert type(endpoint).__name__ == named[1]
    assert type(endpoint).__module__ == f"vlm_server/{named[2]}".replace("/", ".")
    assert endpoint._dialect in vars(importlib.import_module(named_module)).values()


def test_service_page_lists_install_options() -> None:
    """Exactly the options of `service install`."""
    text = (ROOT / "docs/service.md").read_text(encoding="utf-8")
    paragraph = text.partition("\n`service install` takes")[2].partition("\n\n")[0]
    install = next(
        command
        for command in all_commands(build_parser())
        if command.prog.endswith("service install")
    )
    taken = {name for name in install._option_string_actions if name.startswith("--")}
    assert set(re.findall(r"--[a-z-]+", paragraph)) == taken - {"--help", "--help-all", "--debug"}


def _tree() -> Iterator[Path]:
    """The paths in the tree of docs/architecture.md, of its lines and in their text."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    block = text.partition("## The tree")[2].partition("```text\n")[2].partition("```")[0]
    folders = [ROOT]
    for line in block.splitlines():
        name, _, about = line.strip().partition(" ")
        del folders[(len(line) - len(line.lstrip())) // 2 + 1 :]
        path = folders[-1] / name
        yield path
        if path.is_dir():
            folders.append(path)
        for other in re.findall(r"[\w-]+/(?=[,;:. ]|$)|\w+\.py\b", about):
            yield folders[-1] / other


@pytest.mark.parametrize("page", _CURRENT, **IDS)
def test_doc_programs_define_all_their_names(page: Page) -> None:
    """A program with imports is copied alone, so it must define all its names."""
    for block in page.blocks:
        if block.kind == "python" and re.match("(import|from) ", block.text):
            checked = subprocess.run(
                [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"],
                input=block.text,
                capture_output=True,
                text=True,
            )
            assert checked.returncode == 0, f"{page.name}:{block.line}: {checked.stdout}"


@pytest.mark.parametrize("page", pages(), **IDS)
def test_doc_programs_follow_setup_steps(page: Page) -> None:
    """The packages that a program imports, and how to start the daemon that a block asks."""
    lines = page.path.read_text(encoding="utf-8").splitlines()
    missing = []
    for block in page.blocks:
        text = " ".join(lines[: block.line - 1])
        imports = " ".join(re.findall(r"(?m)^(?:import|from) .*", block.text))
        packages = [_PACKAGES[name] for name in re.findall(r"\w+", imports) if name in _PACKAGES]
        missing += [
            f"line {block.line}: {package}"
            for package in packages
            if not re.search(rf"(?:--with|pip install) [^`]*\b{package}\b", text)
        ]
        is_asked = block.kind in ("python", "sh") and "127.0.0.1:8000" in block.text
        if is_asked and not re.search(r"README\.md#start|vlm-server serve|scripts/serve", text):
            missing.append(f"line {block.line}: a daemon")
    assert missing == []


@pytest.mark.parametrize("page", _CURRENT, **IDS)
def test_commands_in_doc_sentences_exist(page: Page) -> None:
    parser = build_parser()
    for code in page.inline_code():
        if code.startswith(("vlm-server ", ".venv/bin/vlm-server ")):
            check_words(parser, code)


@pytest.mark.parametrize("page", _CURRENT, **IDS)
def test_commands_in_doc_blocks_exist(page: Page) -> None:
    parser = build_parser()
    for block in page.blocks:
        joined = block.text.replace("\\\n", " ")
        for line in joined.splitlines() if block.kind == "sh" else ():
            if line.startswith(("vlm-server ", ".venv/bin/vlm-server ")):
                check_words(parser, line.partition(" #")[0].partition(" | ")[0])


@pytest.mark.parametrize("page", _CURRENT, **IDS)
def test_files_named_in_docs_exist(page: Page) -> None:
    named = {code for code in page.inline_code() if _PATH.fullmatch(code)}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", [page for page in _CURRENT if page.name not in _OF_CODE], **IDS)
def test_settings_named_in_docs_exist(page: Page) -> None:
    wrong = []
    for code in page.inline_code():
        match = _SETTING.fullmatch(code)
        if match is None or match["section"] not in _SECTIONS or match["key"] in _NO_SETTINGS:
            continue
        names = {field.name for field in msgspec.structs.fields(_SECTIONS[match["section"]])}
        if match["key"] not in names:
            wrong.append(code)
    assert wrong == []


@pytest.mark.parametrize("page", _CURRENT, **IDS)
def test_scripts_and_modules_named_in_docs_exist(page: Page) -> None:
    texts = [
        *page.inline_code(),
        *(block.text for block in page.blocks if block.kind in ("sh", "")),
    ]
    lines = [line for text in texts for line in text.splitlines()]
    scripts = {found for line in lines for found in re.findall(r"(?:^|\s)(scripts/\w+)", line)}
    modules = {found for line in lines for found in re.findall(r"python -m ([\w.]+)", line)}
    missing = [name for name in sorted(scripts) if not (ROOT / name).exists()]
    missing += [name for name in sorted(modules) if importlib.util.find_spec(name) is None]
    assert missing == []
