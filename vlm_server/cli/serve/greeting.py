"""The greeting of `vlm-server serve`: where the daemon listens, what it serves, how to ask it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from vlm_server import __version__
from vlm_server.cli.text import program, toy_hint
from vlm_server.platform.terminal import BOLD, columns_of, hanging, styled
from vlm_server.settings import Settings, Sources
from vlm_server.sizes import memory_size
from vlm_server.supervisor.engine_process.client import EngineStatus

_DEFAULT_URL = "http://127.0.0.1:8000/v1"
_SAMPLE = Path(__file__).parents[2] / "api/page/static/sample.png"
"""A picture with a star, which comes with the program."""


def first_words(
    url: str, names: Sequence[str], settings: Settings, stream: TextIO, sources: Sources
) -> str:
    """Text while the first of the models `names` loads; for a program, the address in one line."""
    if not stream.isatty():
        return f"Listening on {url}"
    first, *others = names
    note = f", and {', '.join(others)} when asked for" if others else ""
    rows = [
        ("page", url.removesuffix("/v1"), ""),
        ("API", url, " of OpenAI, Anthropic and Ollama"),
        ("model", first, note),
    ]
    columns = columns_of(stream)
    lines = [
        hanging(f"  {name:<8} ", text + rest, columns).replace(text, styled(text, BOLD, stream), 1)
        for name, text, rest in rows
    ]
    files = [source for source in dict.fromkeys(sources.values()) if source != "command line"]
    lines += [f"  {'settings':<8} {source}" for source in files]
    hint = [] if settings.model.path else [toy_hint(), ""]
    return "\n".join([f"vlm-server {__version__}", "", *lines, "", *hint])


def ready(url: str, seconds: float, settings: Settings, status: EngineStatus, out: TextIO) -> str:
    """The text on `out` when the model of `status` can be asked."""
    if not out.isatty():
        page = f"and its page at {url.removesuffix('/v1')}"
        text = f"Ready: {status.model_name} is served at {url}, {page}{_memory(status)}."
        return "\n".join((text, *_drafter(status)))
    words = [f"Ready after {seconds:.1f} s{_memory(status)}.", *_drafter(status)]
    lines = [hanging("", text, columns_of(out)) for text in words]
    if command := _command(url, settings, status):
        lines += ["Open the page, or ask from another terminal:", ""]
        lines += [f"  {styled(command, BOLD, out)}", ""]
    return "\n".join([*lines, "Ctrl-C stops the daemon. Running answers are finished first."])


def stopping(num_requests: int, seconds: float) -> str:
    """The text after the first Ctrl-C; `seconds` are those in which requests may finish."""
    if not num_requests:
        return "Stopping."
    requests = "1 request" if num_requests == 1 else f"{num_requests} requests"
    limit = f"for at most {seconds:.0f} s" if seconds >= 1 else "quickly"
    return f"Finishing {requests}, {limit}; press Ctrl-C again to stop now."


def _memory(status: EngineStatus) -> str:
    size_bytes, stats = status.model_facts.size_bytes, status.stats
    if stats is None or not size_bytes:
        return ""
    limit_text = memory_size(stats.memory.limit_bytes)
    return f", with {memory_size(size_bytes)} of weights and a limit of {limit_text} of memory"


def _drafter(status: EngineStatus) -> list[str]:
    drafter = status.model_facts.drafter
    return [f"Tokens are drafted by {drafter} where that is faster."] if drafter else []


def _command(url: str, settings: Settings, status: EngineStatus) -> str:
    """The command that asks the model; empty for one that does not write."""
    if not status.model_facts.writes:
        return ""
    words = [program(), "ask"]
    if url != _DEFAULT_URL:
        words += ["--url", url]
    if settings.server.needs_key:
        words += ["--api-key-file", "FILE"]
    if not status.model_facts.reads_images:
        return f'{shlex.join(words)} "Why is the sky blue?"'
    if settings.model.path:
        return f'{shlex.join(words)} picture.png "What is this?"'
    return f'{shlex.join([*words, str(_SAMPLE)])} "Where is the star?"'
