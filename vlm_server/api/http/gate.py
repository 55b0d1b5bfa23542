"""Who may send requests: checks of the Host, Origin and Authorization headers.

The Host check stops DNS rebinding: a web page whose name resolves to this machine still sends
its own name. The Origin check stops requests from other web pages in a browser.
"""

from __future__ import annotations

import hmac
import re

from starlette.datastructures import Headers

from vlm_server.errors import Forbidden, Unauthorized
from vlm_server.settings import Server, is_loopback

_EVERY_ADDRESS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104  compared, not listened on
_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]{1,5})?")


def check_host(headers: Headers, server: Server) -> None:
    """Raises Forbidden unless there is one Host header and it names this server."""
    hosts = headers.getlist("host")
    if len(hosts) != 1 or not _is_ours(_name(hosts[0]), server):
        raise Forbidden("The Host header does not name this server; see server.allowed_hosts.")


def check_origin(headers: Headers) -> None:
    """Raises Forbidden for a request from a web page of another origin."""
    origin = headers.get("origin")
    if origin is None:
        return
    scheme, _, authority = origin.lower().partition("://")
    if scheme not in ("http", "https") or authority != headers["host"].lower():
        raise Forbidden("Requests from web pages of another origin are not allowed.")


def check_key(headers: Headers, server: Server) -> str | None:
    """The API key in the Authorization header; None if `server.api_keys` is empty.

    Raises Unauthorized if keys are set and the header has none of them.
    """
    if not server.api_keys:
        return None
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    given = credentials.strip().encode("latin-1")
    matches = [key for key in server.api_keys if hmac.compare_digest(given, key.encode())]
    if scheme.lower() != "bearer" or not matches:
        raise Unauthorized("A valid API key is required: 'Authorization: Bearer <key>'.")
    return matches[0]


def _is_ours(name: str | None, server: Server) -> bool:
    if name is None:
        return False
    if server.allowed_hosts:
        return name in {host.lower() for host in server.allowed_hosts}
    if server.api_keys and server.host in _EVERY_ADDRESS:
        return True
    return is_loopback(name) or name == server.host.lower()


def _name(host: str) -> str | None:
    """The host name without its port, in lower case; None if it is not one."""
    match = _HOST.fullmatch(host.lower())
    return match and (match["ipv6"] or match["name"].removesuffix("."))
