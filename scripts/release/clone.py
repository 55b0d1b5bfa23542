"""A clone of the repository's last commit, from which packages are built."""

from __future__ import annotations

import subprocess
from pathlib import Path

from scripts.release.artifacts import CheckFailed

UNKNOWN, EXAMPLE = "/OWNER/", "/rehearsal/"
ADDRESSED = ("pyproject.toml", "README.md", "configs/alerts.yaml", "docs/packages.md")
IDENTITY = ("-c", "user.name=rehearsal", "-c", "user.email=rehearsal@example.invalid")


def clone(root: Path, folder: Path, rehearsed: str | None) -> Path:
    """`folder`, with the commit that is released; as if it were tagged for the version `rehearsed`.

    Raises CheckFailed if nothing is rehearsed, and the commit has no tag or files have OWNER in
    place of the account that publishes them.
    """
    _git(root, "clone", "--quiet", "--no-hardlinks", str(root), str(folder))
    texts = {folder / name: (folder / name).read_text(encoding="utf-8") for name in ADDRESSED}
    without = [path for path, text in texts.items() if UNKNOWN in text]
    if rehearsed is not None:
        for path in without:
            path.write_text(texts[path].replace(UNKNOWN, EXAMPLE), encoding="utf-8")
        if without:
            _git(folder, *IDENTITY, "commit", "--quiet", "--all", "--message", "Name an address")
        _git(folder, *IDENTITY, "tag", f"v{rehearsed}")
    elif without:
        names = ", ".join(path.name for path in without)
        raise CheckFailed(f"{names}: write the account in place of OWNER (docs/releasing.md)")
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
