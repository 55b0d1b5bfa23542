"""The tree of docs/architecture.md is in the order of import-linter's layers; names of tests."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
_ARTICLES = re.compile(r"_(a|an|the)(?=_)")
_PRONOUNS = re.compile(
    r"test_(it|its|one|who|what|nobody|nothing|everybody|there|they|those|these|only|that|another"
    r"|each|none|neither|others?)_|_(who|what)(_|$)"
)
"""Subjects that say nothing in a list of failed tests."""


def test_readme_tree_is_in_import_order() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(one["layers"] for one in contracts["contracts"] if one["id"] == "layers")
    rank_of = {name.strip(): rank for rank, layer in enumerate(layers) for name in layer.split("|")}
    tree = (
        (ROOT / "docs/architecture.md")
        .read_text()
        .partition("\nvlm_server/\n")[2]
        .partition("\ntests/")[0]
    )
    names = re.findall(r"^  ([a-z]+)(?:/|\.py) ", tree, re.MULTILINE)
    assert sorted(names) == sorted(rank_of)
    assert names == sorted(names, key=rank_of.__getitem__)


def test_test_names_have_noun_subjects_and_no_articles() -> None:
    names = [
        f"{path.relative_to(ROOT)}::{node.name}"
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name.startswith("test_")
        if _PRONOUNS.search(node.name) or _ARTICLES.search(node.name)
    ]
    assert names == []
