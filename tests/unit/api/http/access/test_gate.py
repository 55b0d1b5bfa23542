"""Access by Host, Origin and API key."""

from __future__ import annotations

import httpx
import pytest

from tests.unit.api.conftest import Connect
from tests.unit.api.requests import ROUTE, chat
from tests.unit.api.scripted_engine import ScriptedEngine
from vlm_server.settings import Server, Settings

KEY = "correct-horse-battery"


def settings(**server: str | tuple[str, ...]) -> Settings:
    return Settings(server=Server(**server))  # type: ignore[arg-type]


async def status(client: httpx.AsyncClient, **headers: str) -> int:
    answer = await client.get("/v1/models", headers=headers)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return answer.status_code


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "localhost", "LOCALHOST:8000", "localhost.", "[::1]:8000", "127.0.0.2"],
)
async def test_loopback_host_names_are_accepted(client: httpx.AsyncClient, host: str) -> None:
    assert await status(client, host=host) == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", "192.168.1.9", "",
     "[::1", "evil.example@localhost:80:80", "localhost/../evil.example:1:2", "0x7f000001", "::1"],
)  # fmt: skip
async def test_foreign_host_names_are_refused(client: httpx.AsyncClient, host: str) -> None:
    assert await status(client, host=host) == 403
    assert (await client.get("/health/live", headers={"host": host})).status_code == 403


async def test_repeated_host_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.get(
        "/v1/models", headers=[("host", "localhost"), ("host", "evil.example")]
    )
    assert answer.status_code == 403


async def test_listening_address_is_accepted_host(connect: Connect) -> None:
    client = connect(settings(host="192.168.1.9"))
    assert await status(client, host="192.168.1.9:8000") == 200
    assert await status(client, host="192.168.1.10:8000") == 403


async def test_allowed_hosts_replace_usual_names(connect: Connect) -> None:
    client = connect(settings(allowed_hosts=("Box.local",)))
    assert await status(client, host="box.LOCAL:9000") == 200
    assert await status(client, host="localhost") == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_public_listener_with_keys_accepts_every_host(connect: Connect, host: str) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    assert await status(connect(settings(host=host, api_keys=(KEY,))), host="box.lan", **key) == 200
    assert await status(connect(settings(host=host)), host="box.lan") == 403
    narrowed = connect(settings(host=host, api_keys=(KEY,), allowed_hosts=("box.local",)))
    assert await status(narrowed, host="box.lan", **key) == 403


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "", "http://127.0.0.1:3000", "http://localhost:8000", "file://",
     "chrome-extension://abc", "ftp://127.0.0.1:8000",
     "http://127.0.0.1:8000.evil.example"],
)  # fmt: skip
async def test_foreign_origin_is_refused(
    client: httpx.AsyncClient, engine: ScriptedEngine, origin: str
) -> None:
    answer = await client.post(ROUTE, json=chat(), headers={"origin": origin})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "forbidden"
    assert engine.submitted == []


@pytest.mark.parametrize("path", ["/v1/settings", "/v1/status", "/metrics", "/health"])
async def test_cross_site_embeds_and_links_are_refused(
    client: httpx.AsyncClient, path: str
) -> None:
    """Browsers send no Origin for embeds and links."""
    for html in ("text/html,*/*", "image/png,*/*"):
        foreign = await client.get(path, headers={"sec-fetch-site": "cross-site", "accept": html})
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "forbidden")
    for site in ("same-origin", "same-site", "none"):
        assert (await client.get(path, headers={"sec-fetch-site": site})).status_code == 200


async def test_cross_site_links_to_page_are_accepted(client: httpx.AsyncClient) -> None:
    followed = {"sec-fetch-site": "cross-site", "accept": "text/html"}
    assert (await client.get("/", headers=followed)).status_code == 200
    assert (await client.get("/", headers=followed | {"accept": "image/*"})).status_code == 403
    assert (await client.get("/page/main.js", headers=followed)).status_code == 200


async def test_own_origin_is_accepted_without_cors_headers(
    client: httpx.AsyncClient,
) -> None:
    answer = await client.post(ROUTE, json=chat(), headers={"origin": "http://127.0.0.1:8000"})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_foreign_preflight_is_refused(client: httpx.AsyncClient) -> None:
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    answer = await client.options(ROUTE, headers=headers)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


LISTED = ("https://App.example", "http://localhost:3000", "null", "chrome-extension://*")
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
    "access-control-request-private-network": "true",
}


@pytest.mark.parametrize(
    "origin", ["https://app.example", "http://localhost:3000", "null", "chrome-extension://abc"]
)
@pytest.mark.parametrize("key", ["", KEY])
async def test_listed_origins_get_cors_headers(
    connect: Connect, engine: ScriptedEngine, origin: str, key: str
) -> None:
    client = connect(settings(cors_origins=LISTED, api_keys=(key,) if key else ()))
    page = {"origin": origin, "sec-fetch-site": "cross-site"}
    preflight = await client.options(ROUTE, headers=page | PREFLIGHT)
    assert preflight.status_code == 200
    cors = preflight.headers
    assert "POST" in cors["access-control-allow-methods"]
    assert "authorization" in cors["access-control-allow-headers"]
    assert cors["access-control-allow-private-network"] == "true"
    refused = await client.post(ROUTE, json=chat(temperature=9), headers=page)
    assert refused.status_code == (401 if key else 400)
    bearer = {"authorization": f"Bearer {key}"} if key else {}
    answer = await client.post(ROUTE, json=chat(), headers=page | bearer)
    assert answer.status_code == 200
    for response in (preflight, refused, answer):
        assert response.headers["access-control-allow-origin"] == origin
        assert "origin" in response.headers["vary"].lower()
        assert "access-control-allow-credentials" not in response.headers
    assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()


@pytest.mark.parametrize(
    "origin",
    ["https://app.example.evil.example", "http://app.example", "https://app.example:444",
     "http://localhost:30001", "moz-extension://abc", "https://xapp.example"],
)  # fmt: skip
async def test_unlisted_origins_are_refused_with_setting(connect: Connect, origin: str) -> None:
    client = connect(settings(cors_origins=LISTED))
    for answer in (
        await client.options(ROUTE, headers={"origin": origin, **PREFLIGHT}),
        await client.post(ROUTE, json=chat(), headers={"origin": origin}),
    ):
        assert answer.status_code == 403
        assert f"`{origin}`" in answer.json()["error"]["message"]
        assert "server.cors_origins" in answer.json()["error"]["message"]
        assert "access-control-allow-origin" not in answer.headers


async def test_wildcard_accepts_every_origin(connect: Connect) -> None:
    client = connect(settings(cors_origins=("*",)))
    answer = await client.post(ROUTE, json=chat(), headers={"origin": "https://any.example"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.parametrize(
    "authorization", [f"Bearer {KEY}", f"bearer  {KEY}", "Bearer second-key-é"]
)
async def test_valid_key_is_accepted(connect: Connect, authorization: str) -> None:
    client = connect(settings(api_keys=(KEY, "second-key-é")))
    headers = [(b"authorization", authorization.encode())]
    assert (await client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer ", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x",
     f"Bearer {KEY[:-1]}", "Bearer \u00e9"],
)  # fmt: skip
@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/status", "/metrics", "/", "/nowhere", "/healthy"]
)
async def test_missing_or_wrong_key_is_401(connect: Connect, authorization: str, path: str) -> None:
    client = connect(settings(api_keys=(KEY,)))
    answer = await client.get(path, headers=[(b"authorization", authorization.encode())])
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert KEY not in answer.text


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([("x-api-key", KEY)], 200),
        ([("x-api-key", KEY), ("authorization", "Bearer wrong")], 200),
        ([("x-api-key", "wrong"), ("authorization", f"Bearer {KEY}")], 200),
        ([("x-api-key", "wrong")], 401),
        ([("x-api-key", "")], 401),
        ([("x-api-key", f"Bearer {KEY}")], 401),
        ([("x-api-key", KEY), ("x-api-key", KEY)], 401),
        ([("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")], 401),
        ([("x-api-key", "wrong"), ("authorization", KEY)], 401),
    ],
)
async def test_x_api_key_header_is_checked(
    connect: Connect, headers: list[tuple[str, str]], expected: int
) -> None:
    client = connect(settings(api_keys=(KEY,)))
    assert (await client.get("/v1/models", headers=headers)).status_code == expected


@pytest.mark.parametrize("path", ["/health/live", "/health/ready"])
async def test_health_needs_no_key(connect: Connect, path: str) -> None:
    assert (await connect(settings(api_keys=(KEY,))).get(path)).status_code == 200


async def test_key_is_checked_before_engine_and_body(
    connect: Connect, engine: ScriptedEngine
) -> None:
    engine.be("restarting")
    client = connect(settings(api_keys=(KEY,)))
    assert (await client.post(ROUTE, content=b"not json")).status_code == 401
