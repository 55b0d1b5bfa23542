"""Corrections of mlx-vlm's PaliGemma: images in place, and steps of several rows.

All tokens of a prompt attend to each other, which a call without a mask computes, and an answer's
tokens to those before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_vlm.models.base import create_attention_mask, to_mlx

from vlm_server.runner.families.corrections import Settings, override

TEMPLATE = """\
{%- for message in messages if message.content is not string %}
{%- for part in message.content if part.type == 'image' %}{{- '<image>' }}{% endfor %}
{%- endfor %}
{{- bos_token }}
{%- for message in messages %}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content if part.type == 'text' %}{{- part.text }}{% endfor %}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
"""
"""Images, BOS, texts; each message ends with a newline."""


def correct(model: Any, processor: Any, _settings: Settings) -> None:
    """Let the processor expand images where they are, and rows not attend to their padding.

    mlx-vlm's processor adds BOS and newline to each text.
    """
    override(processor, __call__=_expand)
    override(model.language_model, __call__=_call_text)


def _expand(self: Any, images: Any = None, text: Any = None, **_: Any) -> Mapping[str, Any]:
    texts = [text] if isinstance(text, str) else text
    expanded = [each.replace("<image>", "<image>" * self.image_seq_length) for each in texts]
    inputs = self.tokenizer(expanded, add_special_tokens=False)
    pixels = self.image_processor(images)["pixel_values"]
    result: Mapping[str, Any] = to_mlx({**inputs, "pixel_values": pixels})
    return result


def _call_text(
    self: Any,
    inputs: Any,
    inputs_embeds: Any = None,
    mask: Any = None,
    cache: Any = None,
    **arguments: Any,
) -> Any:
    if mask is None and cache and hasattr(cache[0], "left_padding"):
        mask = create_attention_mask(inputs, cache[0])
    kind = type(self).__mro__[1]
    return kind.__call__(self, inputs, inputs_embeds, mask, cache, **arguments)
