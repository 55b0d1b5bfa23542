"""Pages of lists: their bounds in a query, and their JSON in OpenAI's and Anthropic's form."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from vlm_server.errors import InvalidRequest

T = TypeVar("T")

Json = dict[str, Any]
_NUMBER = re.compile(r"[0-9]{1,9}")


def limit_of(query: Mapping[str, str], default: int, maximum: int) -> int:
    """The query's `limit`. Raises InvalidRequest."""
    text = query.get("limit", str(default))
    limit = int(text) if _NUMBER.fullmatch(text) else 0
    if not 1 <= limit <= maximum:
        raise InvalidRequest(f"`limit` must be from 1 to {maximum}.", "limit")
    return limit


def is_descending(query: Mapping[str, str]) -> bool:
    """Whether the query's `order` is from the last to the first. Raises InvalidRequest."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("`order` must be 'asc' or 'desc'.", "order")
    return order == "desc"


def check_exclusive(before: str | None, after: str | None) -> None:
    """Raises InvalidRequest for a page both before an id and after another."""
    if before and after:
        raise InvalidRequest("`before_id` and `after_id` exclude each other.", "before_id")


def page(
    items: Sequence[T],
    limit: int,
    render: Callable[[T], Json],
    *,
    is_reversed: bool = False,
    **fields: str,
) -> Json:
    """A list of at most `limit` items; there are more if `items` has more. `fields` come first.

    is_reversed: whether the last of them is shown first.
    """
    data = [render(item) for item in items[:limit]]
    if is_reversed:
        data.reverse()
    return {
        **fields,
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(items) > limit,
    }
