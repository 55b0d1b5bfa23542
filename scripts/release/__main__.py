"""`scripts/release_check`: builds, looks into what was built, and tries it; 1 if something fails.

`--debian` tries it in an empty Debian root (mmdebstrap, and root for chroot), `--tools` by uv and
pipx, `--browser` lets Chromium ask on the page. Each round installs anew, without pip's cache.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from scripts.release import artifacts, environments, questions, tools

ROOT = Path(__file__).parents[2]


def main() -> int:
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="release-check-") as scratch:
        folder = Path(scratch)
        try:
            wheel = artifacts.build(ROOT, arguments.out or folder / "dist")
            if arguments.tools:
                tools.check(wheel, folder / "tools")
            with environments.place(arguments.debian, folder) as place:
                place.refuses_without_backend(wheel)
                ask = questions.in_browser if arguments.browser else questions.over_http
                rounds = [place.timed(wheel, ask) for _ in range(arguments.rounds)]
        except artifacts.CheckFailed as failure:
            print(f"failed: {failure}", file=sys.stderr)
            return 1
    report(rounds)
    return 0


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
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--debian", metavar="SUITE", help="in an empty Debian root, such as trixie")
    parser.add_argument("--browser", action="store_true", help="ask on the page, with Chromium")
    parser.add_argument("--tools", action="store_true", help="try uv and pipx as well")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
