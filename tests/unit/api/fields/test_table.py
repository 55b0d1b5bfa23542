"""docs/fields.md equals the declarations, which are tested."""

from __future__ import annotations

from tests.unit.api.fields.table import PATH, page


def test_fields_page_equals_declarations() -> None:
    """`.venv/bin/python -m tests.unit.api.fields.table` writes it anew."""
    assert PATH.read_text(encoding="utf-8") == page()
