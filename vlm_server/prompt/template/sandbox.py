"""Chat templates, programs from the checkpoint, rendered in a sandbox with a budget.

jinja2's immutable sandbox bounds neither time nor memory: of 33 hostile templates
(tests/unit/prompt/template/test_sandbox) it refuses 3. Here a rendering has a budget of steps and
seconds, and the result of a call is bounded by the size of its arguments.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes, utils
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_STEPS = 2_000_000
_MAX_SECONDS = 10.0
_MAX_CHARACTERS = 64 << 20
"""The longest text or list; the default limit on a request's text is lower."""
_MAX_PARTS = 1_000_000
"""The most values rendered into one text."""
_MAX_BITS = 64
_MAX_WIDTH = 1000
_WIDE = re.compile(r"\d{4,}|\*|\{[^}]*\{")
"""A width in a format that could make a text of any length."""
_WIDENERS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "format_map"})
_UNKNOWN_FILTERS = (
    "batch", "center", "filesizeformat", "format", "pprint", "round", "slice", "urlize", "wordwrap",
    "xmlattr",
)  # fmt: skip
"""Filters that take a number of any size; chat templates need none."""
_TEXT_FILTERS = (
    "capitalize", "e", "escape", "forceescape", "indent", "join", "lower", "replace", "safe",
    "string", "striptags", "title", "tojson", "trim", "truncate", "upper", "urlencode", "wordcount",
)  # fmt: skip
"""Filters that render any value as a text."""
_UNKNOWN_GLOBALS = ("cycler", "joiner", "lipsum")
_METER, _CONCATENATE = "metered", "concatenated"


class TemplateError(Exception):
    """A template is invalid, refuses its input, or exceeds its budget; the message says which."""


class TemplateRefusal(TemplateError):
    """A template refuses its input, with a message of its own."""


class SandboxedTemplate:
    """One chat template. Rendering is thread-safe."""

    def __init__(self, source: str) -> None:
        """Raises TemplateError for an invalid template."""
        try:
            self._template = _Environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, KeyError) as error:
            raise TemplateError(f"the chat template is wrong: {error}") from None

    def render(self, **variables: Any) -> str:
        """Raises TemplateError."""
        pieces, size = [], 0
        token = _budget.set(_Budget())
        try:
            for piece in self._template.generate(**variables):
                pieces.append(piece)
                size += len(piece)
                _check_size(size)
        except TemplateRefusal:
            raise
        except Exception as error:  # noqa: BLE001 - templates are programs of their own
            raise TemplateError(str(error) or type(error).__name__) from None
        finally:
            _budget.reset(token)
        return "".join(pieces)


class _Budget:
    """The steps and time left to a rendering."""

    def __init__(self) -> None:
        self._steps = 0
        self._deadline = time.monotonic() + _MAX_SECONDS

    def take(self) -> None:
        """Take one step: an iteration of a loop, or a call. Raises TemplateRuntimeError."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise jinja2.TemplateRuntimeError("it takes too many steps")
        if time.monotonic() > self._deadline:
            raise jinja2.TemplateRuntimeError("it takes too long")


_budget: ContextVar[_Budget] = ContextVar("budget")


class _Environment(ImmutableSandboxedEnvironment):
    """The environment that templates of the hub expect: that of transformers."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_finalized,
        )
        for name in _UNKNOWN_FILTERS:
            del self.filters[name]
        for name in _UNKNOWN_GLOBALS:
            del self.globals[name]
        self.filters |= {"tojson": _to_json, "indent": _indented, "replace": _replaced}
        self.filters |= {name: _measuring(self.filters[name]) for name in _TEXT_FILTERS}
        self.filters |= {_METER: _metered, _CONCATENATE: _concatenated}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _now}
        self.globals |= {"namespace": _Namespace}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The template with every loop metered, and concatenation by a bounded function."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            if loop.recursive:
                raise jinja2.TemplateSyntaxError("recursive loops are not supported", loop.lineno)
            loop.iter = _filtered(loop.iter, _METER)
        for joined in tree.find_all(nodes.Concat):
            parts = nodes.List(joined.nodes, lineno=joined.lineno)
            joined.nodes = [_filtered(parts, _CONCATENATE)]
        return tree

    def call(
        __self,
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        _budget.get().take()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            args = _checked_arguments(owner, name, args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("chat templates can't raise to a power")
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        if operator == "*":
            for factor, other_factor in ((left, right), (right, left)):
                if isinstance(factor, Sized) and isinstance(other_factor, int):
                    _check_size(len(factor) * other_factor)
        if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _check_size(len(left) + len(right))
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > _MAX_BITS:
            raise jinja2.TemplateRuntimeError("a number is too large")
        return result


class _Generation(Extension):
    """`{% generation %}`, which marks training targets; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class _Namespace(utils.Namespace):
    """A namespace without names that begin with an underscore, as Python's own attributes do."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *others = args
        for name in dict(*others, **kwargs):
            _check_name(name)
        utils.Namespace.__init__(self, *others, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


# ---- functions of templates -----------------------------------------------------------------


def _metered(values: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop, counted against the budget."""
    budget = _budget.get()
    for value in values:
        budget.take()
        yield value


def _concatenated(values: Sequence[Any]) -> str:
    _check_value(values)
    return "".join(map(str, values))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    _check_width(indent)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _indented(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    _check_width(width)
    return jinja2.filters.do_indent(text, width, first, blank)


def _replaced(text: str, old: str, new: str, count: int | None = None) -> str:
    old, new = _checked_arguments(str(text), "replace", (str(old), str(new)))
    return str(text).replace(old, new, -1 if count is None else count)


def _raise_exception(message: Any) -> None:
    raise TemplateRefusal(str(message))


def _now(form: str) -> str:
    _check_format(form)
    return datetime.now().strftime(form)


# ---- bounds ------------------------------------------------------------------------------


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _measuring(inner: Callable[..., Any]) -> Callable[..., Any]:
    """`inner`, a filter, with bounds on the values that it renders."""
    offset = int(hasattr(inner, "jinja_pass_arg"))

    @wraps(inner)
    def measured(*args: Any, **kwargs: Any) -> Any:
        values = list(args)
        if len(values) > offset and isinstance(values[offset], Iterator):
            values[offset] = list(values[offset])
        for value in values[offset:]:
            _check_value(value)
        return inner(*values, **kwargs)

    return measured


def _finalized(value: Any) -> Any:
    _check_value(value)
    return value


def _check_value(value: Any) -> None:
    """Raises TemplateRuntimeError for a value with too long a text."""
    if isinstance(value, str):
        _check_size(len(value))
        return
    if not isinstance(value, list | tuple | Mapping):
        return
    remaining, size, num_parts = [value], 0, 0
    while remaining:
        part = remaining.pop()
        num_parts += 1
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, Mapping):
            remaining += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple):
            remaining += part
        if size > _MAX_CHARACTERS or num_parts + len(remaining) > _MAX_PARTS:
            raise jinja2.TemplateRuntimeError("it makes too long a text")


def _checked_arguments(text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The checked arguments of a text's method. Raises SecurityError, TemplateRuntimeError."""
    if name in _WIDENERS:
        raise SecurityError(f"chat templates can't call {name}")
    if name == "join" and args:
        args = (list(args[0]), *args[1:])
        _check_value(args[0])
        _check_size(len(text) * len(args[0]))
    if name == "replace" and len(args) > 1:
        _check_size(len(text) + text.count(args[0]) * len(args[1]))
    return args


def _check_size(size: int, limit: int = _MAX_CHARACTERS) -> None:
    if size > limit:
        raise jinja2.TemplateRuntimeError("it makes too long a text")


def _check_width(width: str | int | None) -> None:
    _check_size(len(width) if isinstance(width, str) else width or 0, _MAX_WIDTH)


def _check_format(text: str) -> None:
    if _WIDE.search(text):
        raise SecurityError("chat templates can't ask for such a width")


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"chat templates can't store the attribute {name!r}")
