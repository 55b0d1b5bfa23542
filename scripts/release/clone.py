"""A clone of the repository's last commit, from which packages are built."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

from scripts.release.artifacts import CheckFailed

EXAMPLE = "https://example.invalid/vlm_server"
IDENTITY = ("-c", "user.name=rehearsal", "-c", "user.email=rehearsal@example.invalid")


def clone(root: Path, folder: Path, rehearsed: str | None) -> Path:
    """`folder`, with the commit that is released; as if it were tagged for the version `rehearsed`.

    Raises CheckFailed if nothing is rehearsed, and the commit has no tag or the project no address.
    """
    _git(root, "clone", "--quiet", "--no-hardlinks", str(root), str(folder))
    project = folder / "pyproject.toml"
    hooks = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["hatch"]["metadata"]["hooks"]
    has_address = bool(hooks["custom"]["repository"])
    if rehearsed is not None:
        if not has_address:
            named, text = f'repository = "{EXAMPLE}"', project.read_text(encoding="utf-8")
            project.write_text(re.sub(r'(?m)^repository = ""', named, text), encoding="utf-8")
            _git(folder, *IDENTITY, "commit", "--quiet", "--all", "--message", "Name an address")
        _git(folder, *IDENTITY, "tag", f"v{rehearsed}")
    elif not has_address:
        raise CheckFailed("pyproject.toml names no address: [tool.hatch.metadata.hooks.custom]")
    elif not _git(folder, "tag", "--points-at", "HEAD").startswith("v"):
        raise CheckFailed("the last commit has no tag: git tag v1.2.3, or --rehearse 1.2.3")
    return folder


def _git(folder: Path, *words: str) -> str:
    ended = subprocess.run(
        ["git", "-c", "advice.detachedHead=false", *words],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        raise CheckFailed(f"git {' '.join(words)}: {ended.stderr}")
    return ended.stdout
