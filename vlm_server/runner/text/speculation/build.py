"""Whether drafts can be verified for a loaded model, by its layers and its device."""

from __future__ import annotations

from mlx_vlm.models.cache import KVCache, make_prompt_cache

from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.text.speculation.speculation import Speculation


def speculation_of(loaded: LoadedModel, num_draft_tokens: int) -> Speculation | None:
    """How drafts of at most so many tokens are verified; None if this model's can't be.

    Layers with windows or recurrent states can't forget tokens that were wrong. A model that
    `needs_even_rows` takes no keys beyond its longest row.
    """
    layers = make_prompt_cache(loaded.language_model)
    if not (loaded.family.is_checked and all(type(layer) is KVCache for layer in layers)):
        return None
    most = num_draft_tokens + 1
    widths = sorted({min(width, most) for width in loaded.device.draft_widths} - {1})
    if not widths:
        return None
    return Speculation(widths, needs_even_rows=loaded.family.needs_even_rows)
