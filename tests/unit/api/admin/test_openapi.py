"""`/openapi.json` describes every route, and requests generated from it cause no server error."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as settings_of_tests
from starlette.applications import Starlette
from starlette.routing import Route

from tests.support.whole_run import few_of
from tests.unit.api.conftest import Connect, parsing_pool
from tests.unit.api.requests import PNG_URL, chat, image_part, text, user
from tests.unit.api.scripted_engine import OneModel, ScriptedEngine
from vlm_server.api.admin.route_summaries import SUMMARIES, TAG_OF
from vlm_server.api.app import create_app
from vlm_server.settings import Server, Settings

HOST = {"Host": "127.0.0.1:8000"}


@cache
def app() -> Starlette:
    return create_app(Settings(), OneModel(ScriptedEngine()), parsing_pool())


def operations() -> Iterator[Any]:
    """One operation for each method of each endpoint, which may have several paths."""
    import schemathesis  # here, as it takes seconds

    endpoints = {
        (route.path.replace(":path", ""), method.lower()): route.endpoint
        for route in app().routes
        if isinstance(route, Route)
        for method in route.methods or ()
    }
    seen = set()
    for result in schemathesis.openapi.from_asgi(
        "/openapi.json", app(), headers=HOST
    ).get_all_operations():
        operation = result.ok()
        endpoint = endpoints[operation.path, operation.method]
        if (endpoint, operation.method) not in seen:
            seen.add((endpoint, operation.method))
            yield operation


@pytest.mark.parametrize("follows_it", [True, False])
@pytest.mark.parametrize("max_examples", few_of([2, 5], [2]))
def test_generated_requests_cause_no_server_error(follows_it: bool, max_examples: int) -> None:
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error

    mode = GenerationMode.POSITIVE if follows_it else GenerationMode.NEGATIVE
    count = 0
    for operation in operations():
        if follows_it or any(body.media_type == "application/json" for body in operation.body):

            @settings_of_tests(
                max_examples=max_examples,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: Any) -> None:
                nonlocal count
                case.call_and_validate(headers=HOST, checks=[not_a_server_error])
                count += 1

            ask()
    assert count > 10 * max_examples


async def document(client: httpx.AsyncClient) -> dict[str, object]:
    answer = await client.get("/openapi.json")
    assert answer.status_code == 200
    found: dict[str, object] = answer.json()
    return found


async def test_openapi_describes_every_route(client: httpx.AsyncClient) -> None:
    described = await document(client)
    declared = {
        (route.path.replace(":path", ""), method.lower())
        for route in app().routes
        if isinstance(route, Route) and route.path != "/openapi.json" and route.include_in_schema
        for method in (route.methods or set()) - {"HEAD"}
    }
    paths = described["paths"]
    assert isinstance(paths, dict)
    assert {(path, method) for path, item in paths.items() for method in item} == declared
    cancelled = ["responses/{response_id}", "requests/{request_id}", "batches/{batch_id}"]
    no_body = {f"/v1/{name}/cancel" for name in (*cancelled, "messages/batches/{batch_id}")}
    posts = [item["post"] for path, item in paths.items() if "post" in item and path not in no_body]
    assert posts
    assert all("requestBody" in post for post in posts)


async def test_every_operation_has_summary_tag_and_id(client: httpx.AsyncClient) -> None:
    described: Any = await document(client)
    names = {
        f"{method.upper()} {path}": operation
        for path, item in described["paths"].items()
        for method, operation in item.items()
    }
    assert names.keys() == TAG_OF.keys()
    assert all(operation["summary"] for operation in names.values())
    tags = [tag["name"] for tag in described["tags"]]
    assert {tag for operation in names.values() for tag in operation["tags"]} == set(tags)
    assert len({operation["operationId"] for operation in names.values()}) == len(names)


class Seen(HTMLParser):
    """The tags and links of a page, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        self.links += [link for name in ("href", "src") if (link := found.get(name))]
        self.ids |= {found["id"] or ""} if "id" in found else set()

    def handle_data(self, data: str) -> None:
        self.text += data


async def test_docs_page_shows_every_route_and_loads_nothing(client: httpx.AsyncClient) -> None:
    answer = await client.get("/docs", headers={"Accept": "text/html"})
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    seen = Seen()
    seen.feed(answer.text)
    assert all(operation.partition(" ")[2] in seen.text for operation in TAG_OF)
    assert all(summary in seen.text for of_tag in SUMMARIES.values() for summary in of_tag.values())
    assert not {"script", "img", "link", "iframe"} & set(seen.tags)
    assert set(seen.links) == {"/openapi.json", *(link for link in seen.links if link[0] == "#")}
    assert {link[1:] for link in seen.links if link[0] == "#"} <= seen.ids
    policy = answer.headers["content-security-policy"]
    style = answer.text.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}';")


async def test_docs_page_needs_no_key_and_openapi_does(connect: Connect, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[ann]\nkey = "correct-horse-battery"\n')
    path.chmod(0o600)
    client = connect(Settings(server=Server(api_key_file=str(path))))
    assert (await client.get("/docs", headers={"Accept": "text/html"})).status_code == 200
    assert (await client.get("/docs")).status_code == 401
    assert (await client.get("/openapi.json")).status_code == 401


async def test_openapi_describes_parameters_of_resumed_streams(client: httpx.AsyncClient) -> None:
    paths: Any = (await document(client))["paths"]
    chat_route, response = paths["/v1/chat/completions"], paths["/v1/responses/{response_id}"]
    headers = [each["name"] for each in chat_route["post"]["parameters"]]
    assert headers == ["X-VLM-Resumable", "Last-Event-ID"]
    names = [each["name"] for each in response["get"]["parameters"]]
    assert names == ["response_id", "stream", "starting_after"]
    assert [each["name"] for each in response["delete"]["parameters"]] == ["response_id"]


@pytest.mark.parametrize(
    ("name", "body", "is_valid"),
    [
        ("ChatRequest", chat(), True),
        ("ChatRequest", chat(user(text(), image_part(PNG_URL)), temperature=1, user="x"), True),
        ("ChatRequest", chat(temperature=3), False),
        ("ChatRequest", chat(colour="red"), False),
        ("CompletionRequest", {"model": "demo", "prompt": "a", "echo": False}, True),
        ("CompletionRequest", {"model": "demo", "prompt": "a", "echo": True}, False),
        ("PromptRequest", {"prompt": "a", "add_special_tokens": True}, True),
        ("ResponsesRequest", {"model": "demo", "input": "a", "user": "x"}, True),
        ("ResponsesRequest", {"model": "demo", "input": "a", "priority": 0}, True),
        ("ResponsesRequest", {"model": "demo", "input": "a", "priority": 1}, False),
        ("TokensRequest", {"tokens": [1]}, True),
        ("TokensRequest", {"tokens": []}, False),
    ],
)
async def test_openapi_schemas_accept_exactly_valid_bodies(
    client: httpx.AsyncClient, name: str, body: dict[str, object], is_valid: bool
) -> None:
    described = await document(client)
    schema = {"$ref": f"#/components/schemas/{name}", "components": described["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(body) == is_valid
