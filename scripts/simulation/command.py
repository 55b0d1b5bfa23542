"""The command: measures costs, checks the simulation against real daemons, draws the study."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from scripts.simulation import costs, study
from scripts.simulation.real import check, measure
from scripts.simulation.workload import Workload

COSTS = Path(__file__).parents[2] / "docs/scale/costs.json"


def main() -> int:
    """Returns the exit status: 1 if a check misses its target."""
    args = _parser().parse_args()
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


def _measure(args: argparse.Namespace) -> int:
    costs.write(measure.measure(args.model, args.machine, args.rounds), args.out)
    return 0


def _check(args: argparse.Namespace) -> int:
    known = costs.read(args.costs)
    workloads = [
        Workload(users=args.users, seconds=args.seconds, seed=seed) for seed in range(args.rounds)
    ]
    prefix_bytes = round(args.prefix_tokens * known.kv_bytes_per_token)
    measured = check.measure(args.model, args.workers, workloads, prefix_bytes)
    args.out.write_bytes(msgspec.json.encode(measured))
    return _compare(measured, known)


def _again(args: argparse.Namespace) -> int:
    measured = msgspec.json.decode(args.measured.read_bytes(), type=check.Measured)
    return _compare(measured, costs.read(args.costs))


def _compare(measured: check.Measured, known: costs.Costs) -> int:
    compared = check.compare(measured, known)
    sys.stdout.write(check.table(compared) + "\n")
    return int(any(abs(compared.error(name)) > check.TARGET for name in check.FIGURES))


def _study(args: argparse.Namespace) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    study.study(costs.read(args.costs), args.out, args.seeds)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/simulate_scale", description=__doc__)
    commands = parser.add_subparsers(required=True)
    told = commands.add_parser("measure", help="what a daemon's work costs on this machine")
    told.add_argument("model", type=Path, help="folder of a checkpoint")
    told.add_argument("--machine", required=True, help="in words")
    told.add_argument("--rounds", type=int, default=3)
    told.add_argument("--out", type=Path, required=True, help="file for the costs")
    told.set_defaults(run=_measure)
    told = commands.add_parser("check", help="simulated and real daemons, asked the same")
    told.add_argument("model", type=Path, help="the folder of which the costs are")
    told.add_argument("--workers", type=int, default=1, choices=(1, 2))
    told.add_argument("--users", type=int, required=True)
    told.add_argument("--seconds", type=float, default=60.0, help="of a round")
    told.add_argument("--rounds", type=int, default=3)
    told.add_argument("--prefix-tokens", type=int, default=0, help="of each daemon's prefix cache")
    told.add_argument("--costs", type=Path, default=COSTS)
    told.add_argument("--out", type=Path, required=True, help="file for what was measured")
    told.set_defaults(run=_check)
    told = commands.add_parser("again", help="compares with what `check` measured before")
    told.add_argument("measured", type=Path, help="what `check --out` wrote")
    told.add_argument("--costs", type=Path, default=COSTS)
    told.set_defaults(run=_again)
    told = commands.add_parser("study", help="one worker to 64, simulated, as drawings and JSON")
    told.add_argument("--costs", type=Path, default=COSTS)
    told.add_argument("--seeds", type=int, default=5)
    told.add_argument("--out", type=Path, required=True, help="folder")
    told.set_defaults(run=_study)
    return parser
