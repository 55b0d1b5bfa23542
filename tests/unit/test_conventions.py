"""README's tree stands in the order of import-linter's layers."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_readme_tree_is_in_import_order() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(one["layers"] for one in contracts["contracts"] if one["id"] == "layers")
    rank_of = {name.strip(): rank for rank, layer in enumerate(layers) for name in layer.split("|")}
    tree = (ROOT / "README.md").read_text().partition("\nvlm_server/\n")[2].partition("\ntests/")[0]
    names = re.findall(r"^  ([a-z]+)(?:/|\.py) ", tree, re.MULTILINE)
    assert sorted(names) == sorted(rank_of)
    assert names == sorted(names, key=rank_of.__getitem__)
