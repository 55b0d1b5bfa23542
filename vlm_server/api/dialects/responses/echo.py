"""The renderer's options, and the fields of a request that its response repeats."""

from __future__ import annotations

from typing import Any

import msgspec

from vlm_server.api.dialects.responses import schema
from vlm_server.errors import InvalidRequest


class Options(msgspec.Struct, frozen=True):
    """The renderer's options.

    owner: of the stored response. echo: the fields that the response repeats, as a JSON object.
    items: the request's own items as a JSON list; empty if the response is not stored. namespaces:
    of tools, by name. background: whether it is made even if the client leaves.
    """

    owner: str
    echo: bytes
    items: bytes = b""
    previous_response_id: str | None = None
    namespaces: dict[str, str] = {}
    background: bool = False


def encode_echo(parsed_body: schema.ParsedBody) -> bytes:
    """`Options.echo`. Raises InvalidRequest if it can't be encoded as UTF-8.

    The front does not know the checkpoint's sampling defaults: the echo has OpenAI's.
    """
    request = parsed_body.request
    echo: dict[str, Any] = {
        "background": bool(request.background),
        "frequency_penalty": request.frequency_penalty or 0.0,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": parsed_body.echoed["max_tool_calls"],
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "presence_penalty": request.presence_penalty or 0.0,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": parsed_body.echoed["prompt_cache_key"],
        "reasoning": _reasoning(request),
        "safety_identifier": parsed_body.echoed["safety_identifier"],
        "service_tier": "default",
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": _text(request),
        "tool_choice": request.tool_choice or "auto",
        "tools": [_tool(tool) for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "user": parsed_body.echoed["user"],
    }
    return encode(echo)


def encode(value: Any) -> bytes:
    """`value` as JSON. Raises InvalidRequest for lone surrogates."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        raise InvalidRequest("A string contains a lone surrogate.") from None


def _reasoning(request: schema.ResponsesRequest) -> dict[str, Any]:
    reasoning = request.reasoning
    return {"effort": reasoning.effort if reasoning else None, "summary": None}


def _text(request: schema.ResponsesRequest) -> dict[str, Any]:
    text_format = request.text.format if request.text else None
    match text_format:
        case None:
            format_json: Any = {"type": "text"}
        case schema.JsonSchemaFormat():
            format_json = {"type": "json_schema", **msgspec.structs.asdict(text_format)}
            format_json["strict"] = bool(text_format.strict)
        case _:
            format_json = text_format
    return {"format": format_json, "verbosity": "medium"}


def _tool(tool: Any) -> dict[str, Any]:
    tool_json = {"type": "function", **msgspec.structs.asdict(tool)}
    tool_json["strict"] = bool(tool.strict)
    if tool.namespace is None:
        del tool_json["namespace"]
    return tool_json
