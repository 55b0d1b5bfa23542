"""Conversations as ChatML, for families whose own template does not matter to their tests."""

from __future__ import annotations

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = ("<|im_end|>", "<|endoftext|>")
PAD = "<|endoftext|>"

_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- IMAGE }}
{%- elif part.type == 'text' %}{{- part.text or part.content }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def chatml(image: str) -> str:
    """The template of a family in whose prompts `image` is the text of an image."""
    return _TEMPLATE.replace("IMAGE", repr(image))
