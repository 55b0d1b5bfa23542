"""Tells browsers that open the page from programs that ask for text."""

from __future__ import annotations

from starlette.datastructures import Headers

PAGE_FOLDER = "/page"
"""Where the files of the page are; nothing in them is secret."""


def wants_html(headers: Headers) -> bool:
    """Whether `text/html` is asked for by name: browsers do, while curl and clients take all."""
    ranges = headers.get("accept", "").lower().split(",")
    return any(one.partition(";")[0].strip() == "text/html" for one in ranges)


def is_page(path: str, headers: Headers) -> bool:
    """Whether this is for the page or its files, which are the same for everybody."""
    return path.startswith(f"{PAGE_FOLDER}/") or (path == "/" and wants_html(headers))
