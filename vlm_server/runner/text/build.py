"""What a loaded model's decode batch may do, by its layers and its device."""

from __future__ import annotations

from mlx_vlm.models.cache import KVCache, make_prompt_cache

from vlm_server.runner.model.load import LoadedModel
from vlm_server.runner.text.speculation import Speculation


def speculation_of(loaded: LoadedModel, num_draft_tokens: int) -> Speculation | None:
    """How drafts of at most so many tokens are verified; None if this model's can't be.

    Layers with windows or recurrent states can't forget tokens that were wrong. A model that
    `needs_even_rows` takes no keys beyond its longest row.
    """
    layers = make_prompt_cache(loaded.language_model)
    if not (loaded.family.is_checked and all(type(layer) is KVCache for layer in layers)):
        return None
    widths = [w for w in loaded.device.draft_widths if w <= num_draft_tokens + 1]
    key_multiple, needs_even_rows = loaded.device.draft_key_multiple, loaded.family.needs_even_rows
    if not widths or (needs_even_rows and key_multiple > 1):
        return None
    return Speculation(widths, key_multiple, needs_even_rows=needs_even_rows)
