"""The greeting of `vlm-server serve`: where the daemon listens, and how to ask it."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, TextIO

from vlm_server import __version__
from vlm_server.cli.client.questions import red_circle_url
from vlm_server.platform.terminal import BOLD, styled
from vlm_server.protocol import ModelFacts
from vlm_server.settings import Settings, Sources

_UNKNOWN = ModelFacts()
_DEFAULT_URL = "http://127.0.0.1:8000/v1"


def first_words(url: str, model_name: str, stream: TextIO, sources: Sources) -> str:
    """Text while the model loads; for a program, the address in one line."""
    if not stream.isatty():
        return f"Listening on {url}"
    page = url.removesuffix("/v1")
    rows = [("model", model_name), ("address", url), ("page", page)]
    rows += [("settings", source) for source in dict.fromkeys(sources.values())]
    lines = [f"  {name:<8} {styled(text, BOLD, stream)}" for name, text in rows]
    return "\n".join([f"vlm-server {__version__}", "", *lines, ""])


def invitation(
    url: str, seconds: float, settings: Settings, stream: TextIO, facts: ModelFacts = _UNKNOWN
) -> str:
    """The text for a person at a terminal when the model is ready."""
    drafter = _drafter_line(facts)
    if not facts.writes:
        return f"Ready after {seconds:.1f} s.\n\nCtrl-C stops the daemon."
    words = [_program(), "ask"]
    if url != _DEFAULT_URL:
        words += ["--url", url]
    if settings.server.needs_key:
        words += ["--api-key-file", "FILE"]
    if facts.reads_images:
        command = shlex.join([*words, "picture.png"]) + ' "What is in this picture?"'
    else:
        command = shlex.join(words) + ' "Why is the sky blue?"'
    return (
        f"Ready after {seconds:.1f} s. Open the page, or ask from another terminal:\n\n"
        f"  {styled(command, BOLD, stream)}\n\n{drafter}Ctrl-C stops the daemon."
    )


def _drafter_line(facts: ModelFacts) -> str:
    return f"Tokens are drafted by {facts.drafter} where that is faster.\n" if facts.drafter else ""


def _program() -> str:
    """Name by which a shell finds the program."""
    return "vlm-server" if shutil.which("vlm-server") else str(Path(sys.prefix, "bin/vlm-server"))


def greeting(url: str, model_name: str, settings: Settings, facts: ModelFacts = _UNKNOWN) -> str:
    """The text for a program when the model is ready: the address, and an example request."""
    with_key = settings.server.needs_key
    example = example_request(url, model_name, facts, with_key=with_key)
    has_image = facts.writes and facts.reads_images
    return (
        f"Ready: {model_name} is served at {url}\n{_drafter_line(facts)}\n"
        f"Try it{' with a small image of a red circle' if has_image else ''}:\n\n{example}\n"
    )


def example_request(
    url: str, model_name: str, facts: ModelFacts = _UNKNOWN, *, with_key: bool
) -> str:
    """`curl` command, with an image if possible, and a placeholder for an API key."""
    path, body = _example(facts)
    words = ["curl", f"{url}{path}", "-H", "Content-Type: application/json"]
    if with_key:
        words += ["-H", "Authorization: Bearer YOUR_KEY"]
    return shlex.join([*words, "-d", json.dumps({"model": model_name, **body})])


def _example(facts: ModelFacts) -> tuple[str, dict[str, Any]]:
    """The route of a request that shows what a model does, and its body."""
    question = "Why is the sky blue?"
    if not facts.writes:
        if "embedding" in facts.capabilities:
            return "/embeddings", {"input": question}
        return "/rerank", {"query": question, "documents": ["Air scatters light.", "It is red."]}
    content: Any = question
    if facts.reads_images:
        image = {"type": "image_url", "image_url": {"url": red_circle_url()}}
        content = [image, {"type": "text", "text": "What shape is this?"}]
    messages = [{"role": "user", "content": content}]
    return "/chat/completions", {"max_tokens": 64, "messages": messages}
