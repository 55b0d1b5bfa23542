"""`scripts/release_check`: builds the tagged commit, looks into what was built, and tries it.

Two clones are built and compared; twine uploads what they made to an index of this machine, and
pip installs it from there. 1 if something fails.

`--rehearse 1.2.3` goes on as if the commit were tagged for that version. `--debian` tries it in an
empty Debian root (mmdebstrap, and root for chroot), `--tools` by uv and pipx, `--browser` lets
Chromium ask on the page. Each round installs anew, with an empty cache and again with a full one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from scripts.release import artifacts, environments, index, questions, sbom, tools
from scripts.release.clone import clone

ROOT = Path(__file__).parents[2]


def main() -> int:
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="release-check-") as scratch:
        folder = Path(scratch)
        try:
            rounds = check(arguments, folder)
        except artifacts.CheckFailed as failure:
            print(f"failed: {failure}", file=sys.stderr)
            return 1
    report(rounds)
    return 0


def check(arguments: argparse.Namespace, folder: Path) -> list[environments.Times]:
    """Build, upload, install, ask. Raises CheckFailed."""
    first, second = (clone(ROOT, folder / at, arguments.rehearse) for at in ("one", "another"))
    out = arguments.out or folder / "dist"
    wheel = artifacts.build(first, out)
    artifacts.check_reproducible(second, out, folder / "again")
    if arguments.tools:
        tools.check(wheel, folder / "tools")
    version = wheel.name.split("-")[1]
    ask = questions.in_browser if arguments.browser else questions.over_http
    with (
        index.serve(artifacts.packages(out), folder / "index") as url,
        environments.place(arguments.debian, folder, version, url, by_uv=arguments.uv) as place,
    ):
        rounds = [place.timed(ask) for _ in range(arguments.rounds)]
        if place.root is None:
            sbom.write(place.environment, first, out / f"vlm_server-{version}.cdx.json")
        place.refuses_without_backend()
    return rounds


def report(rounds: list[environments.Times]) -> None:
    """One line for each step: its median, and the least and most."""
    for step in environments.Times._fields:
        seconds = [getattr(times, step) for times in rounds]
        print(
            f"{step:8} {statistics.median(seconds):6.1f} s"
            f"  ({min(seconds):.1f} to {max(seconds):.1f}, {len(seconds)} rounds)"
        )
    whole = [times.whole for times in rounds]
    print(f"{'whole':8} {statistics.median(whole):6.1f} s  ({min(whole):.1f} to {max(whole):.1f})")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/release_check", description=__doc__)
    parser.add_argument("--out", type=Path, help="keep what was built here")
    parser.add_argument("--rehearse", metavar="VERSION", help="as if this version were tagged")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--debian", metavar="SUITE", help="in an empty Debian root, such as trixie")
    parser.add_argument("--browser", action="store_true", help="ask on the page, with Chromium")
    parser.add_argument("--uv", action="store_true", help="install by uv, with overrides.txt")
    parser.add_argument("--tools", action="store_true", help="try uv and pipx as well")
    arguments = parser.parse_args()
    if arguments.uv and arguments.debian:
        parser.error("--uv and --debian exclude each other: the root has no uv")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
