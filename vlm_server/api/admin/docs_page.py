"""`GET /docs`: the description of the API for browsers, made from that of `/openapi.json`.

One file of HTML without scripts; its style is named in the policy by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

Json = dict[str, Any]

STYLE = """
:root {color-scheme:light dark; font:16px/1.5 system-ui, sans-serif}
body {max-width:60rem; margin:2rem auto; padding:0 1rem}
h1 {overflow-wrap:anywhere}
h2 {margin:2rem 0 .5rem; font-size:1.2rem}
details {border-top:1px solid #8886; padding:.4rem 0; overflow-wrap:anywhere}
summary {cursor:pointer}
b {display:inline-block; min-width:4.5rem}
code, pre {font:.875rem/1.4 ui-monospace, monospace}
pre {overflow-x:auto; padding:.8rem; background:#8882}
""".strip()
_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def docs_endpoint(describe: Callable[[], Json]) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint; the page is made at the first request."""
    page = cache(lambda: "".join(_page(describe())))

    async def show(_: Request) -> Response:
        return Response(page(), headers=HEADERS, media_type="text/html; charset=utf-8")

    return show


def _page(document: Json) -> Iterator[str]:
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<style>{STYLE}</style></head><body><main><h1>{title}</h1>"
    yield '<p>The same for programs: <a href="/openapi.json">openapi.json</a>, OpenAPI 3.1.</p>'
    operations = [
        (operation["tags"][0], method.upper(), path, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]
    for tag in (tag["name"] for tag in document["tags"]):
        yield f"<h2>{escape(tag)}</h2>"
        for name, method, path, operation in operations:
            if name == tag:
                yield from _operation(method, path, operation)
    yield "<h2>Bodies and errors</h2>"
    for name, schema in document["components"]["schemas"].items():
        text = escape(json.dumps(schema, indent=2, ensure_ascii=False))
        yield f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>'
        yield f"<pre>{text}</pre></details>"
    yield "</main></body></html>"


def _operation(method: str, path: str, operation: Json) -> Iterator[str]:
    yield f"<details><summary><b>{method}</b> <code>{escape(path)}</code> "
    yield f"{escape(operation['summary'])}</summary><ul>"
    for parameter in operation.get("parameters", ()):
        kind = f"{parameter['in']}, {parameter['schema']['type']}"
        yield f"<li><code>{escape(parameter['name'])}</code> ({escape(kind)})</li>"
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        links = ", ".join(
            f'<a href="#{name}"><code>{name}</code></a>' for name in _names(content.get("schema"))
        )
        yield f"<li>body: <code>{escape(kind)}</code> {links}</li>"
    yield "</ul></details>"


def _names(schema: Json | None) -> list[str]:
    """The names of the schemas that a body follows one of."""
    if schema is None:
        return []
    return [escape(each["$ref"].rpartition("/")[2]) for each in schema.get("anyOf", [schema])]
