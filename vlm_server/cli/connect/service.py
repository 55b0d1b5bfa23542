"""The running daemon, as a client's settings need it: address, API key, models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from vlm_server.cli.client.daemon import Daemon
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.nearest import did_you_mean

KEY_VARIABLE = "VLM_SERVER_API_KEY"
"""The environment variable that settings refer to, where a client reads keys from there."""
_OUTPUT_SHARE = 4
_MOST_OUTPUT_TOKENS = 32_000


class ServedModel(NamedTuple):
    """A model that writes; `context_tokens` is None if the server does not tell it."""

    name: str
    context_tokens: int | None
    reads_images: bool
    calls_tools: bool

    @property
    def output_tokens(self) -> int | None:
        """What a client may plan for an answer: a quarter of the context, at most 32,000."""
        tokens = self.context_tokens
        return tokens and min(tokens // _OUTPUT_SHARE, _MOST_OUTPUT_TOKENS)


class Service(NamedTuple):
    """The daemon at `url`, which ends in `/v1`. `model` is the one to use first, of `models`."""

    url: str
    key: str | None
    model: ServedModel
    models: tuple[ServedModel, ...]

    @property
    def root(self) -> str:
        """The address without `/v1`, for Anthropic's and Ollama's APIs."""
        return self.url.removesuffix("/v1")


def ask(url: str, key: str | None, model: str | None) -> Service:
    """What the daemon at `url` serves; `model` names the one to use. Raises CommandFailed."""
    with Daemon(url, key) as daemon:
        listed = daemon.list_models()
    models = tuple(_served(entry) for entry in listed if _writes(entry))
    names = [served.name for served in models]
    if not models:
        raise CommandFailed(f"{url} serves no model that writes")
    if model is not None and model not in names:
        close = did_you_mean(model, names) or f"; there are: {', '.join(names)}"
        raise CommandFailed(f"{url} serves no model {model}{close}")
    chosen = models[names.index(model)] if model else models[0]
    state = next(entry.get("state") for entry in listed if entry["id"] == chosen.name)
    if chosen.context_tokens is None and state is not None:
        raise CommandFailed(
            f"{chosen.name} is not loaded ({state}), so its context is not known yet: "
            "try again once it has answered something"
        )
    return Service(url, key, chosen, models)


def _writes(entry: dict[str, Any]) -> bool:
    modalities = entry.get("modalities")
    return not isinstance(modalities, dict) or "text" in modalities.get("output", ())


def _served(entry: dict[str, Any]) -> ServedModel:
    capabilities: Sequence[str] = entry.get("capabilities") or ()
    return ServedModel(
        str(entry["id"]),
        entry.get("max_model_len"),
        "vision" in capabilities,
        "tools" in capabilities,
    )
