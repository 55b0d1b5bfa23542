"""docs/configuration.md and docs/limits.md are generated from the settings, and up to date."""

from __future__ import annotations

from tests.docs.configuration import LIMITS, PATH, render, render_limits
from vlm_server.settings import all_names
from vlm_server.settings.topics import COMMON, is_fuse


def test_settings_pages_are_up_to_date() -> None:
    advice = "run: python -m tests.docs.configuration"
    assert PATH.read_text(encoding="utf-8") == render(), advice
    assert LIMITS.read_text(encoding="utf-8") == render_limits(), advice


def test_settings_pages_list_each_setting_once() -> None:
    pages = {False: render(), True: render_limits()}
    for full in all_names():
        section, _, name = full.partition(".")
        for is_limit, text in pages.items():
            part = text.partition(f"## `[{section}]`")[2].partition("\n## ")[0]
            assert (f"| `{name}` |" in part) == (is_fuse(full) == is_limit), full


def test_fifteen_settings_come_first() -> None:
    assert len(COMMON) == 15
    text = render()
    places = [text.index(f"| `{full}` |") for full in COMMON]
    assert places == sorted(places)
    assert places[-1] < text.index("## `[server]`")
