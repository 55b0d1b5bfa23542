"""The documents as a site: every page is built, and every link of it has a target."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

pytest.importorskip("material", reason="scripts/setup dev site")


@pytest.mark.whole
def test_site_has_all_pages_and_only_whole_links(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists(), "docs/README.md is its first page"
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"}
    assert pages - {path.parent.name for path in tmp_path.glob("*/index.html")} == set()
    outside = [page for page in tmp_path.rglob("*.html") if "fonts.googleapis" in page.read_text()]
    assert outside == []
