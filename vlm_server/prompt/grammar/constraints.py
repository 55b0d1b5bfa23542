"""What the answer of a request is held to."""

from __future__ import annotations

from vlm_server.errors import InvalidRequest
from vlm_server.interfaces.model_spec import ModelSpec, ToolParser
from vlm_server.prompt.grammar.constraint import (
    TOOLS_PARAM,
    CallSyntax,
    Constraint,
    ForcedCalls,
    FreeCalls,
    Mark,
    Schema,
)
from vlm_server.protocol import SamplingParams, Submit

_JSON_FORMATS = frozenset({"json_tools"})
"""Tool formats whose body is `{"name": ..., "arguments": {...}}`."""


class Constraints:
    """What the answers of one model are held to, request by request."""

    def __init__(self, host: ModelSpec) -> None:
        self._format = host.tool_parser
        self._syntax = None if self._format is None else _syntax(host, self._format)

    def of(self, submit: Submit) -> Constraint | None:
        """None for an answer that is free. Raises InvalidRequest for what can't be ensured."""
        found = self._find(submit)
        if found is not None:
            _check_end(submit.sampling)
        return found

    def _find(self, submit: Submit) -> Constraint | None:
        schema, tools = submit.sampling.json_schema, submit.tools
        if tools is not None and tools.choice == "required":
            if schema is not None:
                message = "an answer that must call a tool can't follow a schema of its own"
                raise InvalidRequest(message, "response_format")
            return ForcedCalls(tools)
        if tools is None or self._syntax is None:  # no call is possible
            return None if schema is None else Schema(schema)
        if tools.strict and not self._syntax.is_json:
            raise InvalidRequest(
                "this model does not write the arguments of tool calls as JSON: strict tools can "
                "only be held to their schemas where `tool_choice` forces a call",
                TOOLS_PARAM,
            )
        if schema is None and not tools.strict:
            return None
        return FreeCalls(tools, self._syntax, schema)


def _check_end(sampling: SamplingParams) -> None:
    """An answer with a grammar ends where that does."""
    for name in ("min_tokens", "ignore_eos"):
        if getattr(sampling, name):
            raise InvalidRequest(
                f"`{name}` can't be combined with a schema, nor with forced or strict tools", name
            )


def _syntax(host: ModelSpec, parser: ToolParser) -> CallSyntax:
    return CallSyntax(
        _mark(host, parser.start),
        _mark(host, parser.end),
        parser.start,
        parser.name in _JSON_FORMATS,
    )


def _mark(host: ModelSpec, text: str) -> Mark:
    """`text` with the ids of its control tokens, which no text of a grammar stands for.

    llguidance takes for one whatever was added to a vocabulary and stands in angle brackets, such
    as Qwen's `<tool_call>`, which its tokenizer calls none.
    """
    added = host.backend.get_added_tokens_decoder()
    special = {
        token.content: token_id
        for token_id, token in added.items()
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }
    mark: list[int | str] = []
    while text:
        found = [(text.find(name), -len(name), name) for name in special if name in text]
        start, _, name = min(found, default=(len(text), 0, ""))
        mark += [text[:start]] if start else []
        mark += [special[name]] if name else []
        text = text[start + len(name) :]
    return tuple(mark)
