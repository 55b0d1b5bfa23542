"""`scripts/homebrew_formula`: fills in `packaging/homebrew/vlm-server.rb.in` for one wheel.

uv resolves what the wheel needs on macOS, as the formula installs it: wheels, named by address
and hash. Nothing is downloaded but metadata. `--url` is where the wheel itself will be.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
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
OVERRIDES = Path(__file__).parents[2] / "packaging/overrides.txt"
RELEASES = {(14, 0): "sonoma", (15, 0): "sequoia", (26, 0): "tahoe"}
"""Of macOS, by Homebrew's names: those that MLX has wheels for, the oldest first. The kernels in a
wheel for a newer one use what chips have gained since."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/homebrew_formula")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--url", required=True, help="where the wheel can be downloaded")
    parser.add_argument("--homepage", required=True)
    given = parser.parse_args()
    print(formula(given.wheel, given.url, given.homepage, locked(given.wheel)), end="")


def locked(wheel: Path) -> list[dict[str, Any]]:
    """The packages that `wheel` needs on macOS, as pylock.toml has them, without itself.

    Of the versions that the oldest macOS can have, with all wheels for newer ones.
    """
    oldest, *_, newest = RELEASES
    wanted = f"vlm-server @ {wheel.absolute().as_uri()}\n"
    versions = [f"{each['name']}=={each['version']}\n" for each in resolved(wanted, oldest)]
    return resolved(wanted + "".join(versions), newest)


def resolved(wanted: str, macos: tuple[int, int]) -> list[dict[str, Any]]:
    """What uv makes of these requirements, with the wheels for `macos` and older ones."""
    version = ".".join(map(str, PYTHON))
    words = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--only-binary", ":all:"]
    words += ["--python-platform", "aarch64-apple-darwin", "--python-version", version]
    words += ["--overrides", str(OVERRIDES)]
    target = {"MACOSX_DEPLOYMENT_TARGET": ".".join(map(str, macos))}
    with tempfile.TemporaryDirectory() as folder:
        requirements, lock = Path(folder) / "wanted.in", Path(folder) / "pylock.toml"
        requirements.write_text(wanted)
        subprocess.run([*words, "-o", lock, requirements], env={**os.environ, **target}, check=True)
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
    wheels = [(name, best(package, macos)) for macos, name in RELEASES.items()]
    runs = [list(run) for _, run in itertools.groupby(wheels, lambda each: each[1]["url"])]
    lines = source(wheels[0][1]) if len(runs) == 1 else []
    for run in runs if len(runs) > 1 else ():
        systems = [name for name, _ in run]
        if run is runs[0]:
            systems = [f"{systems[-1]} :or_older"]
        elif run is runs[-1]:
            systems = [f"{systems[0]} :or_newer"]
        for system in systems:
            inside = [f"  {line}" for line in source(run[0][1])]
            lines += [f"on_{system} do", *inside, "end"]
    indented = "".join(f"    {line}\n" for line in lines)
    return f'  resource "{package["name"]}" do\n{indented}  end'


def source(wheel: dict[str, Any]) -> list[str]:
    """Where a wheel is, and its hash."""
    return [f'url "{wheel["url"]}", using: :nounzip', f'sha256 "{wheel["hashes"]["sha256"]}"']


def best(package: dict[str, Any], macos: tuple[int, int]) -> dict[str, Any]:
    """The wheel that pip would take there. Raises ValueError if none fits."""
    platforms = list(mac_platforms(macos, "arm64"))
    tags = [
        *cpython_tags(PYTHON, platforms=platforms),
        *compatible_tags(PYTHON, f"cp{PYTHON[0]}{PYTHON[1]}", platforms),
    ]
    for tag in tags:
        for wheel in package.get("wheels", ()):
            if tag in parse_wheel_filename(wheel["url"].rpartition("/")[2])[3]:
                found: dict[str, Any] = wheel
                return found
    raise ValueError(f"{package['name']} has no wheel for macOS {macos[0]}")


if __name__ == "__main__":
    main()
