"""The page: who gets it, its content policy, its size."""

from __future__ import annotations

import re

import httpx
import pytest

from tests.unit.api.conftest import Connect
from vlm_server.api.page.page import read_files
from vlm_server.settings import Server, Settings

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
FILES = read_files()
KEY = "correct-horse-battery"
MAX_BYTES = 300_000


async def test_browser_gets_page(client: httpx.AsyncClient) -> None:
    answer = await client.get("/", headers=BROWSER)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.content == FILES["index.html"].content


@pytest.mark.parametrize(
    "accept", ["*/*", "text/plain", "", "application/json", "text/htmlx", "application/html"]
)
async def test_clients_other_than_browsers_get_text(client: httpx.AsyncClient, accept: str) -> None:
    answer = await client.get("/", headers={"accept": accept})
    assert answer.headers["content-type"].startswith("text/plain")
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in answer.text
    assert answer.headers["vary"] == "Accept", "a cache keeps both apart"


@pytest.mark.parametrize("headers", [BROWSER, {"accept": "*/*"}])
async def test_clients_probe_with_head(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    answer = await client.head("/", headers=headers)
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("name", sorted(FILES))
async def test_every_file_is_sent_with_its_type_and_policy(
    client: httpx.AsyncClient, name: str
) -> None:
    answer = await client.get(f"/page/{name}")
    assert answer.content == FILES[name].content
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg"}
    assert answer.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    policy = dict(
        directive.split(" ", 1)
        for directive in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert not re.search(r"unsafe|https?:|\*", " ".join(policy.values()))


async def test_page_file_with_known_etag_is_304(client: httpx.AsyncClient) -> None:
    first = await client.get("/page/page.css")
    again = await client.get("/page/page.css", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = await client.get("/page/main.js", headers={"if-none-match": first.headers["etag"]})
    assert other.status_code == 200


@pytest.mark.parametrize(
    "name", ["none.js", "page.py", "..%2fpage.py", "%2e%2e/page.py", ".", "", "index.html/", "a%00"]
)
async def test_files_outside_page_are_404(client: httpx.AsyncClient, name: str) -> None:
    assert (await client.get(f"/page/{name}")).status_code == 404


async def test_page_needs_no_key_and_reveals_no_model(connect: Connect) -> None:
    client = connect(Settings(server=Server(api_keys=(KEY,))))
    for path in ("/", "/page/main.js", "/page/none.js"):
        assert (await client.get(path, headers=BROWSER)).status_code != 401
    assert b"demo" not in FILES["index.html"].content
    for path in ("/", "/v1/status", "/v1/settings", "/page", "/pages/main.js"):
        assert (await client.get(path)).status_code == 401, path


async def test_page_refuses_foreign_host_names(client: httpx.AsyncClient) -> None:
    answer = await client.get("/", headers={**BROWSER, "host": "evil.example"})
    assert answer.status_code == 403
    answer = await client.get("/page/main.js", headers={"origin": "https://evil.example"})
    assert answer.status_code == 403


def test_page_files_stay_small() -> None:
    assert sum(len(file.content) for file in FILES.values()) < MAX_BYTES


def test_page_has_no_inline_code_and_no_foreign_urls() -> None:
    """The content policy would block both, and the page would break silently."""
    page = FILES["index.html"].content.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page)
    for name, file in FILES.items():
        text = file.content.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.[a-z]|\burl\(", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|\beval\(|new Function", text)


def test_page_preloads_every_module() -> None:
    page = FILES["index.html"].content.decode()
    modules = {name for name in FILES if name.endswith(".js")}
    assert set(re.findall(r'(?:src|href)="page/(\w+\.js)"', page)) == modules
    for name in modules:
        imported = re.findall(r'from "\./(\w+\.js)"', FILES[name].content.decode())
        assert set(imported) <= modules
