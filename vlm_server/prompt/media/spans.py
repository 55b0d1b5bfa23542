"""The places of media items in the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vlm_server.cache.prompt_key import MediaSpan
from vlm_server.errors import InternalError
from vlm_server.prompt.media.processor import MediaItem


def expand(
    token_ids: list[int], media: list[MediaItem]
) -> tuple[NDArray[np.int32], tuple[MediaSpan, ...], list[tuple[int, NDArray[np.int32]]]]:
    """The token ids of a prompt with all tokens of its media, (tokens,), and its spans in order.

    Also the first token and the M-RoPE positions, (3, tokens), of each media item that has any.
    """
    ids = np.array(token_ids, dtype=np.int32)
    kinds = [item.layout.token_id for item in media]
    indices = np.flatnonzero(np.isin(ids, kinds))
    if ids[indices].tolist() != kinds:
        raise InternalError(f"{len(media)} images have {len(indices)} tokens in the prompt.")
    parts, spans, placed, cursor, length = [], list[MediaSpan](), [], 0, 0
    for index, item in zip(indices, media, strict=True):
        text, layout = ids[cursor:index], item.layout
        start = length + len(text)
        cursor, length = int(index) + 1, start + len(layout.token_ids)
        parts += [text, layout.token_ids]
        placed += [(start, layout.positions)] if layout.positions is not None else []
        for (first, end), mm_hash in zip(layout.units, item.mm_hashes, strict=True):
            spans.append(MediaSpan(start + first, start + end, mm_hash))
    return np.concatenate([*parts, ids[cursor:]]), tuple(spans), placed


def whole_items(spans: Sequence[MediaSpan], media: Sequence[MediaItem]) -> list[MediaSpan]:
    """The positions of each media item, from its first span to its last."""
    wholes, first = [], 0
    for item in media:
        end = first + len(item.layout.units)
        wholes.append(MediaSpan(spans[first].start, spans[end - 1].end, item.key))
        first = end
    return wholes
