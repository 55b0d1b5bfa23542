"""Templates of conversations whose turns stand between two marks, such as ChatML."""

from __future__ import annotations

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = ("<|im_end|>", "<|endoftext|>")
PAD = "<|endoftext|>"
OF_TEXTS = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""ChatML of messages that are texts, in which the images are."""

_TEMPLATE = """\
{{- BEFORE }}
{%- for message in messages %}
{{- BEGIN }}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- IMAGE }}
{%- elif part.type == 'text' %}{{- part.text or part.content }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- END }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- ANSWER }}
{%- endif %}
"""


def turns(begin: str, image: str, end: str, answer: str, before: str = "''") -> str:
    """A template whose turns stand between `begin` and `end`, expressions of `message`.

    image: the text of an image. answer, before: the expressions before an answer, and at the start.
    """
    parts = {"BEGIN": begin, "IMAGE": repr(image), "END": end, "ANSWER": answer, "BEFORE": before}
    template = _TEMPLATE
    for name, part in parts.items():
        template = template.replace(f" {name} ", f" {part} ")
    return template


def chatml(image: str, before: str = "''") -> str:
    """The template of a family in whose prompts `image` is the text of an image."""
    begin, answer = "'<|im_start|>' + message.role + '\\n'", "'<|im_start|>assistant\\n'"
    return turns(begin, image, "'<|im_end|>\\n'", answer, before)
