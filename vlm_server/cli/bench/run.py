"""Steps of `vlm-server bench`: start servers, measure, report."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path

from vlm_server.cli import options
from vlm_server.cli.bench import day, report, scenarios
from vlm_server.cli.bench.command import SCENARIOS
from vlm_server.cli.bench.day import DaySample
from vlm_server.cli.bench.figures import Figure
from vlm_server.cli.bench.material import Material, parse_size
from vlm_server.cli.bench.report import BenchPlan, BenchRun
from vlm_server.cli.bench.servers import (
    BenchTarget,
    Client,
    find_model,
    parse_url,
    server_kind,
    start_server,
)
from vlm_server.cli.client.daemon import find_and_say, own_key, read_key
from vlm_server.cli.progress import ProgressLine
from vlm_server.cli.text import say
from vlm_server.errors import ConfigError
from vlm_server.hub import find
from vlm_server.hub.names import to_download
from vlm_server.nearest import did_you_mean
from vlm_server.platform.private_folder import PrivateFolder
from vlm_server.platform.terminal import columns_of
from vlm_server.supervisor.engine_process.start import for_any_server

_STDOUT = Path("-")
_RUNNING = "daemon"
"""Name of the server that is measured if none is named."""
OnBegin = Callable[[str, int, str], None]
"""Callback for a run that begins: scenario, round, server."""


def run(args: argparse.Namespace) -> int:
    """Returns 0 if every server answered a request, else 1. Raises VlmServerError."""
    try:
        return asyncio.run(_bench_until_signal(args))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _bench_until_signal(args: argparse.Namespace) -> int:
    """Run the bench; SIGTERM acts like Ctrl-C, so that no started server is left running."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await bench(args)


async def bench(args: argparse.Namespace) -> int:
    """Measure as `args` say, and write even if it ends early; returns the exit code."""
    plan = _plan(args)
    _check_target(args.json)
    runs: list[BenchRun] = []
    async with contextlib.AsyncExitStack() as stack:
        targets = await _targets(args, stack)
        clients = [await stack.enter_async_context(Client(t, args.timeout)) for t in targets]
        progress, total = ProgressLine(sys.stderr), plan.num_runs(len(clients))

        def begin(scenario: str, round_: int, server: str) -> None:
            if sys.stderr.isatty():
                name = report.run_name(scenario, round_, plan)
                progress.show(f"{server}: {name}", len(runs) / total)

        try:
            async for run in measure(clients, plan, begin):
                runs.append(run)
                progress.clear()
                say(report.progress(run, plan))
        finally:
            progress.clear()
            _write(args.json, targets, plan, runs)
    answering_servers = {
        run.server for run in runs if any(answer.error is None for answer in run.answers)
    }
    return 0 if all(target.name in answering_servers for target in targets) else 1


def _write(
    file: Path | None, targets: Sequence[BenchTarget], plan: BenchPlan, runs: Sequence[BenchRun]
) -> None:
    """Print the table, or the JSON if `file` is `-`; write the JSON into another `file`."""
    if file == _STDOUT:
        print(report.document(targets, plan, runs).decode())
        return
    print(report.comparison(targets, plan, runs, columns_of(sys.stdout)))
    if file is not None:
        file.write_bytes(report.document(targets, plan, runs))


async def measure(
    clients: Sequence[Client], plan: BenchPlan, on_begin: OnBegin = lambda *_: None
) -> AsyncIterator[BenchRun]:
    """The runs of `plan`. Servers alternate within each scenario, in a rotating order."""
    for client in clients:
        on_begin("warm-up", 0, client.target.name)
        yield await _run("warm-up", 0, client, plan)
    for round_ in range(1, plan.rounds + 1):
        for scenario in plan.scenarios:
            for turn in range(len(clients)):
                client = clients[(round_ - 1 + turn) % len(clients)]
                on_begin(scenario, round_, client.target.name)
                yield await _run(scenario, round_, client, plan)


async def _run(scenario: str, round_: int, client: Client, plan: BenchPlan) -> BenchRun:
    material = Material(plan.image_size, plan.seed, scenario, round_)
    figures: list[Figure] = []
    samples: list[DaySample] = []
    start = time.perf_counter()
    gc.collect()
    gc.disable()  # its pauses would distort the times
    try:
        if scenario in scenarios.SCENARIOS:
            figures = await scenarios.SCENARIOS[scenario](client, material)
        elif scenario == day.NAME:
            samples = await day.spend_day(client, material, plan.day_seconds)
            figures = day.figures(samples)
        else:
            await scenarios.warm_up(client, material)
    finally:
        gc.enable()
    seconds = time.perf_counter() - start
    name, answers = client.target.name, client.take_answers()
    return BenchRun(scenario, round_, name, seconds, figures, answers, samples)


def _check_target(file: Path | None) -> None:
    """Raises ConfigError if `file` could not be written after the measurements."""
    if file not in (None, _STDOUT) and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise ConfigError(f"--json {file}: it is a folder, or there is no folder for it")


def _plan(args: argparse.Namespace) -> BenchPlan:
    names = tuple(name.strip() for name in args.scenarios.split(","))
    if unknown := [name for name in names if name not in SCENARIOS]:
        close = did_you_mean(unknown[0], SCENARIOS) or f"; there are: {', '.join(SCENARIOS)}"
        raise ConfigError(f"--scenarios: there is no {unknown[0]!r}{close}")
    if args.rounds < 1:
        raise ConfigError(f"--rounds: at least 1, not {args.rounds}")
    if not args.minutes > 0:
        raise ConfigError(f"--minutes: above 0, not {args.minutes:g}")
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    return BenchPlan(names, args.rounds, parse_size(args.size), seed, 60 * args.minutes)


async def _targets(args: argparse.Namespace, stack: contextlib.AsyncExitStack) -> list[BenchTarget]:
    key = read_key(args.api_key_file) if args.api_key_file else None
    if args.model is not None and not args.start:
        raise ConfigError(
            "--model is for servers that --start starts; a running one is asked for "
            "another of its models by --url NAME=URL,MODEL"
        )
    targets = [parse_url(text, key) for text in args.url]
    if not targets and not args.start:
        targets = [await asyncio.to_thread(running_target, key)]
    names = [*_number_names(args.start), *(target.name for target in targets)]
    _check(args, names, targets)
    folder = checkpoint(args.model) if args.start else Path()
    _warn_if_busy()
    private = PrivateFolder()
    stack.callback(private.close)
    look = partial(for_any_server, private, with_openblas=True)
    environment = await asyncio.to_thread(look) if args.start else {}
    ready_targets = []
    for name, kind_name in zip(names, args.start, strict=False):
        say(f"starting {name}")
        kind = server_kind(kind_name, with_drafts=args.drafts == "on", settings=args.set)
        server = start_server(name, kind, folder, environment)
        ready_targets.append(await stack.enter_async_context(server))
    return ready_targets + [await find_model(target) for target in targets]


def _check(args: argparse.Namespace, names: list[str], targets: list[BenchTarget]) -> None:
    if len(set(names)) < len(names):
        raise ConfigError("two servers have the same name")
    if len({(target.base_url, target.model) for target in targets}) < len(targets):
        raise ConfigError("the same server twice: its second run would find the images cached")
    if args.start and args.model is None:
        raise ConfigError("--start needs --model, a checkpoint's folder or name")


def running_target(key: str | None) -> BenchTarget:
    """The daemon that runs here. Raises ConfigError."""
    server = options.load_settings(options.parse_settings([])).server
    return BenchTarget(_RUNNING, find_and_say(server), "", key or own_key(server))


def checkpoint(text: str) -> Path:
    """The folder of the checkpoint `text`. Raises ConfigError if it is not on this machine."""
    if (local_checkpoint := find.find(text)) is not None:
        return local_checkpoint.folder.absolute()
    if to_download(text) is not None:
        raise ConfigError(f"--model {text} is not on this machine: run 'vlm-server pull {text}'")
    close = did_you_mean(text, find.all_names())
    raise ConfigError(f"--model {text} is neither a folder nor a model on this machine{close}")


def _number_names(kinds: list[str]) -> list[str]:
    """Names for servers of these kinds: `ours`, `ours-2`, ..."""
    counts = (kinds[:place].count(kind) for place, kind in enumerate(kinds, 1))
    return [f"{kind}-{n}" if n > 1 else kind for kind, n in zip(kinds, counts, strict=True)]


def _warn_if_busy() -> None:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        say(f"this machine is busy (load {load:.1f}, {cores} cores): times will be too high")
