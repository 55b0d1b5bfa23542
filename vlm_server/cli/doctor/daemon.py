"""Checks of the port, of the daemon that listens there, and of the service that starts it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from msgspec.structs import replace

from vlm_server import __version__
from vlm_server.api.http.access import key_file
from vlm_server.cli.client.daemon import authorization, find, url_of
from vlm_server.cli.client.own_daemons import is_live
from vlm_server.cli.doctor.findings import Finding, ok, output_of, problem, warning
from vlm_server.cli.doctor.situation import Situation
from vlm_server.cli.port_owner import owner
from vlm_server.cli.serve.listener import bind
from vlm_server.cli.service.manager import ServiceManager
from vlm_server.errors import ConfigError
from vlm_server.settings import Server, is_loopback
from vlm_server.settings.paths import expand_home

_ANSWER_SECONDS = 5.0
_AGAIN = "install it again: vlm-server service install"


def port(server: Server) -> Finding:
    """Whether the daemon can listen at its address, or does so already."""
    if server.port == 0:
        return ok("port", "any that is free")
    where = f"{server.host}:{server.port}"
    state = listener(server)
    if state == "ours":
        return ok("port", f"{where}, a daemon answers there")
    if state == "free":
        return _bindable(server, where)
    who = owner(server.port)
    if state == "silent":
        advice = "it may be a daemon that hangs: see its log, then restart it (`service restart`)"
        return problem("port", f"{where} is taken by {who}, which does not answer", advice)
    advice = "end that program, or choose another port: server.port, or `serve --port`"
    return problem("port", f"{where} is taken by {who}", advice)


def listener(server: Server) -> str:
    """The state of the address: `ours`, `foreign` or `silent` if in use, else `free`."""
    root = url_of(server.host, server.port).removesuffix("/v1")
    headers = host_header(server)
    try:
        response = httpx.get(
            f"{root}/health/live", headers=headers, timeout=_ANSWER_SECONDS, trust_env=False
        )
        is_ours = is_live(response)
    except httpx.ConnectError:
        return "free"
    except httpx.TimeoutException:
        return "silent"
    except (httpx.HTTPError, ValueError):
        return "foreign"
    return "ours" if is_ours else "foreign"


def host_header(server: Server) -> dict[str, str]:
    """`Host` header for a daemon that does not take its loopback address for its name."""
    if not server.allowed_hosts or any(map(is_loopback, server.allowed_hosts)):
        return {}
    return {"Host": server.allowed_hosts[0]}


def _bindable(server: Server, where: str) -> Finding:
    try:
        bind(server).close()
    except ConfigError as error:
        return problem("port", str(error), "set server.host and server.port to what this user may")
    return ok("port", f"{where} is free")


def look_at_daemon(situation: Situation) -> list[Finding]:
    """Whether a daemon runs; if it answers, its version and its health."""
    server = situation.settings.server
    state = listener(server) if server.port else "free"
    if state == "silent":
        return [problem("daemon", "something listens and does not answer", "see `port`")]
    if (url := running(situation)) is None:
        return [ok("daemon", "none runs with these settings")]
    configured = url_of(server.host, server.port)
    where = "" if url == configured else f" (yours at {url}; none answers at {configured})"
    with client(server, url) as http:
        daemon = health(http)
        return [version(http), replace(daemon, text=f"{daemon.text}{where}")]


def running(situation: Situation) -> str | None:
    """URL of the daemon of the settings, else of one of this user's, if none are given."""
    server = situation.settings.server
    configured = url_of(server.host, server.port)
    if server.port and listener(server) == "ours":
        return configured
    url = configured if situation.is_given else find(server)[0]
    return url if url != configured else None


def settings_at(url: str, server: Server) -> Server:
    """The settings of the daemon at `url`: `server` at its address, unknown at others."""
    return server if url == url_of(server.host, server.port) else Server()


def client(server: Server, url: str) -> httpx.Client:
    """HTTP client of the daemon at `url`, with an API key if it has one that this user may read."""
    server = settings_at(url, server)
    headers = httpx.Headers(host_header(server))
    headers.update(authorization(admin_key(server)))
    return httpx.Client(
        base_url=url.removesuffix("/v1"),
        headers=headers,
        timeout=_ANSWER_SECONDS,
        trust_env=False,
    )


def admin_key(server: Server) -> str | None:
    """API key that may see the status, else any; None without one that this user may read."""
    if server.api_keys or not server.api_key_file:
        return next(iter(server.api_keys), None)
    try:
        entries = key_file.read(expand_home(server.api_key_file)).values()
    except ConfigError:
        return None
    return max(entries, key=lambda entry: entry.admin).key


def version(http: httpx.Client) -> Finding:
    """Whether the daemon is of this program's version."""
    running_version = _json(http, "/api/version").get("vlm_server")
    if running_version is None:
        return warning("daemon version", "unknown", "it needs an API key: pass its --config")
    if running_version != __version__:
        text = f"{running_version} runs; this is {__version__}"
        return warning("daemon version", text, "restart the daemon: vlm-server service restart")
    return ok("daemon version", str(running_version))


def health(http: httpx.Client) -> Finding:
    """Whether the daemon is ready, and how often its engine has ended."""
    readiness = _json(http, "/health/ready")
    state = str(readiness.get("status", "unknown"))
    engine = _json(http, "/v1/status").get("engine") or {}
    restarts = int(engine.get("restarts") or 0)
    text = f"{state}, {restarts} engine restarts" if engine else state
    if state == "failed":
        return problem("daemon", text, "its log says why it can't load its model")
    if state != "ready":
        progress = readiness.get("progress") or {}
        stage = f": {progress['stage']} ({progress['fraction']:.0%})" if progress else ""
        return warning("daemon", f"{text}{stage}", "wait; if it stays so, see its log")
    if restarts:
        reasons = ", ".join(_reasons(engine))
        advice = "see its log for the time of each, and send them with an issue"
        return warning("daemon", f"{text} ({reasons})" if reasons else text, advice)
    if told := readiness.get("warnings"):
        return warning("daemon", f"ready, and warns: {'; '.join(map(str, told))}", "see its log")
    return ok("daemon", text)


def _reasons(engine: Mapping[str, Any]) -> list[str]:
    ends = engine.get("ends") or []
    return [str(end.get("reason", "?")) for end in ends if isinstance(end, dict)][-3:]


def _json(http: httpx.Client, path: str) -> dict[str, Any]:
    """JSON object at `path`; empty if this user may see none."""
    try:
        fields = http.get(path).json()
    except (httpx.HTTPError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def service(manager: ServiceManager) -> Finding:
    """Whether the installed service starts this version, and runs."""
    check = "service"
    try:
        words = manager.read_words()
    except FileNotFoundError:
        return ok(check, "not installed (`vlm-server service install` does that)")
    except (OSError, ValueError, KeyError) as error:
        return problem(check, f"{manager.path} can't be read: {error}", _AGAIN)
    if not words:
        return problem(check, f"{manager.path} starts nothing", _AGAIN)
    program = Path(words[0])
    if not os.access(program, os.X_OK):
        return problem(check, f"it starts {program}, which is not there", _AGAIN)
    told = (output_of((str(program), "--version"), 20.0) or "").split()
    version = told[-1] if told else None
    if version != __version__:
        text = f"it starts {program}, version {version or 'unknown'}; this is {__version__}"
        return warning(check, text, _AGAIN)
    if not manager.is_running():
        advice = "see its log (docs/service.md), then `vlm-server service install` starts it anew"
        return problem(check, f"installed, and not running: {manager.path}", advice)
    return ok(check, f"installed and running, version {version}")
