"""Short chat templates that write tools, calls and results as real families' do."""

from __future__ import annotations

_PART = "{{ '<image>' if p.type == 'image' else p.text }}"
_CONTENT = (
    "{% macro show(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}"
    + _PART
    + "{% endfor %}{% endif %}{% endmacro %}"
)
_HEAD = (
    "{% if tools %}<|system|>\n{% if messages[0].role == 'system' %}"
    "{{ show(messages[0].content) }}"
    "{% endif %}<tools>{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}</tools>"
    "<|end|>\n{% elif messages[0].role == 'system' %}<|system|>{{ show(messages[0].content) }}"
    "<|end|>\n{% endif %}"
)
_ASK = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
_THINK = (
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and "
    "enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)


def _turns(call: str, result: str, thought: str = "") -> str:
    return (
        "{% for m in messages if m.role != 'system' %}{% if m.role == 'tool' %}"
        + result
        + "{% else %}"
        "<|{{ m.role }}|>" + thought + "{{ show(m.content) }}"
        "{% for tool_call in m.tool_calls or [] %}{% set f = tool_call.function %}"
        + call
        + "{% endfor %}{% endif %}<|end|>\n{% endfor %}"
    )


_HERMES_CALL = (
    '<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>'
)
HERMES = (
    _CONTENT
    + _HEAD
    + _turns(_HERMES_CALL, "<|user|><tool_response>{{ m.content + '' }}</tool_response>")
    + _ASK
)
"""Qwen2.5 and Hermes: arguments are objects, results are texts."""
QWEN3_VL = (
    _CONTENT
    + _HEAD
    + _turns(
        _HERMES_CALL,
        "<|user|><tool_response>{{ show(m.content) }}</tool_response>",
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}",
    )
    + _THINK
)
"""Results may hold images; thinking is on unless disabled."""
CODER = (
    _CONTENT
    + _HEAD
    + _turns(
        "<tool_call>\n<function={{ f.name }}>{% for k, v in f.arguments | items %}"
        "<parameter={{ k }}>{{ v }}</parameter>{% endfor %}</function></tool_call>",
        "<|tool|>{{ m.content | trim }}",
    )
    + _ASK
)
"""Iterates over the items of the arguments."""
DEEPSEEK = (
    _CONTENT
    + _HEAD
    + _turns("<call>{{ f.name + ' ' + f.arguments }}</call>", "<out>{{ m.content + '' }}</out>")
    + _ASK
)
"""Arguments are the text of JSON."""
MISTRAL = (
    _CONTENT + "{% set ns = namespace(asks=true) %}{% for m in messages %}"
    "{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ show(m.content) }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'user' %}"
    "{% if not ns.asks %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.asks = false %}"
    "{% if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}"
    "[INST]{{ show(m.content) }}[/INST]"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.content + '' }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls is defined %}[TOOL_CALLS]{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    "{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>"
    "{% else %}{% set ns.asks = true %}{{ show(m.content) }}</s>{% endif %}{% endfor %}"
)
"""Insists on ids of nine characters, and on turns; results are texts."""
KIMI = (
    _CONTENT
    + _HEAD
    + _turns(
        "<|tool_call_begin|>{{ tool_call.id }}<|tool_call_argument_begin|>"
        "{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}"
        "{% endif %}"
        "<|tool_call_end|>",
        "## Return of {{ m.tool_call_id }}\n{{ show(m.content) }}",
    )
    + _ASK
)
"""Writes ids."""
GEMMA4 = (
    _CONTENT
    + "{% if tools %}<|turn>system\n{% for t in tools %}<|tool>declaration:{{ t.function.name }}"
    "{{ '{' }}{% for k, v in t.function.parameters.properties | dictsort %}{{ k }}:"
    "{{ v.type | upper }},{% endfor %}{{ '}' }}<tool|>{% endfor %}<turn|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|tool_response>response:{{ m.name }}"
    "{{ '{' }}value:{{ show(m.content) }}{{ '}' }}<tool_response|>{% else %}<|turn>{{ m.role }}\n"
    "{{ show(m.content) | trim }}{% for c in m.tool_calls or [] %}<|tool_call>call:"
    "{{ c.function.name }}{{ '{' }}{% for k, v in c.function.arguments | dictsort %}"
    "{{ k }}:{{ v }}"
    "{% endfor %}{{ '}' }}<tool_call|>{% endfor %}<turn|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
"""Looks into the schemas, sorts, trims, and writes the names of results."""
HARMONY = (
    _CONTENT
    + "{% set ns = namespace(called='') %}<|start|>system<|message|>{{ strftime_now('%Y') }} "
    "Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% if tools %}<|start|>developer<|message|>{% for t in tools %}"
    "{{ '// ' + t.function.description + '\n' }}type {{ t.function.name }}"
    "{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "<|start|>functions.{{ ns.called }} to=assistant<|message|>{{ show(m.content) }}<|end|>"
    "{% elif m.tool_calls is defined %}"
    "{% if m.content and m.thinking %}{{ raise_exception('text and thinking') }}{% endif %}"
    "{% set said = m.content or m.thinking %}{% if said %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ show(said) }}<|end|>{% endif %}"
    "{% set f = m.tool_calls[0].function %}{% set ns.called = f.name %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<|call|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ show(m.content) }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""One call in a turn, with text or reasoning before it; insists on descriptions of tools."""
PLAIN = (
    _CONTENT + "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role') }}{% endif %}"
    "<|{{ m.role }}|>{{ show(m.content) }}<|end|>\n"
    "{% endfor %}" + _ASK
)
"""Supports no tools."""
NO_SYSTEM = (
    _CONTENT + "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant only') }}{% endif %}"
    "[{{ m.role }}]{{ show(m.content) }}"
    "{% endfor %}"
)
"""Supports neither tools nor a system message."""
