"""The images and videos of a prompt as the model sees them, for the usage of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from vlm_server.prompt.media.processor import MediaItem
from vlm_server.protocol import ImageUse, VideoUse


def images_used(media: Sequence[MediaItem]) -> tuple[ImageUse, ...]:
    """Size and tokens of each image among `media`, in order; not of pages."""
    return tuple(
        ImageUse(*item.layout.size, len(item.layout.token_ids))
        for item in media
        if item.sampled is None and item.page is None and item.layout.size is not None
    )


def videos_used(media: Sequence[MediaItem]) -> tuple[VideoUse, ...]:
    """Frames and tokens of each video among `media`, in order; a video may be several items."""
    uses = []
    for (_, sampled), items in groupby(media, lambda item: (item.param, item.sampled)):
        if sampled is not None:
            layouts = [item.layout for item in items]
            width, height = layouts[0].size or (0, 0)
            times = tuple(round(seconds, 3) for seconds in sampled.seconds)
            num_tokens = sum(len(layout.token_ids) for layout in layouts)
            uses.append(
                VideoUse(len(times), times[-1], num_tokens, sampled.is_cut, width, height, times)
            )
    return tuple(uses)
