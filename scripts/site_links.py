"""A hook of mkdocs: links out of docs/ lead to the repository, whose other files are no pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_OUTSIDE = re.compile(r"\]\((?P<target>(?:\.\./)+[^)\s#]+)(?P<rest>[^)]*)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """`markdown` of a page, with the repository's addresses of files that are not in docs/."""
    folder = Path(page.file.abs_src_path).parent

    def address(match: re.Match[str]) -> str:
        path = (folder / match["target"]).resolve()
        if path.is_relative_to(config.docs_dir):
            return match[0]
        kind = "tree" if path.is_dir() else "blob"
        url = f"{config.repo_url}/{kind}/main/{path.relative_to(_ROOT)}"
        return f"]({url}{match['rest']})"

    return _OUTSIDE.sub(address, markdown)
