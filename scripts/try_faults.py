"""Mutation check: whether the tests find faults that the project had once and mended.

Each patch in `tests/faults` brings one of them back, and names the tests that should find it in a
line `tests: PATH ...`. It is applied to a copy of the tree, whose `scripts/test` then runs these
tests up to the first that fails, in the environment of this tree. What comes after `--` goes to
`scripts/test`, too. Exits 1 if a fault is not found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_FAULTS = _ROOT / "tests" / "faults"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py::.+?)(?: - .*)?$", re.MULTILINE)
_COLUMNS = ("fault", "", "first failing test", "seconds")


@dataclass(frozen=True)
class Fault:
    """A patch that brings a fault back, and the tests that should find it."""

    patch: Path
    tests: tuple[str, ...]

    @classmethod
    def read(cls, patch: Path) -> Fault:
        """Raises SystemExit if there is no such patch, or if it names no tests."""
        try:
            named = re.search(r"^tests: (.+)$", patch.read_text(), re.MULTILINE)
        except OSError as error:
            raise SystemExit(f"{patch}: {error.strerror}") from None
        if named is None:
            raise SystemExit(f"{patch}: there is no line that begins with `tests: `")
        return cls(patch, tuple(named[1].split()))


@dataclass(frozen=True)
class Result:
    """What became of a fault. test: the first that failed; of a run that broke, what it said."""

    fault: Fault
    is_found: bool
    test: str
    seconds: float

    @property
    def row(self) -> tuple[str, ...]:
        found = "found" if self.is_found else "NOT found"
        return self.fault.patch.stem, found, self.test, f"{self.seconds:.0f}"


def main() -> None:
    own, after = _parted(sys.argv[1:])
    parser = argparse.ArgumentParser(
        prog="scripts/try_faults",
        description="Bring faults back one by one, and see whether the tests find them.",
        usage="%(prog)s [PATCH ...] [--write FILE] [-- ARGUMENTS OF scripts/test]",
    )
    parser.add_argument("patches", nargs="*", type=Path, metavar="PATCH", help="default: all")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table as Markdown")
    options = parser.parse_args(own)
    faults = [Fault.read(patch) for patch in options.patches or sorted(_FAULTS.glob("*.patch"))]
    width = max(len(fault.patch.stem) for fault in faults)
    results = list[Result]()
    for fault in faults:
        results.append(_try(fault, after))
        name, found, test, seconds = results[-1].row
        print(f"{name:{width}}  {found:9}  {seconds:>4} s  {test}", flush=True)
    if options.write:
        options.write.write_text(_markdown(results))
    sys.exit(not all(result.is_found for result in results))


def _parted(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What comes before `--`, and after it."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def _try(fault: Fault, arguments: list[str]) -> Result:
    with _copy() as copy:
        started = time.monotonic()
        if subprocess.run(["git", "apply", fault.patch.resolve()], cwd=copy).returncode:
            return Result(fault, False, "the patch does not apply", 0)
        run = subprocess.run(
            [copy / "scripts" / "test", *fault.tests, "-x", "-q", *arguments],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        seconds = time.monotonic() - started
    failed = _FAILED.search(run.stdout)
    if run.returncode == 0 or failed:
        return Result(fault, failed is not None, failed[1] if failed else "", seconds)
    print(run.stdout, file=sys.stderr)
    return Result(fault, False, f"pytest ended with status {run.returncode}", seconds)


@contextmanager
def _copy() -> Iterator[Path]:
    """A copy of the tree as it is now, with the environment that this program runs in."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    with tempfile.TemporaryDirectory(prefix="vlm-server-fault-") as folder:
        copy = Path(folder).resolve()
        for name in filter(None, listed.stdout.split("\0")):
            if (_ROOT / name).exists():  # else it was deleted, and that is not committed yet
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(_ROOT / name, copy / name)
        (copy / ".venv").symlink_to(sys.prefix)
        (copy / "scripts" / "setup").write_text("#!/bin/sh\n# There is nothing to set up.\n")
        subprocess.run(["git", "init", "-q"], cwd=copy, check=True)  # or a patch might be skipped
        yield copy


def _markdown(results: list[Result]) -> str:
    rows = [_COLUMNS, ("---",) * len(_COLUMNS), *(result.row for result in results)]
    return "".join(f"| {' | '.join(map(_cell, row))} |\n" for row in rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
