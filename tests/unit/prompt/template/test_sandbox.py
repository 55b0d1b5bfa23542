"""Chat templates are untrusted programs: they reach no internals, and end in bounded time."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

from vlm_server.prompt.template import sandbox
from vlm_server.prompt.template.sandbox import SandboxedTemplate, TemplateError

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "<é>"}, {"type": "image"}]},
]


def render(source: str, **variables: Any) -> str:
    return SandboxedTemplate(source).render(messages=MESSAGES, **variables)


def refusal(source: str) -> str:
    with pytest.raises(TemplateError) as caught:
        render(source)
    return str(caught.value)


@pytest.fixture
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_MAX_SECONDS", 0.5)


# ---- features of real templates ------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ loop.index }}{{ loop.last }}{% endfor %}", "1False2True"),
        ("{% for m in messages %}{{ loop.length ~ '/' }}{% endfor %}", "2/2/"),
        ("{% for m in messages if m.role == 'user' %}{{ m['role'] }}{% endfor %}", "user"),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}", "x"),
        ("{% for m in nothing %}{% else %}none{% endfor %}", "none"),
        ("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}", None),
        (
            "{{ messages[1].content|tojson }}",
            '[{"type": "text", "text": "<é>"}, {"type": "image"}]',
        ),
        ("{{ {'a': 1}|tojson(indent=1) }}", '{\n "a": 1\n}'),
        ("{{ messages|map(attribute='role')|join(', ') }}", "system, user"),
        ("{{ messages|selectattr('role', 'equalto', 'user')|list|length }}", "1"),
        ("{{ (messages|first).role.upper() ~ 1 }}", "SYSTEM1"),
        ("{{ messages[0].content.split(' ')[-1] + '-' * 3 }}", "brief---"),
        ("{{ '%s: %02d' % ('a', 5) }}{{ '{}!'.format('b') }}", "a: 05b!"),
        ("{{ 'a b'|replace(' ', '_')|trim|indent(2) }}{{ 'a b'.replace('a', 'b') }}", "a_bb b"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 2 %}{{ ns.n }}", "2"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a') }}", "[a]"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{{ strftime_now('%d')|length }}{{ dict(a=1).a }}{{ range(3)|list }}", "21[0, 1, 2]"),
        ("  {%- if true %}\n  x\n  {%- endif %}\n", "  x"),
        ("{{ bos_token }}{{ tools is none }}{{ missing is defined }}", None),
    ],
)
def test_sandbox_renders_features_of_chat_templates(source: str, expected: str | None):
    text = render(source, bos_token="<s>", tools=None)
    assert expected is None or text == expected


def test_sandbox_reports_raise_exception_of_template():
    assert refusal("{{ raise_exception('roles must alternate') }}") == "roles must alternate"


# ---- unreachable internals -----------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ messages[0].pop('role') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ range.__self__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ dict.__call__.__globals__ }}",
        "{{ (messages|map('upper')).gi_frame.f_builtins }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{0.__class__}'.format_map(messages[0]) }}",
        "{{ cycler.__init__.__globals__.os.popen('touch /tmp/x') }}",
        "{{ lipsum.__globals__['os'].system('x') }}",
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}",
        "{% extends '/etc/passwd' %}",
        "{{ messages|map(attribute='__class__.__mro__')|first|first }}",
        "{{ messages|attr('__class__')|string + 1 }}",
    ],
)
def test_sandbox_reaches_no_internals_and_changes_no_messages(source: str):
    with contextlib.suppress(TemplateError):
        assert not render(source), "it is undefined"
    assert MESSAGES[0] == {"role": "system", "content": "be brief"}
    assert len(MESSAGES) == 2


# ---- bounds of time and memory -------------------------------------------------------

GROWING = "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}" * 3 + "{% endfor %}" * 3,
        "{% for i in range(100000) %}{% for j in range(100000)|map('upper')|list %}{% endfor %}"
        "{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}",
        GROWING + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        GROWING + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
        GROWING + "{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
        GROWING + "{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s|tojson }}",
        GROWING + "{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s|string|length }}",
        GROWING + "{% set ns.s = {'a': ns.s, 'b': ns.s} %}{% endfor %}{{ ns.s ~ '' }}",
        GROWING + "{% set ns.s = ns.s.replace('a', 'aaaaaaaa') %}{% endfor %}",
        GROWING + "{% set ns.s = ns.s|replace('a', 'aaaaaaaa') %}{% endfor %}",
        GROWING + "{% set ns.s = ns.s.join([ns.s, ns.s, ns.s]) %}{% endfor %}",
        GROWING + "{% set ns.s = [ns.s, ns.s]|join(ns.s) %}{% endfor %}",
        "{% set ns = namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}"
        "{% endfor %}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * ['a'] }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 1000000000) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a'|center(1000000000) }}",
        "{{ 'a'|indent(1000000000, true) }}",
        "{{ [1]|tojson(indent=1000000000) }}",
        "{{ [1]|batch(1000000000, 'x')|list }}",
        "{{ [1]|slice(1000000000)|list }}",
        "{{ 1.5|round(1000000000, 'ceil') }}",
        "{{ lipsum(n=1000000000) }}",
        "{{ range(1000000000)|list }}",
        "{{ strftime_now('%1000000000Y') }}",
    ],
)
@pytest.mark.usefixtures("little_time")
def test_sandbox_ends_templates_beyond_time_or_memory(source: str):
    started = time.monotonic()
    assert len(refusal(source)) < 500
    assert time.monotonic() - started < 20


def test_sandbox_refuses_invalid_syntax():
    for source in ("{% for %}", "{{", "{% nothing %}", "{{ x|nothing }}"):
        refusal(source)
