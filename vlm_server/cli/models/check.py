"""`vlm-server models check`: what a model is and needs; then it is loaded and asked."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

from vlm_server.cli import options
from vlm_server.cli.client.daemon import Daemon
from vlm_server.cli.client.keys import own_key
from vlm_server.cli.client.stream import stream_text
from vlm_server.cli.models.pictures import drawn
from vlm_server.cli.own_daemon import running_daemon
from vlm_server.errors import ModelLoadError
from vlm_server.hub.download import look_up
from vlm_server.hub.messages import Plan, size_text
from vlm_server.hub.names import HubName, to_download
from vlm_server.hub.survey import Survey, SurveyRequest, survey
from vlm_server.settings import Settings

_GIB = 1 << 30
_MAX_TOKENS = 64


def run(arguments: argparse.Namespace) -> int:
    """Print what is known, then what was answered. Raises ModelLoadError if it can't be served."""
    settings = options.load_settings(arguments)
    is_here = Path(settings.model.path).is_dir()
    missing = None if is_here else to_download(settings.model.path)
    found, plan = asyncio.run(examine(settings, missing))
    for name, text in facts(settings, found, plan):
        print(f"{name:<13} {text}")
    if found.refusal:
        raise ModelLoadError(found.refusal)
    if plan is not None:
        print(f"\nIt is not on this machine: vlm-server pull {arguments.model}")
        return 0
    if not arguments.no_load:
        _load_and_ask(arguments, settings)
    return 0


async def examine(settings: Settings, missing: HubName | None) -> tuple[Survey, Plan | None]:
    """The model of `settings`; with the plan for the one that is `missing`."""
    plan = await look_up(missing) if missing is not None else None
    return await survey(SurveyRequest(settings.model, settings.memory, plan)), plan


def facts(settings: Settings, found: Survey, plan: Plan | None) -> Iterator[tuple[str, str]]:
    """Name and text of each line."""
    yield "model", settings.model.name
    if plan is not None:
        size, missing = size_text(plan.total_bytes), size_text(plan.missing_bytes)
        yield "on the hub", f"commit {plan.commit}, {size}, {missing} to download"
    else:
        yield "folder", settings.model.path
    support = "checked" if found.is_checked else "not checked: answers may be wrong"
    yield "family", f"{found.family or 'unknown'} ({support}: docs/families.md)"
    yield "weights", found.quantization or "unknown"
    allowed = f"{_gib(found.limit_bytes)} may be used (memory.limit_bytes)"
    yield "memory", f"{_gib(found.memory_bytes)} on {found.device}, of which {allowed}"
    if found.weight_bytes:
        left = _gib(max(0, found.limit_bytes - found.weight_bytes))
        yield "needs", f"{_gib(found.weight_bytes)} for its weights, which leaves {left}"
    tokens = f"{found.context_tokens} tokens"
    if found.fitting_tokens is None or found.kv_bytes is None:
        yield "context", f"{tokens}; how many fit is known when the weights are here"
    else:
        room = _gib(found.kv_bytes)
        yield "context", f"{found.fitting_tokens} of {tokens} fit, which take {room}"


def _load_and_ask(arguments: argparse.Namespace, settings: Settings) -> None:
    """Raises CommandFailed if it does not start, or does not answer."""
    started = time.monotonic()
    own = running_daemon(options.settings_arguments(arguments), settings.server.drain_seconds + 10)
    with own as url, Daemon(url, own_key(settings.server)) as daemon:
        daemon.wait_ready(settings.engine.start_timeout_seconds)
        print(f"\nLoaded in {time.monotonic() - started:.1f} s.")
        for each in drawn():
            asked = time.monotonic()
            answer = asyncio.run(_answer(daemon, each.question, each.url))
            seconds = time.monotonic() - asked
            print(f"\n{each.shows}: {each.question}\n  {answer.strip()}  ({seconds:.1f} s)")


async def _answer(daemon: Daemon, question: str, url: str) -> str:
    image = {"type": "image_url", "image_url": {"url": url}}
    content = [image, {"type": "text", "text": question}]
    body = {
        "model": "default",
        "stream": True,
        "max_tokens": _MAX_TOKENS,
        "messages": [{"role": "user", "content": content}],
    }
    return "".join([text async for text in stream_text(daemon, json.dumps(body).encode())])


def _gib(num_bytes: int) -> str:
    size = num_bytes / _GIB
    return f"{size:.1f} GiB" if size >= 1 else f"{1024 * size:.0f} MiB"
