"""Constraints on an answer: a JSON schema, required tool calls, or `auto` calls with strict tools.

A constraint is also the cache key of its grammar. Schemas are checked where they are compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from vlm_server.errors import InvalidRequest
from vlm_server.protocol import Submit, Tools

if TYPE_CHECKING:  # the grammar process needs no numpy
    from vlm_server.interfaces.model_spec import ModelSpec, ToolParser

SCHEMA_PARAM, TOOLS_PARAM = "response_format.json_schema.schema", "tools"
"""The fields of a request that constraints come from."""
Mark = tuple[int | str, ...]
"""The text before or after a call: control tokens by their id, and what is between them."""


class CallSyntax(msgspec.Struct, frozen=True):
    """The marks around a call in the model's own syntax; see `ToolParser`."""

    start: Mark
    end: Mark
    start_text: str
    """The text of `start`."""
    is_json: bool
    """Whether the call is `{"name": ..., "arguments": {...}}`."""


class _Constraint(msgspec.Struct, frozen=True, kw_only=True):
    param: ClassVar[str] = TOOLS_PARAM
    """The field of the request that has the constraint."""
    subject: ClassVar[str] = "the schema of these tools"
    header: Mark = ()
    """The header before an answer's own text; empty for models that don't write in channels."""

    def refusal(self, reason: str) -> InvalidRequest:
        """The error for a client: the constraint can't be obeyed because of `reason`."""
        return InvalidRequest(f"{self.subject} can't be obeyed: {reason}", self.param)


class Schema(_Constraint, frozen=True, tag="schema"):
    """JSON that conforms to `schema`, itself JSON."""

    param: ClassVar[str] = SCHEMA_PARAM
    subject: ClassVar[str] = "this schema"
    schema: str


class RequiredCalls(_Constraint, frozen=True, tag="required"):
    """`required` calls: an answer that is `[{"name": ..., "arguments": {...}}, ...]`."""

    tools: Tools


class AutoCalls(_Constraint, frozen=True, tag="auto"):
    """`auto` calls: text with calls; the arguments of strict tools conform to their schemas.

    With a `schema`, the answer is either JSON that conforms to it, or calls and nothing else.
    """

    tools: Tools
    syntax: CallSyntax
    schema: str | None = None


Constraint = Schema | RequiredCalls | AutoCalls

encode = msgspec.json.Encoder().encode
"""Encodes a constraint; equal constraints give equal bytes."""
_decoder: msgspec.json.Decoder[Constraint] = msgspec.json.Decoder(Constraint)
decode = _decoder.decode
"""The reverse of `encode`."""


class Constraints:
    """The constraints on one model's answers."""

    def __init__(self, spec: ModelSpec) -> None:
        parser = spec.tool_parser
        self._syntax = None if parser is None else _syntax(spec, parser)
        reasoning = spec.reasoning_format
        self._header = _mark(spec, "" if reasoning is None else reasoning.answer_header)

    def constraint_on(self, submit: Submit) -> Constraint | None:
        """The constraint on an answer, if any. Raises InvalidRequest if it can't be enforced."""
        constraint = self._find(submit)
        for name in ("min_tokens", "ignore_eos"):
            if constraint is not None and getattr(submit.sampling, name):
                message = "can't be combined with a schema, nor with forced or strict tools"
                raise InvalidRequest(f"`{name}` {message}", name)
        return constraint

    def _find(self, submit: Submit) -> Constraint | None:
        schema, tools = submit.sampling.json_schema, submit.tools
        header = self._header if submit.prompt is None else ()  # else the prompt may end behind it
        if tools is not None and tools.choice == "required":
            if schema is not None:
                message = "an answer that must call a tool can't follow a schema"
                raise InvalidRequest(message, "response_format")
            return RequiredCalls(tools, header=header)
        if tools is None or self._syntax is None:  # no call is possible
            return None if schema is None else Schema(schema, header=header)
        if tools.strict and not self._syntax.is_json:
            raise InvalidRequest(
                "this model does not write the arguments of tool calls as JSON; strict schemas are "
                "enforced only with a `tool_choice` that forces a call",
                TOOLS_PARAM,
            )
        if schema is None and not tools.strict:
            return None
        return AutoCalls(tools, self._syntax, schema, header=header)


def _syntax(spec: ModelSpec, parser: ToolParser) -> CallSyntax:
    start, end = _mark(spec, parser.start), _mark(spec, parser.end)
    return CallSyntax(start, end, parser.start, is_json=parser.name == "json_tools")


def _mark(spec: ModelSpec, text: str) -> Mark:
    """`text` with the ids of its control tokens.

    llguidance treats any added token in angle brackets as a control token, such as Qwen's
    `<tool_call>`, although the tokenizer does not.
    """
    added_tokens = spec.backend.get_added_tokens_decoder()
    special = {
        token.content: token_id
        for token_id, token in added_tokens.items()
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }
    mark: list[int | str] = []
    while text:
        matches = [(text.find(name), -len(name), name) for name in special if name in text]
        start, _, name = min(matches, default=(len(text), 0, ""))
        mark += [text[:start]] if start else []
        mark += [special[name]] if name else []
        text = text[start + len(name) :]
    return tuple(mark)
