"""Checks of a request's headers: Host, Origin and API key.

The Host check stops DNS rebinding: a web page whose name resolves to this machine still sends
its own name. The checks of Origin and Sec-Fetch-Site stop requests from other web pages: browsers
send Origin with requests whose response the page may read, but with embedded files only the other.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from vlm_server.api.http.access import keys
from vlm_server.api.http.access.keys import NO_KEY, ApiKey, KeyRing
from vlm_server.errors import Forbidden, Unauthorized
from vlm_server.settings import ORIGIN, Server, is_loopback

Handler = Callable[[Request], Awaitable[Response]]

READY = ("/health", "/health/ready", "/healthz", "/ping")
"""Routes of readiness probes."""
PAGE_FOLDER = "/page"
"""The folder of the page's files; none of them is secret."""
DOCS = "/docs"
"""The description of the API for browsers, which send no key with a link."""
_EVERY_ADDRESS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104  compared, not listened on
_FOLLOWED = ("/v1/responses/resp_", "/v1/watch/watch_", "/v1/requests/")
_RESUMABLE = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/watch")
)
"""Routes at which a request with `Last-Event-ID` reads the rest of a stream, and does no more."""
_MAX_SHOWN_CHARS = 100
_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]{1,5})?")


def check_host(headers: Headers, server: Server) -> None:
    """Raises Forbidden unless there is one Host header and it names this server."""
    hosts = headers.getlist("host")
    name = _name(hosts[0]) if len(hosts) == 1 else None
    if not _is_ours(name, server):
        shown_name = f" `{name[:_MAX_SHOWN_CHARS]}`" if name else ""
        advice = ", if that is you: list it, with all others that you use" if name else ""
        raise Forbidden(
            f"The Host header{shown_name} does not name this server; see the setting "
            f"server.allowed_hosts{advice}."
        )


def check_origin(headers: Headers, path: str) -> None:
    """Raises Forbidden for a request from another origin's page, except a link to our page."""
    origin = headers.get("origin")
    if origin is None:
        if headers.get("sec-fetch-site", "").lower() == "cross-site" and not is_page(path, headers):
            raise Forbidden("Web pages of another origin may link to / and /docs alone.")
        return
    scheme, _, authority = origin.lower().partition("://")
    if scheme not in ("http", "https") or authority != headers["host"].lower():
        shown_origin = f" `{origin}`" if ORIGIN.fullmatch(origin.lower()) else ""
        raise Forbidden(
            f"Requests from web pages of another origin{shown_origin} are not allowed; see the "
            "setting server.cors_origins."
        )


def check_key(headers: Headers, ring: KeyRing) -> ApiKey:
    """The accepted key in Authorization or X-Api-Key; `NO_KEY` if none is required.

    Raises Unauthorized.
    """
    if not ring.needs_key:
        return NO_KEY
    scheme, _, credentials = _only(headers, "authorization").partition(" ")
    in_bearer = ring.find(credentials.strip().encode("latin-1"))
    in_own_header = ring.find(_only(headers, "x-api-key").strip().encode("latin-1"))
    if in_bearer is not None and scheme.lower() == "bearer":
        return in_bearer
    if in_own_header is not None:
        return in_own_header
    raise Unauthorized(
        "A valid API key is required: 'Authorization: Bearer <key>' or 'X-Api-Key: <key>'."
    )


def admin_only(endpoint: Handler) -> Handler:
    """`endpoint` for admin keys only, or for all clients if no key is required."""

    async def guarded(request: Request) -> Response:
        if not keys.key_of(request.scope).is_admin:
            raise Forbidden("This route needs a key with `admin = true`.")
        return await endpoint(request)

    return guarded


def follows(path: str, headers: Headers) -> bool:
    """Whether a request is about an answer whose own request holds a slot of the key.

    A key whose slots are all taken must be able to read and to end what takes them,
    and to give a watch its frames.
    """
    is_resuming = path in _RESUMABLE and bool(headers.get("last-event-id"))
    return is_resuming or path.startswith(_FOLLOWED)


def wants_html(headers: Headers) -> bool:
    """Whether `text/html` is accepted by name, as by browsers; curl and clients send `*/*`."""
    ranges = headers.get("accept", "").lower().split(",")
    return any(media_range.partition(";")[0].strip() == "text/html" for media_range in ranges)


def is_page(path: str, headers: Headers) -> bool:
    """Whether a request is for the page or its files, or for `DOCS`, which are public."""
    return path.startswith(f"{PAGE_FOLDER}/") or (path in ("/", DOCS) and wants_html(headers))


def _only(headers: Headers, name: str) -> str:
    """The header called `name`; empty unless there is exactly one."""
    values = headers.getlist(name)
    return values[0] if len(values) == 1 else ""


def _is_ours(name: str | None, server: Server) -> bool:
    if name is None:
        return False
    if server.allowed_hosts:
        return name in {host.lower() for host in server.allowed_hosts}
    if server.needs_key and server.host in _EVERY_ADDRESS:
        return True
    return is_loopback(name) or name == server.host.lower()


def _name(host: str) -> str | None:
    """The host name without its port, in lower case; None if it is not one."""
    match = _HOST.fullmatch(host.lower())
    return match and (match["ipv6"] or match["name"].removesuffix("."))
