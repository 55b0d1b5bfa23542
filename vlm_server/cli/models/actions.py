"""What the commands about models do: list, download and remove."""

from __future__ import annotations

import argparse
import asyncio
import sys

from vlm_server.checkpoints import find, layout
from vlm_server.checkpoints.download import download
from vlm_server.checkpoints.messages import Plan, Progress, size_text
from vlm_server.checkpoints.names import HubName
from vlm_server.checkpoints.survey import check_plan
from vlm_server.cli import options
from vlm_server.cli.failure import CommandFailed
from vlm_server.cli.progress import ProgressLine
from vlm_server.cli.terminal import set_up_logging
from vlm_server.cli.usage.nearest import did_you_mean
from vlm_server.errors import ConfigError
from vlm_server.settings import Settings


def pull(arguments: argparse.Namespace) -> int:
    """Download a model to the hub's cache, or its newest version. Raises VlmServerError."""
    name = _hub_name(arguments.model)
    settings = options.load_settings(argparse.Namespace(**vars(arguments) | {"model": None}))
    set_up_logging(settings.log)
    progress = ProgressLine(sys.stderr)

    async def approve(plan: Plan) -> None:
        progress.clear()
        size, missing = size_text(plan.total_bytes), size_text(plan.missing_bytes)
        print(f"{plan.repo} at {plan.commit}: {len(plan.files)} files, {size}, {missing} to come")
        await check_plan(settings.model, settings.memory, plan)

    def show(seen: Progress) -> None:
        progress.show(str(seen), seen.fraction)

    try:
        folder = asyncio.run(download(name, show, approve))
    except KeyboardInterrupt:
        print("Interrupted: what is here is kept, and pull goes on from there.", file=sys.stderr)
        raise
    finally:
        progress.clear()
    print(f"{name} is in {folder}\nServe it: vlm-server serve --model {name}")
    return 0


def list_models(arguments: argparse.Namespace) -> int:
    """Print a table of what `serve --model` finds by name, or the names alone."""
    settings = options.load_settings(arguments)
    if arguments.names:
        print("\n".join(sorted({one.name for one in find.every(settings.model.search_paths)})))
        return 0
    shown = [one for one in find.every(settings.model.search_paths) if _sees(one)]
    begun = [one for one in find.unfinished() if one.name not in {each.name for each in shown}]
    rows = [*map(_row, shown), *map(_row_of_begun, begun)]
    if not rows:
        print("No models are here. Get one: vlm-server pull ORG/NAME")
        return 0
    head = ("NAME", "SIZE", "FAMILY", "WEIGHTS", "WHERE")
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    return 0


def _sees(found: find.Found) -> bool:
    return layout.sees(layout.read_object(found.folder / layout.CONFIG))


def _row_of_begun(found: find.Found) -> tuple[str, ...]:
    size = sum(path.stat().st_size for path in (found.folder / "blobs").iterdir())
    return (found.name, size_text(size), "?", "?", _not_complete(found))


def _not_complete(found: find.Found) -> str:
    return f"{found.place} (not complete: vlm-server pull {found.name})"


def _row(found: find.Found) -> tuple[str, ...]:
    size = sum(path.stat().st_size for path in layout.weight_files(found.folder))
    config = layout.read_object(found.folder / layout.CONFIG)
    where = str(found.place if found.place == "hub cache" else found.folder)
    where = where if found.is_complete else _not_complete(found)
    kind = (layout.family(config) or "?", layout.quantization(config) or "?")
    return (found.name, size_text(size), *kind, where)


def remove(arguments: argparse.Namespace) -> int:
    """Remove a model from the hub's cache, as the cache's own tools would, once that is granted."""
    from vlm_server.checkpoints import cached  # it takes a moment

    name = _hub_name(arguments.model)
    settings = options.load_settings(argparse.Namespace(**vars(arguments) | {"model": None}))
    plan = cached.removal(name)
    if plan is None:
        raise CommandFailed(_not_cached(name, settings))
    print(f"{name}: {size_text(plan.size_bytes)} in {find.hub_cache()}")
    for path in plan.paths:
        print(f"  {path}")
    if not arguments.yes and not _is_granted("Remove this? [y/N] "):
        print("Nothing was removed.")
        return 1
    plan.execute()
    if left := [str(path) for path in plan.paths if path.exists()]:
        raise CommandFailed(f"could not remove {', '.join(left)}")
    print(f"Removed {name}.")
    return 0


def _not_cached(name: HubName, settings: Settings) -> str:
    found = find.find(str(name), settings.model.search_paths)
    where = f"it is in {found.folder}, which you may remove yourself" if found else "it is not here"
    return f"{name} is not in the hub's cache ({find.hub_cache()}): {where}"


def _is_granted(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _hub_name(text: str) -> HubName:
    if (name := HubName.parse(text)) is None:
        close = did_you_mean(text, [one.name for one in find.every()])
        raise ConfigError(
            f"{text!r} is not a name of the hub (ORG/NAME or ORG/NAME@REVISION){close}"
        )
    return name
