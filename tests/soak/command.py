"""The command: its options, the daemon it asks, and its report."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.soak import plot, report
from tests.soak.run import Plan, Result, soak
from tests.soak.verdict import is_passed, judge
from vlm_server.cli.client.daemon import Daemon, running_daemon
from vlm_server.errors import VlmServerError

DAEMON = (
    *("--set", "cache.max_token_layout_bytes=200000"),
    *("--set", "cache.max_pixel_bytes=16000000"),
    *("--set", "cache.max_encoder_bytes=6000000"),
    *("--set", "cache.max_prefix_bytes=24000000"),
    *("--set", "memory.idle_clear_seconds=1"),
    *("--set", "model.max_context_tokens=8192"),
)
"""Caches that fill within the first minute, and that `mix.refills` can fill again; short rests;
room for conversations that are longer than the embedded model's usable context."""
_START_SECONDS = 300.0
_STOP_SECONDS = 60.0


def main() -> int:
    """Returns 0 if all criteria that could be judged are met, else 1."""
    args = _parser().parse_args()
    try:
        return run(args)
    except VlmServerError as error:
        sys.stderr.write(f"soak: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def run(args: argparse.Namespace) -> int:
    """See `main`. Raises VlmServerError if there is no daemon to ask."""
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    plan = Plan(args.minutes, seed, args.users)
    args.out.mkdir(parents=True, exist_ok=True)
    with _daemon(args.url) as url:
        result = asyncio.run(soak(url, plan))
    return conclude(result, args.out)


def conclude(result: Result, out: Path) -> int:
    """Write and print the report. Returns the exit status."""
    criteria = judge(result)
    text = report.markdown(result, criteria)
    (out / "report.md").write_text(text)
    (out / "report.json").write_bytes(report.document(result, criteria))
    plot.draw(result, out / "memory.png")
    sys.stdout.write(text)
    return 0 if is_passed(criteria) else 1


@contextlib.contextmanager
def _daemon(url: str | None) -> Iterator[str]:
    """The URL, without `/v1`, of a ready daemon: at `url`, or started here with the demo model."""
    started = running_daemon(DAEMON, _STOP_SECONDS) if url is None else contextlib.nullcontext(url)
    with started as found:
        with Daemon(found) as daemon:
            daemon.wait_ready(_START_SECONDS)
        yield found.rstrip("/").removesuffix("/v1")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description="Load a daemon with mixed requests and check its memory."
    )
    parser.add_argument("--minutes", type=_positive, default=2.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, help="of all requests (default: a new one)")
    parser.add_argument("--users", type=int, default=16, choices=range(1, 65), metavar="N")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for report.md, report.json and memory.png"
    )
    parser.add_argument(
        "--url",
        metavar="http://HOST:PORT/v1",
        help="a daemon running on this machine (default: start one with small caches)",
    )
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value
