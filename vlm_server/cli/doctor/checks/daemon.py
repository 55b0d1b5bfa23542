"""The daemon that runs now: its version, its health, and how often its engine ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from vlm_server import __version__
from vlm_server.api.http.access import key_file
from vlm_server.cli.client.keys import authorization
from vlm_server.cli.doctor.checks.port import ANSWER_SECONDS, host_header, listener
from vlm_server.cli.doctor.finding import Finding, ok, problem, warning
from vlm_server.cli.doctor.situation import Situation
from vlm_server.cli.serve import url_of
from vlm_server.errors import ConfigError
from vlm_server.settings import Server
from vlm_server.settings.paths import expanded


def look(situation: Situation) -> list[Finding]:
    """One finding; two if it answers."""
    server = situation.settings.server
    state = listener(server) if server.port else "free"
    if state == "silent":
        return [problem("daemon", "something listens and does not answer", "see `port`")]
    if state != "ours":
        return [ok("daemon", "none runs with these settings")]
    with client(server) as http:
        return [version(http), health(http)]


def client(server: Server) -> httpx.Client:
    """Asks the daemon of `server`, with an API key if it has some that we may read."""
    headers = httpx.Headers(host_header(server))
    headers.update(authorization(admin_key(server)))
    return httpx.Client(
        base_url=url_of(server.host, server.port).removesuffix("/v1"),
        headers=headers,
        timeout=ANSWER_SECONDS,
        trust_env=False,
    )


def admin_key(server: Server) -> str | None:
    """One that may see the status, or else any; None if there is none, or none that we may read."""
    if server.api_keys or not server.api_key_file:
        return next(iter(server.api_keys), None)
    try:
        entries = key_file.read(expanded(server.api_key_file)).values()
    except ConfigError:
        return None
    return max(entries, key=lambda entry: entry.admin).key


def version(http: httpx.Client) -> Finding:
    """Whether it is the version of this program."""
    running = _json(http, "/api/version").get("vlm_server")
    if running is None:
        return warning("daemon version", "unknown", "it needs an API key: pass its --config")
    if running != __version__:
        text = f"{running} runs; this is {__version__}"
        return warning("daemon version", text, "restart the daemon: vlm-server service restart")
    return ok("daemon version", str(running))


def health(http: httpx.Client) -> Finding:
    """Whether it is ready, and how often its engine ended since it was started."""
    ready = _json(http, "/health/ready")
    state = str(ready.get("status", "unknown"))
    engine = _json(http, "/v1/status").get("engine") or {}
    restarts = int(engine.get("restarts") or 0)
    text = f"{state}, {restarts} engine restarts" if engine else state
    if state == "failed":
        return problem("daemon", text, "its log says why it can't load its model")
    if state != "ready":
        progress = ready.get("progress") or {}
        stage = f": {progress['stage']} ({progress['fraction']:.0%})" if progress else ""
        return warning("daemon", f"{text}{stage}", "wait; if it stays so, see its log")
    if restarts:
        reasons = ", ".join(_reasons(engine))
        advice = "see its log for the time of each, and send a report with an issue"
        return warning("daemon", f"{text} ({reasons})" if reasons else text, advice)
    if told := ready.get("warnings"):
        return warning("daemon", f"ready, and warns: {'; '.join(map(str, told))}", "see its log")
    return ok("daemon", text)


def _reasons(engine: Mapping[str, Any]) -> list[str]:
    ends = engine.get("ends") or []
    return [str(end.get("reason", "?")) for end in ends if isinstance(end, dict)][-3:]


def _json(http: httpx.Client, path: str) -> dict[str, Any]:
    """The object at `path`; empty if there is none that we may see."""
    try:
        found = http.get(path).json()
    except (httpx.HTTPError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
