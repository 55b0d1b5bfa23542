"""The parts of the package's metadata that depend on where the project is published.

An index shows README.md without the repository around it, so its links become absolute: to the
tag of a release, and to the newest state for any other version. While pyproject.toml has OWNER in
place of an account, they stay as they are, and the package names no URLs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE = r"(?!\w+:|#|/)"
_IMAGE = re.compile(rf'(!\[[^\]]*\]\(|\b(?:src|srcset)="){_RELATIVE}')
_LINK = re.compile(rf'(\]\(|\bhref="){_RELATIVE}')


class PublishedMetadata(MetadataHookInterface):
    """Adds `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = str(self.config["repository"])
        if "/OWNER/" not in repository:
            text = with_absolute_links(text, repository, metadata["version"])
            metadata["urls"] = urls(repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def urls(repository: str) -> dict[str, str]:
    """The links that an index shows beside the README; names as in its documentation."""
    return {
        "Homepage": repository,
        "Documentation": f"{repository}/blob/HEAD/docs/README.md",
        "Repository": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
    }


def with_absolute_links(text: str, repository: str, version: str) -> str:
    """README's `text` with links into the `repository` at this version."""
    ref = f"v{version}" if re.fullmatch(r"[\d.]+((a|b|rc)\d+)?", version) else "HEAD"
    text = _IMAGE.sub(rf"\g<1>{repository}/raw/{ref}/", text)
    return _LINK.sub(rf"\g<1>{repository}/blob/{ref}/", text)
