"""What the JSON of answers has in several dialects: vectors, and the use of media."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from vlm_server.protocol import Finished

_NUMBER_BYTES = 4


def numbers(row: bytes) -> msgspec.Raw:
    """The JSON of a vector, encoded here, so that a thread with many rows yields in between."""
    return msgspec.Raw(msgspec.json.encode(array("f", row).tolist()))


def vectors_of(finished: Finished, encode: Callable[[bytes], Any] = numbers) -> list[Any]:
    """The vector of each input; where a model has several for an input, they are a list."""
    all_vectors = list[Any]()
    for vectors in finished.vectors:
        size = vectors.dimensions * _NUMBER_BYTES
        starts = range(0, len(vectors.data), size)
        rows = [encode(vectors.data[start : start + size]) for start in starts]
        all_vectors.append(rows if vectors.is_multi else rows[0])
    return all_vectors


def media_usage(finished: Finished) -> dict[str, Any]:
    """Our extensions `images`, `videos` and `documents`: the tokens of each."""
    media = {
        "images": finished.images,
        "videos": finished.videos,
        "documents": finished.documents,
    }
    return {name: uses for name, uses in media.items() if uses}
