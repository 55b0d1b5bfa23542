"""Actions of `vlm-server models` and `pull`: list, check, download and remove checkpoints."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from vlm_server.cli import options, text
from vlm_server.cli.client.daemon import Daemon, address_of, own_key, running_daemon
from vlm_server.cli.client.questions import answer_to, questions_for, rankings, writes
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.cli.log import set_up_logging
from vlm_server.cli.progress import ProgressLine
from vlm_server.errors import ConfigError, ModelLoadError, NotAvailable
from vlm_server.hub import find, layout
from vlm_server.hub.download import download, look_up
from vlm_server.hub.examination import Examination, ExaminationRequest, check_plan, examine
from vlm_server.hub.messages import DownloadPlan, Progress
from vlm_server.hub.names import HubName, to_download
from vlm_server.models import EMBEDDED
from vlm_server.nearest import did_you_mean
from vlm_server.platform.terminal import columns_of
from vlm_server.settings import EMBEDDED_MODEL, ListedModel, Settings
from vlm_server.sizes import file_size, memory_size

_UNKNOWN = "\u2013"
_EMBEDDED_PLACE: Literal["vlm-server"] = "vlm-server"


class _ModelRow(msgspec.Struct):
    """A model in the list; None is unknown, as is the size of a model that the daemon alone has."""

    name: str
    bytes: int | None = None
    family: str | None = None
    weights: str | None = None
    place: str | None = None
    folder: str | None = None
    complete: bool = True
    state: str | None = None


def pull(arguments: argparse.Namespace) -> int:
    """Download a model, or its newest version, to the hub's cache. Raises VlmServerError."""
    if arguments.model == EMBEDDED_MODEL:
        print(f"{EMBEDDED_MODEL} is a part of vlm-server.\nServe it: vlm-server serve")
        return 0
    name = _hub_name(arguments.model)
    settings = options.load_settings_only(arguments)
    set_up_logging(settings.log)
    progress = ProgressLine(sys.stderr)

    async def approve(plan: DownloadPlan) -> None:
        progress.clear()
        size, missing_text = file_size(plan.total_bytes), file_size(plan.missing_bytes)
        print(
            f"{plan.repo} at {plan.commit}: {len(plan.files)} files, {size}, {missing_text} to come"
        )
        await check_plan(settings.model, settings.memory, plan)

    def show(news: Progress) -> None:
        progress.show(str(news), news.fraction)

    try:
        folder = asyncio.run(download(name, show, approve))
    except NotAvailable as error:
        if find.find_by_name(str(name), settings.model.search_folders) is None:
            raise
        raise NotAvailable(f"{error}. {name} is here, perhaps in an older version") from None
    except KeyboardInterrupt:
        text.say("Interrupted: what is here is kept, and pull goes on from there.")
        raise
    finally:
        progress.clear()
    print(f"{name} is in {folder}\nServe it: vlm-server serve --model {name}")
    return 0


def list_models(arguments: argparse.Namespace) -> int:
    """Print a table of models that `serve --model` finds or a daemon serves, or their names.

    Raises CommandFailed if the daemon of `--url` does not answer.
    """
    settings = options.load_settings(arguments)
    checkpoints = find.find_all(settings.model.search_folders)
    checkpoints.append(find.LocalCheckpoint(EMBEDDED, EMBEDDED_MODEL, _EMBEDDED_PLACE))
    if arguments.names:
        print("\n".join(sorted({model.name for model in checkpoints})))
        return 0
    served = _served_models(arguments, settings)
    rows = _model_rows(checkpoints, served)
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(rows), indent=2))
        return 0
    head = ("NAME", "SIZE", "FAMILY", "WEIGHTS", *(("SERVED",) if served else ()), "WHERE")
    cells = [head, *(_cells(row, with_state=bool(served)) for row in rows)]
    print(_table_of(cells, columns_of(sys.stdout)))
    if len(rows) == 1 and sys.stdout.isatty():
        text.say("Get a larger model: 'vlm-server pull ORG/NAME'")
    return 0


def _model_rows(
    checkpoints: Sequence[find.LocalCheckpoint], served: Mapping[str, Mapping[str, Any]]
) -> list[_ModelRow]:
    """Rows of the checkpoints here, of unfinished downloads, and of what only a daemon has."""
    rows = [
        _checkpoint_row(model, config)
        for model in checkpoints
        if layout.is_language_model(config := _config(model))
    ]
    names = {row.name for row in rows}
    rows += [_download_row(model) for model in find.find_unfinished() if model.name not in names]
    names = {row.name for row in rows}
    rows += [
        _ModelRow(name, family=model.get("family"), weights=model.get("quantization"))
        for name, model in served.items()
        if name not in names
    ]
    for row in rows:
        row.state = served.get(row.name, {}).get("state")
    return rows


def _table_of(rows: list[tuple[str, ...]], columns: int | None) -> str:
    """The table, without families where it would be wider than the terminal."""
    whole = text.table(rows)
    if columns is None or max(map(len, whole.splitlines())) <= columns:
        return whole
    return text.table([(*row[:2], *row[3:]) for row in rows], columns)


def _served_models(arguments: argparse.Namespace, settings: Settings) -> dict[str, dict[str, Any]]:
    """What the daemon tells of each of its models, by name; empty if none runs or tells it."""
    with Daemon(*address_of(arguments, settings)) as daemon:
        try:
            if arguments.url or daemon.is_there():
                return {str(model["id"]): model for model in daemon.list_models()}
        except CommandFailed:
            if arguments.url:
                raise
    return {}


def _config(checkpoint: find.LocalCheckpoint) -> dict[str, Any]:
    return layout.read_object(checkpoint.folder / layout.CONFIG)


def _checkpoint_row(checkpoint: find.LocalCheckpoint, config: dict[str, Any]) -> _ModelRow:
    return _ModelRow(
        name=checkpoint.name,
        bytes=sum(path.stat().st_size for path in layout.weight_files(checkpoint.folder)),
        family=layout.family(config) or None,
        weights=layout.quantization(config) or None,
        place=checkpoint.place,
        folder=str(checkpoint.folder),
        complete=checkpoint.is_complete,
    )


def _download_row(checkpoint: find.LocalCheckpoint) -> _ModelRow:
    """The row of an unfinished download."""
    size = sum(path.stat().st_size for path in (checkpoint.folder / "blobs").iterdir())
    folder = str(checkpoint.folder)
    return _ModelRow(checkpoint.name, size, place=checkpoint.place, folder=folder, complete=False)


def _cells(model_row: _ModelRow, *, with_state: bool) -> tuple[str, ...]:
    where = text.from_home(model_row.folder or "the daemon")
    if model_row.place in ("hub cache", _EMBEDDED_PLACE):
        where = model_row.place
    if not model_row.complete:
        where = "not complete: pull it again"
    size = None if model_row.bytes is None else file_size(model_row.bytes)
    known = (size, model_row.family, model_row.weights)
    state = (model_row.state or "",) if with_state else ()
    return (model_row.name, *(fact or _UNKNOWN for fact in known), *state, where)


def remove(arguments: argparse.Namespace) -> int:
    """Remove a model from the hub's cache after the user has agreed."""
    from vlm_server.hub import cached

    if arguments.model == EMBEDDED_MODEL:
        raise ConfigError(
            f"{EMBEDDED_MODEL} is a part of vlm-server: it can't be removed; "
            "'vlm-server serve --model ORG/NAME' serves another model in its place"
        )
    name = _hub_name(arguments.model)
    settings = options.load_settings_only(arguments)
    plan = cached.removal(name)
    if plan is None:
        checkpoint = find.find(str(name), settings.model.search_folders)
        where = (
            f"in {checkpoint.folder}, which you may remove yourself" if checkpoint else "not here"
        )
        raise CommandFailed(f"{name} is not in the hub's cache ({find.hub_cache()}): it is {where}")
    print(f"{name}: {file_size(plan.size_bytes)} in {find.hub_cache()}")
    for path in plan.paths:
        print(f"  {path}")
    if not text.is_confirmed("Remove this?", "Nothing was removed.", is_given=arguments.yes):
        return 1
    plan.execute()
    if remaining_paths := [str(path) for path in plan.paths if path.exists()]:
        raise CommandFailed(f"could not remove {', '.join(remaining_paths)}")
    print(f"Removed {name}.")
    return 0


def _hub_name(word: str) -> HubName:
    if (name := HubName.parse(word)) is None:
        close = did_you_mean(word, find.all_names())
        raise ConfigError(
            f"{word!r} is not a name of the hub (ORG/NAME or ORG/NAME@REVISION){close}"
        )
    return name


def check(arguments: argparse.Namespace) -> int:
    """Print facts about a model, and its answers. Raises ModelLoadError if it can't be served."""
    settings = _with_adapters(_with_embedded(options.load_settings(arguments)), arguments.adapter)
    is_here = Path(settings.model.path).is_dir()
    hub_name = None if is_here else to_download(settings.model.path)
    examination, plan = asyncio.run(_examine_model(settings, hub_name))
    print(text.facts(facts(settings, examination, plan), columns_of(sys.stdout)))
    name = settings.model.name
    if examination.refusal:
        raise ModelLoadError(f"{name} can't be served here: {examination.refusal}")
    if plan is None and not arguments.no_load:
        _load_and_ask(arguments, settings)
    verdict = f"{name} fits; it was {'not loaded' if arguments.no_load else 'loaded and tried'}."
    if plan is not None:
        pull_it = f"vlm-server pull {arguments.model}"
        verdict = f"The weights of {name} fit; they are not on this machine yet: {pull_it}"
    print(f"\n{verdict}")
    return 0


def _with_embedded(settings: Settings) -> Settings:
    """Settings with the folder of the embedded model, if that is served."""
    if settings.model.path:
        return settings
    model = msgspec.structs.replace(settings.model, path=str(EMBEDDED), name=EMBEDDED_MODEL)
    return msgspec.structs.replace(settings, model=model)


def _with_adapters(settings: Settings, folders: Sequence[Path]) -> Settings:
    """Settings with more adapters of the model."""
    base, models = settings.model.name, dict(settings.models)
    for folder in folders:
        models[folder.absolute().name] = ListedModel(base=base, adapter=str(folder.absolute()))
    return msgspec.structs.replace(settings, models=models)


async def _examine_model(
    settings: Settings, hub_name: HubName | None
) -> tuple[Examination, DownloadPlan | None]:
    """Examine the model of `settings`; and its plan, if it is on the hub as `hub_name`."""
    plan = await look_up(hub_name) if hub_name is not None else None
    adapters = settings.adapters_of(settings.model.name)
    request = ExaminationRequest(settings.model, settings.memory, plan, adapters, settings.cache)
    return await examine(request), plan


def facts(
    settings: Settings, examination: Examination, plan: DownloadPlan | None
) -> Iterator[tuple[str, str]]:
    """Name and text of each line."""
    yield "model", settings.model.name
    if plan is not None:
        size, missing_text = file_size(plan.total_bytes), file_size(plan.missing_bytes)
        yield "on the hub", f"commit {plan.commit}, {size}, {missing_text} to download"
    else:
        yield "folder", settings.model.path
    if adapters := settings.adapters_of(settings.model.name):
        yield "adapters", ", ".join(adapters)
    support = "checked" if examination.is_checked else "not checked: answers may be wrong"
    yield "family", f"{examination.family or 'unknown'} ({support}: docs/families.md)"
    yield "weights", examination.quantization or "unknown"
    limit_text = f"{memory_size(examination.limit_bytes)} may be used (memory.max_bytes)"
    yield (
        "memory",
        f"{memory_size(examination.memory_bytes)} on {examination.device}, of which {limit_text}",
    )
    if examination.weight_bytes:
        free_text = memory_size(max(0, examination.limit_bytes - examination.weight_bytes))
        yield (
            "needs",
            f"{memory_size(examination.weight_bytes)} for its weights, which leaves {free_text}",
        )
    if examination.drafter:
        yield "drafter", f"{examination.drafter} (model.drafter), part of what its weights need"
    tokens = f"{examination.context_tokens} tokens"
    if examination.makes_vectors:
        yield "makes", "vectors or scores of inputs, and no answers (docs/embeddings.md)"
        yield "context", f"{tokens} in an input; no KV is kept"
    elif examination.fitting_tokens is None or examination.kv_bytes is None:
        yield "context", f"{tokens}; how many fit is known when the weights are here"
    else:
        room = memory_size(examination.kv_bytes)
        yield "context", f"{examination.fitting_tokens} of {tokens} fit, which take {room}"


def _load_and_ask(arguments: argparse.Namespace, settings: Settings) -> None:
    """Print a daemon's answers to all test questions, or its rankings. Raises CommandFailed."""
    started_at = time.monotonic()
    words = options.settings_arguments(arguments)
    for name in {folder.absolute().name for folder in arguments.adapter}:
        for key in ("base", "adapter"):
            value = json.dumps(getattr(settings.models[name], key))
            words += ["--set", f"models.{name}.{key}={value}"]
    new_daemon = running_daemon(words, settings.server.drain_timeout_seconds + 10)
    with new_daemon as url, Daemon(url, own_key(settings.server)) as daemon:
        daemon.wait_ready(settings.engine.start_timeout_seconds)
        print(f"\nLoaded in {time.monotonic() - started_at:.1f} s.")
        if not writes(daemon):
            for ranking in rankings(daemon):
                print(f"\n{ranking.query}: nearest is\n  {ranking.first}  ({ranking.score:.3f})")
            return
        for question in questions_for(daemon):
            asked_at = time.monotonic()
            answer = answer_to(question, daemon)
            seconds = time.monotonic() - asked_at
            print(f"\n{question.subject}: {question.text}\n  {answer}  ({seconds:.1f} s)")
