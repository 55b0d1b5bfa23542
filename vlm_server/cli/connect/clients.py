"""The clients whose settings are files: where those are, and what is put into them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vlm_server.cli.connect.change import Edit, Format
from vlm_server.cli.connect.formats import jsonc, toml, yaml
from vlm_server.cli.connect.service import KEY_VARIABLE, Service
from vlm_server.cli.exit_codes import CommandFailed

PROVIDER = "vlm-server"
_AGENT_TOKENS = 16_384
"""A context in which coding agents can begin."""
NO_KEY = "none"
"""The API key for clients that insist on one, where the daemon needs none."""


class Client(NamedTuple):
    """A client with a settings file.

    `folder` is where its settings are by default; it raises CommandFailed without a home.
    `settings_in` is the file for that folder. `edits` are ours, for a file that `is_new` or not.
    `steps` are what remains for its user. `programs` are the names of its program.
    """

    title: str
    form: Format
    folder: Callable[[], Path]
    settings_in: Callable[[Path], Path]
    edits: Callable[[Service, bool], Sequence[Edit]]
    steps: Callable[[Service], Iterator[str]]
    programs: Sequence[str]

    def file(self) -> Path:
        """The settings file. Raises CommandFailed."""
        return self.settings_in(self.folder())


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise CommandFailed("this user has no home folder: set HOME to one") from None


def _folder(variable: str, default: str) -> Path:
    """The folder in an environment variable, or `default` in the home folder."""
    return Path(os.environ.get(variable) or _home() / default)


def _configuration(name: str) -> Path:
    folder = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (folder if folder.is_absolute() else _home() / ".config") / name


# ---- Claude Code: https://code.claude.com/docs/en/settings, .../env-vars --------------------


def _claude_folder() -> Path:
    return _folder("CLAUDE_CONFIG_DIR", ".claude")


def _claude_edits(service: Service, _: bool) -> Sequence[Edit]:
    """All of its models are ours. Its settings can't refer to a variable, so the key is in them."""
    model = service.model
    variables = {
        "ANTHROPIC_BASE_URL": service.root,
        "ANTHROPIC_AUTH_TOKEN": service.key or NO_KEY,
        "ANTHROPIC_MODEL": model.name,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": model.name,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": model.name,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model.name,
    }
    if model.context_tokens:
        variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(model.context_tokens)
        variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(model.output_tokens)
    return [Edit(("env", name), value) for name, value in variables.items()]


def _claude_steps(service: Service) -> Iterator[str]:
    if "ANTHROPIC_API_KEY" in os.environ:
        yield "Unset ANTHROPIC_API_KEY, which Claude Code would ask about."
    yield from _context_step(service)
    yield "Start it: claude"


# ---- Codex: https://developers.openai.com/codex/config-reference ----------------------------


def _codex_folder() -> Path:
    return _folder("CODEX_HOME", ".codex")


def _codex_edits(service: Service, _: bool) -> Sequence[Edit]:
    provider = {"name": PROVIDER, "base_url": service.url, "wire_api": "responses"}
    if service.key:
        provider["env_key"] = KEY_VARIABLE
    tokens = service.model.context_tokens
    return [  # each new key becomes the first line
        *([Edit(("model_context_window",), tokens)] if tokens else []),
        Edit(("model_provider",), PROVIDER),
        Edit(("model",), service.model.name),
        Edit(("model_providers", PROVIDER), provider),
    ]


def _codex_steps(service: Service) -> Iterator[str]:
    yield from _export_step(service)
    yield from _context_step(service)
    yield "Start it: codex"


def _export_step(service: Service) -> Iterator[str]:
    if service.key and os.environ.get(KEY_VARIABLE) != service.key:
        yield f"Set {KEY_VARIABLE} to the daemon's API key in your shell's profile."


def _context_step(service: Service) -> Iterator[str]:
    tokens = service.model.context_tokens
    if tokens and tokens < _AGENT_TOKENS:
        yield (
            f"Serve a model with a longer context: {service.model.name}'s {tokens} tokens may not "
            "hold an agent's first prompt."
        )


# ---- OpenCode: https://opencode.ai/docs/providers, https://opencode.ai/config.json ----------


def _opencode_folder() -> Path:
    return _configuration("opencode")


def _opencode_file(folder: Path) -> Path:
    if custom := os.environ.get("OPENCODE_CONFIG"):
        return Path(custom)
    commented = folder / "opencode.jsonc"
    return commented if commented.exists() else folder / "opencode.json"


def _opencode_edits(service: Service, is_new: bool) -> Sequence[Edit]:
    options = {"baseURL": service.url}
    if service.key:
        options["apiKey"] = f"{{env:{KEY_VARIABLE}}}"
    models: dict[str, Any] = {}
    for served in service.models:
        inputs = ["text", "image"] if served.reads_images else ["text"]
        models[served.name] = {
            "name": served.name,
            "attachment": served.reads_images,
            "tool_call": served.calls_tools,
            "modalities": {"input": inputs, "output": ["text"]},
        }
        if served.context_tokens:
            limit = {"context": served.context_tokens, "output": served.output_tokens}
            models[served.name]["limit"] = limit
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": PROVIDER,
        "options": options,
        "models": models,
    }
    schema = [Edit(("$schema",), "https://opencode.ai/config.json")] if is_new else []
    return [
        *schema,
        Edit(("provider", PROVIDER), provider),
        Edit(("model",), f"{PROVIDER}/{service.model.name}"),
    ]


def _opencode_steps(service: Service) -> Iterator[str]:
    yield from _export_step(service)
    yield from _context_step(service)
    yield "Start it: opencode"


# ---- Continue: https://docs.continue.dev/reference ------------------------------------------


def _continue_folder() -> Path:
    return _folder("CONTINUE_GLOBAL_DIR", ".continue")


def _continue_file(folder: Path) -> Path:
    file = folder / "config.yaml"
    if not file.exists() and (folder / "config.json").exists():
        raise CommandFailed(
            f"Continue's settings are in {folder / 'config.json'}, which it would ignore next to a "
            "config.yaml: move them to config.yaml first (docs.continue.dev/reference)"
        )
    return file


def _continue_edits(service: Service, is_new: bool) -> Sequence[Edit]:
    head = {"name": "Local Assistant", "version": "1.0.0", "schema": "v1"} if is_new else {}
    others = [served for served in service.models if served != service.model]
    edits = [Edit((name,), value) for name, value in head.items()]
    for served in reversed([service.model, *others]):  # each becomes the first
        item: dict[str, Any] = {
            "name": f"{served.name} ({PROVIDER})",
            "provider": "openai",
            "model": served.name,
            "apiBase": service.url,
            "apiKey": f"${{{{ secrets.{KEY_VARIABLE} }}}}" if service.key else NO_KEY,
            "roles": ["chat", "edit", "apply"],
            "capabilities": [
                *(["tool_use"] if served.calls_tools else []),
                *(["image_input"] if served.reads_images else []),
            ],
        }
        if served.context_tokens:
            item["defaultCompletionOptions"] = {
                "contextLength": served.context_tokens,
                "maxTokens": served.output_tokens,
            }
        edits.append(Edit(("models", item["name"]), item))
    return edits


def _continue_steps(service: Service) -> Iterator[str]:
    if service.key:
        secrets = _continue_folder() / ".env"
        yield f"Put a line {KEY_VARIABLE}=... with the daemon's API key into {secrets}."
    yield f"Choose {service.model.name} ({PROVIDER}) in its list of models."


# ---- Zed: https://zed.dev/docs/ai/use-api-access --------------------------------------------


def _zed_folder() -> Path:
    return _configuration("zed")


def _zed_edits(service: Service, _: bool) -> Sequence[Edit]:
    """Zed has to be told the context of each model. It keeps keys itself."""
    if service.model.context_tokens is None:
        raise CommandFailed(f"{service.url} does not tell the context of its models, as Zed needs")
    available = [
        {
            "name": served.name,
            "display_name": f"{served.name} ({PROVIDER})",
            "max_tokens": served.context_tokens,
            "max_output_tokens": served.output_tokens,
            "capabilities": {
                "tools": served.calls_tools,
                "images": served.reads_images,
                "parallel_tool_calls": served.calls_tools,
                "prompt_cache_key": False,
            },
        }
        for served in service.models
        if served.context_tokens
    ]
    provider = {"api_url": service.url, "available_models": available}
    default = {"provider": PROVIDER, "model": service.model.name}
    return [
        Edit(("language_models", "openai_compatible", PROVIDER), provider),
        Edit(("agent", "default_model"), default),
    ]


def _zed_steps(service: Service) -> Iterator[str]:
    key = "the daemon's API key" if service.key else f"any API key, such as {NO_KEY}"
    yield f"In Zed's settings, AI, LLM Providers, {PROVIDER}: enter {key}."


def _named(name: str) -> Callable[[Path], Path]:
    return lambda folder: folder / name


CLIENTS = {
    "claude-code": Client(
        "Claude Code",
        jsonc,
        _claude_folder,
        _named("settings.json"),
        _claude_edits,
        _claude_steps,
        ("claude",),
    ),
    "codex": Client(
        "Codex",
        toml,
        _codex_folder,
        _named("config.toml"),
        _codex_edits,
        _codex_steps,
        ("codex",),
    ),
    "opencode": Client(
        "OpenCode",
        jsonc,
        _opencode_folder,
        _opencode_file,
        _opencode_edits,
        _opencode_steps,
        ("opencode",),
    ),
    "continue": Client(
        "Continue",
        yaml,
        _continue_folder,
        _continue_file,
        _continue_edits,
        _continue_steps,
        ("cn",),
    ),
    "zed": Client(
        "Zed",
        jsonc,
        _zed_folder,
        _named("settings.json"),
        _zed_edits,
        _zed_steps,
        ("zed", "zeditor"),
    ),
}
