"""The page: who gets it, its content policy, its size."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from pathlib import Path

import httpx
import pytest
from PIL import Image

from tests.support import sample_picture
from tests.unit.api.conftest import Connect
from vlm_server.api.page.page import read_files, version_of
from vlm_server.settings import Server, Settings

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
FILES = read_files()
KEY = "correct-horse-battery"
MAX_BYTES = 300_000
"""What a browser loads before anything is asked, and compressed, all that answers ever need."""
OWN = {
    name: file.content.decode() for name, file in FILES.items() if not re.search("vendor|png", name)
}
_IMPORT = re.compile(
    r'^(?:import|export) .*?from "\./([\w.]+)";|^\} from "\./([\w.]+)";', re.MULTILINE
)


async def test_browser_gets_page(client: httpx.AsyncClient) -> None:
    answer = await client.get("/", headers=BROWSER)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert re.sub("v-[0-9a-f]{16}/", "", answer.text).endswith(
        FILES["index.html"].content.decode().partition("</head>")[2]
    )
    assert answer.headers["cache-control"] == "no-cache"


async def test_page_holds_needs_of_first_paint_as_policy_allows(
    client: httpx.AsyncClient,
) -> None:
    answer = await client.get("/", headers=BROWSER)
    [style] = re.findall("<style>(.*?)</style>", answer.text, re.DOTALL)
    for name in ("page.css", "chat.css"):
        assert FILES[name].content.decode() in style
    assert 'rel="stylesheet"' not in answer.text.partition("</head>")[0]
    [script] = re.findall("<script>(.*?)</script>", answer.text, re.DOTALL)
    policy = answer.headers["content-security-policy"]
    for directive, text in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'self' 'sha256-{digest}';" in policy


async def test_page_names_files_that_browsers_keep_until_they_change(
    client: httpx.AsyncClient,
) -> None:
    text = (await client.get("/", headers=BROWSER)).text
    named = re.findall(r'(?:src=|href=|import\()"(?:\./)?(page/[^"]+)"', text)
    assert any(name.endswith("/main.js") for name in named)
    [version] = {name.split("/")[1] for name in named}
    for name in (*named, f"page/{version}/vendor/markdown-it.min.js"):
        answer = await client.get(f"/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert (await client.get("/page/main.js")).headers["cache-control"] == "no-cache"
    other = await client.get(f"/page/v-{16 * '0'}/main.js")
    assert other.status_code == 404, "a page of another version gets no modules of this one"


def test_version_changes_with_any_file() -> None:
    other = {**FILES, "main.js": FILES["ask.js"]}
    assert (
        len({version_of(FILES), version_of(other), version_of(dict(list(FILES.items())[1:]))}) == 3
    )


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
    kinds |= {"png": "image/png", "txt": "text/plain"}
    assert answer.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    policy = dict(
        directive.split(" ", 1)
        for directive in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for directive in ("script-src", "style-src"):
        assert re.fullmatch(r"'self' 'sha256-[\w+/]{43}='", policy[directive])
    assert not re.search(r"unsafe|https?:|\*", " ".join(policy.values()))


async def test_page_file_is_compressed_for_clients_with_gzip(client: httpx.AsyncClient) -> None:
    small = await client.get("/page/main.js", headers={"accept-encoding": "br, gzip"})
    large = await client.get("/page/main.js", headers={"accept-encoding": "identity"})
    assert (small.headers["content-encoding"], large.headers.get("content-encoding")) == (
        "gzip",
        None,
    )
    assert small.content == large.content == FILES["main.js"].content
    assert int(small.headers["content-length"]) < int(large.headers["content-length"])
    assert small.headers["etag"] != large.headers["etag"]
    assert "Accept-Encoding" in small.headers["vary"]


@pytest.mark.parametrize("accepted", ["gzip;q=0", "gzip ; q=0.00, br", "deflate"])
async def test_page_file_is_plain_for_clients_that_refuse_gzip(
    client: httpx.AsyncClient, accepted: str
) -> None:
    answer = await client.get("/page/main.js", headers={"accept-encoding": accepted})
    assert "content-encoding" not in answer.headers


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
async def test_page_file_with_known_etag_is_304(client: httpx.AsyncClient, encoding: str) -> None:
    client.headers["accept-encoding"] = encoding
    first = await client.get("/page/page.css")
    again = await client.get("/page/page.css", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = await client.get("/page/main.js", headers={"if-none-match": first.headers["etag"]})
    assert other.status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "v-0123456789abcdef/../page.py",
        "v-0123456789abcdef/",
        "v-1/main.js",
        "none.js",
        "page.py",
        "..%2fpage.py",
        "%2e%2e/page.py",
        ".",
        "",
        "index.html/",
        "a%00",
    ],
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


def modules_of(*first: str) -> set[str]:
    """The modules that `first` import, directly or not, and themselves."""
    wanted, modules = [*first], {*first}
    while wanted:
        imported = {one or other for one, other in _IMPORT.findall(OWN[wanted.pop()])}
        wanted += imported - modules
        modules |= imported
    return modules


def test_page_files_stay_small() -> None:
    shown = set(re.findall(r'(?:src|href)="page/([\w.]+)"', OWN["index.html"])) | {"index.html"}
    first = shown | modules_of("main.js") | {"sample.png"}
    assert sum(len(FILES[name].content) for name in first) < MAX_BYTES
    assert sum(len(gzip.compress(file.content)) for file in FILES.values()) < MAX_BYTES


def test_page_has_no_inline_code_and_no_foreign_urls() -> None:
    """The content policy would block both, and the page would break silently. The script that
    starts the page is allowed."""
    html, num_scripts = re.subn(r"<script>.*?</script>", "", OWN["index.html"], flags=re.DOTALL)
    assert num_scripts == 1
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script", html)
    for name, content in OWN.items():
        text = content.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.[a-z]|\burl\(", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|\beval\(|new Function", text)


def test_page_preloads_first_modules_and_imports_others_later() -> None:
    preloaded = set(re.findall(r'rel="module" href="page/(\w+\.js)"', OWN["index.html"]))
    assert preloaded == modules_of("main.js")
    later = {
        name
        for text in OWN.values()
        for name in re.findall(r'(?:\b(?:load|later)\(|: \[)"\./([\w./-]+)"', text)
    }
    assert later <= set(FILES)
    assert {name for name in OWN if name.endswith(".js")} == modules_of(
        "main.js", *(later & set(OWN))
    )


def test_every_vendored_file_has_its_licence() -> None:
    licences = FILES["vendor/LICENSES.txt"].content.decode()
    vendored = {name.removeprefix("vendor/") for name in FILES if name.startswith("vendor/")}
    for name in vendored - {"LICENSES.txt"}:
        assert (name.split("/")[0] + "/" if "/" in name else name) in licences, name


@pytest.mark.parametrize("path", sample_picture.PATHS, ids=lambda path: path.parent.name)
def test_sample_picture_is_drawn_by_project(path: Path) -> None:
    drawn = sample_picture.draw_sample().convert("RGB")
    with Image.open(path) as kept:
        assert kept.convert("RGB").tobytes() == drawn.tobytes()
