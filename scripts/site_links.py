"""A hook of mkdocs: links out of docs/ lead to the repository, whose other files are no pages.

While pyproject.toml has OWNER in place of an account, only their text stays.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_OUTSIDE = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>(?:\.\./)+[^)\s#]+)(?P<rest>[^)]*)\)")


def on_config(config: Any) -> Any:
    """`config` with the address of the repository."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    repository = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    config.repo_url = None if "/OWNER/" in repository else repository
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """`markdown` of a page, with the repository's addresses of files that are not in docs/."""
    folder = Path(page.file.abs_src_path).parent

    def replace(match: re.Match[str]) -> str:
        path = (folder / match["target"]).resolve()
        if path.is_relative_to(config.docs_dir):
            return match[0]
        if not config.repo_url:
            return match["text"]
        kind = "tree" if path.is_dir() else "blob"
        url = f"{config.repo_url}/{kind}/HEAD/{path.relative_to(_ROOT)}"
        return f"[{match['text']}]({url}{match['rest']})"

    return _OUTSIDE.sub(replace, markdown)
