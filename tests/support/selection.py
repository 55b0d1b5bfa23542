"""Which tests run: `scripts/test` takes every kind of invariant, `scripts/test --all` all of them.

A test over the families of models runs for the core families: between them they have every
mechanism of the table of families. One more family rotates by commit. A test whose subject touches
few columns of that table names them (`@pytest.mark.families("caches", "rope")`), and runs for core
families that have each value of these; one that names none runs for two.

What is marked `whole` or `alone`, and the folders in WHOLE_FOLDERS, is for `--all`, for paths that
name such a folder, and for a single test that is named.

Tests that share something costly (a loaded family, a daemon, a module's fixtures) are one group:
they run in one worker. Groups start in the order of FOLDERS, so that short ones fill the end.
"""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CORE = (
    "qwen3_vl", "gemma4", "lfm2_vl", "qwen2_5_vl", "glm4v", "smolvlm", "llava_onevision",
    "granite4_vision", "qwen3_omni_moe", "fastvlm", "minicpmo", "paligemma"
)  # fmt: skip
"""They have every mechanism (tests/integration/test_core_families.py); cheap ones first."""

CORE_TEXTS = (
    "llama", "gpt_oss", "gemma2", "gemma4_text", "qwen3_next", "deepseek_v3", "falcon_h1", "jamba"
)  # fmt: skip
"""They have windows, states, experts, latent attention, fixes, caches that can't be stored, and
states that would count padding."""
MIN_FAMILIES = 2
WHOLE_FOLDERS = frozenset({"browser", "clients", "scale"})
WHOLE_MARKERS = ("whole", "alone")

FOLDERS = ("attack", "e2e", "as_mac", "browser", "docs", "clients", "scale", "integration", "unit")
"""In the order in which their tests start."""

PART_OF_FOLDER = {
    "unit": "unit",
    "integration": "engine",
    "e2e": "daemons",
    "as_mac": "daemons",
    "attack": "clients",
    "browser": "clients",
    "clients": "clients",
    "docs": "clients",
    "scale": "clients",
}
PARTS = ("unit", "engine", "families-1", "families-2", "daemons", "clients")
"""Of the whole run; each can run apart."""


def folder_of(item: pytest.Item) -> str:
    """The folder in tests/ that a test lies in."""
    return _folder_of(item.path)


@cache
def _folder_of(path: Path) -> str:
    return path.relative_to(ROOT / "tests").parts[0]


def part_of(item: pytest.Item) -> str:
    """The part of the whole run (PARTS) that a test belongs to."""
    folder = folder_of(item)
    if folder == "integration" and (family := family_of(item)):
        return "families-1" if family in CORE else "families-2"
    return PART_OF_FOLDER.get(folder, "unit")


def place_of(item: pytest.Item) -> tuple[bool, int]:
    """What tests are sorted by: what is marked `last`, then the place of the folder."""
    folder = folder_of(item)
    place = FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)
    return item.get_closest_marker("last") is not None, place


def group_of(item: pytest.Item) -> str:
    """The tests that a test shares a worker with."""
    folder = folder_of(item)
    if own := item.get_closest_marker("xdist_group"):
        return str(own.args[0])
    if folder == "integration" and (family := family_of(item)):
        return f"family {family}"
    from tests.support.daemons import kind_of  # as late as pytest, which rewrites its asserts

    if kind := kind_of(item):
        return f"daemon {kind}"
    return str(item.path.relative_to(ROOT / "tests"))


def split(
    items: Sequence[pytest.Item], named: Collection[str] = ()
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Tests that run by default, and the others, each in their order.

    named: folders of WHOLE_FOLDERS whose tests run nevertheless.
    """
    others = {
        item
        for item in items
        if folder_of(item) in WHOLE_FOLDERS.difference(named)
        or any(map(item.get_closest_marker, WHOLE_MARKERS))
    }
    of_functions: dict[object, list[tuple[str, pytest.Item]]] = defaultdict(list)
    for item in items:
        if item not in others and (family := family_of(item)):
            of_functions[getattr(item, "function", item)].append((family, item))
    for tried in of_functions.values():
        names = list(dict.fromkeys(family for family, _ in tried))
        marker = tried[0][1].get_closest_marker("families")
        chosen = choose(names, marker.args if marker else None)
        others.update(item for family, item in tried if family not in chosen)
    return [i for i in items if i not in others], [i for i in items if i in others]


def family_of(item: pytest.Item) -> str | None:
    """The family of models that a test is about, if its parameters name one."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or (models := sys.modules.get("tests.tiny_models")) is None:
        return None  # nobody has asked for a tiny model
    names = set(models.FAMILIES)
    values = (value for value in callspec.params.values() if isinstance(value, str))
    return next((value for value in values if value in names), None)


def choose(names: Sequence[str], columns: Collection[str] | None) -> set[str]:
    """The families of `names` that a test runs for: by the columns that it names, if any.

    A test with a list of its own keeps every mechanism that its families have.
    """
    core = [name for name in CORE if name in names]
    if columns is None:
        from tests.support.mechanisms import COLUMNS

        return {*core, *cover(names, COLUMNS, core), rotating(head())}
    chosen = cover(names, columns, cover(core, columns))
    spare = [name for name in [*core, *names] if name not in chosen]
    return {*chosen, *spare[: max(0, MIN_FAMILIES - len(chosen))]}


def cover(
    names: Sequence[str], columns: Collection[str], chosen: Collection[str] = ()
) -> list[str]:
    """`chosen`, and the first few of `names` that have with them every value which any of `names`
    has in these columns."""
    found = list(chosen)
    missing = {value for name in names for value in mechanisms_of(name, columns)}
    missing -= {value for name in found for value in mechanisms_of(name, columns)}
    while missing:
        best = max(names, key=lambda name: len(missing & mechanisms_of(name, columns)))
        found.append(best)
        missing -= mechanisms_of(best, columns)
    return found


def mechanisms_of(name: str, columns: Collection[str]) -> frozenset[str]:
    """See `tests.support.mechanisms`, which only tests of models can import in time."""
    from tests.support import mechanisms

    return mechanisms.mechanisms_of(name, columns)


def rotating(commit: str) -> str:
    """The family that runs beside the core families at this commit."""
    from tests.tiny_models import FAMILIES

    rest = [name for name in FAMILIES if name not in CORE]
    return rest[zlib.crc32(commit.encode()) % len(rest)]


@cache
def head() -> str:
    """The commit that is checked out; empty where there is no repository."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
