"""docs/fields.md says what is declared, and so what is tested."""

from __future__ import annotations

from tests.unit.api.fields.table import PATH, page


def test_fields_page_equals_the_declarations() -> None:
    """To write it anew: `.venv/bin/python -m tests.unit.api.fields.table`."""
    assert PATH.read_text(encoding="utf-8") == page()
