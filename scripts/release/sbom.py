"""The list of all that an installation consists of, as CycloneDX has it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from scripts.release.artifacts import CheckFailed


def write(environment: Path, project: Path, path: Path) -> None:
    """List the packages of `environment` in `path`. Raises CheckFailed if it is not complete."""
    form = ("--output-format", "JSON", "--output-reproducible", "--validate")
    about = ("--pyproject", str(project / "pyproject.toml"), "--mc-type", "application")
    words = ["-m", "cyclonedx_py", "environment", *form, *about, "--output-file", str(path)]
    ended = subprocess.run(
        [sys.executable, *words, str(environment / "bin/python")], capture_output=True, text=True
    )
    if ended.returncode:
        raise CheckFailed(f"there is no list of packages:\n{ended.stderr[-2000:]}")
    content = json.loads(path.read_text(encoding="utf-8"))
    packages = [content["metadata"]["component"], *content["components"]]
    licensed = sum(1 for package in packages if package.get("licenses"))
    names = {package["name"] for package in packages}
    if not {"vlm-server", "mlx-vlm", "mlx"} <= names:
        raise CheckFailed(f"{path.name} lacks packages: it has {', '.join(sorted(names))}")
    print(f"{path.name}: {len(packages)} packages, {licensed} of them with licences")
