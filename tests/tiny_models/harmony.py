"""gpt-oss with the control tokens of harmony, in whose channels it answers."""

from __future__ import annotations

from dataclasses import replace

from tests.tiny_models.checkpoint import Checkpoint, Family
from tests.tiny_models.text_experts import WITH_EXPERTS
from tests.tiny_models.vision_language import words
from tests.tiny_models.vocabulary import Vocabulary

SPECIALS = words(
    "<|endoftext|> <|return|> <|call|> <|start|> <|end|> <|message|> <|channel|> <|constrain|>"
)
TEMPLATE = """\
{%- for tool in tools or [] %}{{- tool.function.name + ' ' }}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' + message.content }}
{%- elif message.tool_calls %}
{{- '<|start|>assistant to=functions.' + message.tool_calls[0].function.name }}
{{- '<|channel|>commentary json<|message|>' }}
{{- message.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' %}
{%- if message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content }}
{%- endif %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}
"""


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    plain = WITH_EXPERTS["gpt_oss"].describe(vocabulary)
    return replace(plain, template=TEMPLATE, eos=("<|return|>", "<|endoftext|>", "<|call|>"))


GPT_OSS = Family(SPECIALS, _describe)
