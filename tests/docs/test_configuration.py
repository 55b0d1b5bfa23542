"""docs/configuration.md is generated from the settings, and up to date."""

from __future__ import annotations

import msgspec

from tests.docs.configuration import PATH, render, unit
from vlm_server.settings import Settings


def test_configuration_page_is_up_to_date() -> None:
    assert PATH.read_text(encoding="utf-8") == render(), "run: python -m tests.docs.configuration"


def test_configuration_page_lists_every_setting() -> None:
    text = render()
    for section in msgspec.structs.fields(Settings):
        if isinstance(section.default, msgspec.Struct):
            part = text[text.index(f"## `[{section.name}]`") :].partition("\n## ")[0]
            for field in msgspec.structs.fields(type(section.default)):
                assert f"| `{field.name}` |" in part


def test_configuration_units_follow_setting_names() -> None:
    assert unit("limit_bytes", int) == "bytes"
    assert unit("max_step_seconds", float) == "seconds"
    assert unit("separate_api_keys", bool) == ""
    assert unit("path", str) == ""
