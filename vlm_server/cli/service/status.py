"""What `vlm-server service status` prints."""

from __future__ import annotations

import json
import sys
from typing import Any

import httpx

from vlm_server.cli import exit_codes
from vlm_server.cli.serve import url_of
from vlm_server.cli.service.manager import ServiceManager
from vlm_server.cli.serving.listener import is_at
from vlm_server.settings import Settings

_TIMEOUT_SECONDS = 5.0
_MIB = 1 << 20


def show(manager: ServiceManager, settings: Settings | None, fault: str, *, as_json: bool) -> int:
    """Print the state of an installed service. `settings` are those in its files, unless they have
    a `fault`. Returns the exit code.
    """
    facts = _facts(manager, settings, fault)
    if as_json:
        json.dump(facts, sys.stdout, indent=2)
        print()
    else:
        for name, value in facts.items():
            if value is not None:
                print(f"{name.removesuffix('_bytes').replace('_', ' '):<10} {_text(name, value)}")
    if facts["state"] not in ("running", "stopping"):
        return exit_codes.SERVICE_NOT_RUNNING
    return exit_codes.SERVICE_READY if facts["health"] == "ready" else exit_codes.SERVICE_NOT_READY


def _facts(manager: ServiceManager, settings: Settings | None, fault: str) -> dict[str, Any]:
    state = manager.state()
    address = manager.read_address() or _named(settings)
    url = _url(address)
    return {
        "state": state.state,
        "health": _health(url) if state.state == "running" else None,
        "address": url,
        "warning": _warning(address, settings, fault),
        "model": settings.model.name or settings.model.path or "demo" if settings else None,
        "pid": state.pid,
        "since": state.since if state.pid else None,
        "memory_bytes": state.memory_bytes,
        "last_exit": state.last_exit,
        "log": manager.log,
        "file": str(manager.path),
    }


def _text(name: str, value: Any) -> str:
    return f"{value / _MIB:,.0f} MiB" if name == "memory_bytes" else str(value)


def _named(settings: Settings | None) -> str:
    if settings is None:
        return ""
    host = settings.server.host
    return f"{f'[{host}]' if ':' in host else host}:{settings.server.port}"


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port or 0)


def _url(address: str) -> str | None:
    return url_of(*_split(address)) if address else None


def _warning(address: str, settings: Settings | None, fault: str) -> str | None:
    if fault:
        return f"the settings can't be used: {fault}"
    if settings is not None and address and not is_at(settings.server, [_split(address)]):
        return (
            f"the settings say {_named(settings)}: 'vlm-server service install' moves the service"
        )
    return None


def _health(url: str | None) -> str:
    """`ready`, or what the daemon does before it is; `no answer`."""
    if url is None:
        return "no answer"
    try:
        root = url.removesuffix("/v1")
        found = httpx.get(f"{root}/health/ready", timeout=_TIMEOUT_SECONDS, trust_env=False)
        told = found.json()
    except (httpx.HTTPError, ValueError):
        return "no answer"
    progress = told.get("progress") or {}
    return str(progress.get("stage") or told.get("status", "no answer"))
