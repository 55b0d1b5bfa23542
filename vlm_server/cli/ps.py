"""`vlm-server ps`: the models and requests of a running daemon."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from vlm_server.cli import options, usage
from vlm_server.cli.usage import Manual, Parser

_MANUAL = Manual(
    examples=(
        ("The daemon on this machine", "vlm-server ps"),
        ("What a program can read", "vlm-server ps --json | jq '.models[].state'"),
    ),
    files=usage.CONFIG_FILES,
)


def add_to(parser: Parser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Shows the models of a running daemon, the device memory that each holds of "
        "its limit, when it is unloaded if nobody asks for it, and the requests in flight."
    )
    parser.add_argument("--json", action="store_true", help="print one object: models, requests")
    options.add_daemon_options(parser, "to look at")
    options.add_config_options(parser, are_rare=True)
    parser.set_defaults(run="ps:run")
    parser.manual = _MANUAL


def run(arguments: argparse.Namespace) -> int:
    """Print models and requests. Raises CommandFailed if no daemon answers."""
    import json

    from vlm_server.cli.client.daemon import Daemon, address_of
    from vlm_server.cli.text import table
    from vlm_server.platform.terminal import columns_of

    settings = options.load_settings(arguments)
    with Daemon(*address_of(arguments, settings)) as daemon:
        status = daemon.status()
    requests: list[dict[str, Any]] = status["requests"]["list"]
    if arguments.json:
        print(json.dumps({"models": status["models"], "requests": requests}, indent=2))
        return 0
    models = [_model_row(model, requests, status["time"]) for model in status["models"]]
    columns = columns_of(sys.stdout)
    print(table([("MODEL", "STATE", "MEMORY", "REQUESTS", "UNLOADED"), *models], columns))
    if requests:
        head = ("REQUEST", "MODEL", "STATE", "TOKENS", "SECONDS")
        print(f"\n{table([head, *map(_request_row, requests)], columns)}")
    return 0


def _request_row(request: dict[str, Any]) -> tuple[str, ...]:
    tokens = f"{request['done']} of {request['total']}" if request["total"] else ""
    return (
        request["id"],
        request["model"] or "",
        request["state"],
        tokens,
        f"{request['seconds']:.1f}",
    )


def _model_row(
    model: dict[str, Any], requests: list[dict[str, Any]], now: float
) -> tuple[str, ...]:
    from vlm_server.sizes import memory_size

    state, progress, expires_at = model["state"], model["progress"], model["expires_at"]
    if progress:
        state += f" ({progress['stage']}, {progress['fraction']:.0%})"
    held_text, limit_text = memory_size(model["memory_bytes"]), memory_size(model["limit_bytes"])
    leaves = "" if expires_at is None else f"in {max(0.0, expires_at - now):.0f} s"
    return (
        model["name"],
        state,
        f"{held_text} of {limit_text}" if model["limit_bytes"] else "",
        str(sum(request["model"] == model["name"] for request in requests)),
        "never" if model["pinned"] else leaves,
    )
