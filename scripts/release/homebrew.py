"""`scripts/homebrew_formula`: fills in `packaging/homebrew/vlm-server.rb.in` for one wheel.

uv resolves what the wheel needs on macOS, as the formula installs it: wheels, named by address
and hash. Nothing is downloaded but metadata. `--url` is where the wheel itself will be.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from packaging.tags import compatible_tags, cpython_tags, mac_platforms
from packaging.utils import parse_wheel_filename

TEMPLATE = Path(__file__).parents[2] / "packaging/homebrew/vlm-server.rb.in"
PYTHON = (3, 13)
MACOS = (14, 0)
"""The oldest that MLX's wheels are for. Those for newer ones are not used."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/homebrew_formula")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--url", required=True, help="where the wheel can be downloaded")
    parser.add_argument("--homepage", required=True)
    given = parser.parse_args()
    print(formula(given.wheel, given.url, given.homepage, locked(given.wheel)), end="")


def locked(wheel: Path) -> list[dict[str, Any]]:
    """The packages that `wheel` needs on macOS, as pylock.toml has them, without itself."""
    version = ".".join(map(str, PYTHON))
    words = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--only-binary", ":all:"]
    words += ["--python-platform", "aarch64-apple-darwin", "--python-version", version]
    with tempfile.TemporaryDirectory() as folder:
        wanted, lock = Path(folder) / "wanted.in", Path(folder) / "pylock.toml"
        wanted.write_text(f"vlm-server @ {wheel.absolute().as_uri()}\n")
        oldest = {"MACOSX_DEPLOYMENT_TARGET": ".".join(map(str, MACOS))}
        subprocess.run([*words, "-o", lock, wanted], env={**os.environ, **oldest}, check=True)
        packages: list[dict[str, Any]] = tomllib.loads(lock.read_text())["packages"]
    return [package for package in packages if package["name"] != "vlm-server"]


def formula(wheel: Path, url: str, homepage: str, packages: list[dict[str, Any]]) -> str:
    """The text of the formula. Raises ValueError for a package without a wheel that fits."""
    values = {
        "HOMEPAGE": homepage,
        "URL": url,
        "VERSION": str(parse_wheel_filename(wheel.name)[1]),
        "SHA256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "PYTHON": ".".join(map(str, PYTHON)),
        "RESOURCES": "\n\n".join(map(resource, packages)),
    }
    text = TEMPLATE.read_text()
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def resource(package: dict[str, Any]) -> str:
    """The formula's lines for one package. Raises ValueError."""
    wheel = best(package)
    return (
        f'  resource "{package["name"]}" do\n'
        f'    url "{wheel["url"]}", using: :nounzip\n'
        f'    sha256 "{wheel["hashes"]["sha256"]}"\n'
        "  end"
    )


def best(package: dict[str, Any]) -> dict[str, Any]:
    """The wheel that pip would take. Raises ValueError if none fits."""
    platforms = list(mac_platforms(MACOS, "arm64"))
    tags = [
        *cpython_tags(PYTHON, platforms=platforms),
        *compatible_tags(PYTHON, f"cp{PYTHON[0]}{PYTHON[1]}", platforms),
    ]
    for tag in tags:
        for wheel in package.get("wheels", ()):
            if tag in parse_wheel_filename(wheel["url"].rpartition("/")[2])[3]:
                found: dict[str, Any] = wheel
                return found
    raise ValueError(f"{package['name']} has no wheel for macOS {MACOS[0]}")


if __name__ == "__main__":
    main()
