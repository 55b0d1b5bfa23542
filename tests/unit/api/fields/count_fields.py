"""Fields of `/v1/tokenize`, which are those of chat completions, and of `/v1/detokenize`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from tests.unit.api.fields.field import Dialect, Field, Reading, ignored, refused, works
from tests.unit.api.fields.openai_fields import CHAT, UNKNOWN_AT_THE_TOP
from tests.unit.api.scripted_engine import Step
from vlm_server.api.dialects.openai.schema import ChatRequest
from vlm_server.api.dialects.openai.tokenize import (
    ADDS_SPECIAL,
    NEUTRAL,
    PromptRequest,
    TokensRequest,
)
from vlm_server.protocol import Finished, Usage

COUNTED: tuple[Step, ...] = (
    lambda request_id: Finished(request_id, Usage(3, 0, 2), token_ids=(5, 6, 7), text="a b c"),
)
TEXT: dict[str, Any] = {"prompt": "hi"}
TOKENS: dict[str, Any] = {"model": "demo", "tokens": [5, 6]}
_FOR_ANSWERS = (
    *("max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop", "n", "seed"),
    *(
        "prediction",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "logit_bias",
        "logprobs",
        "top_logprobs",
    ),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("response_format", "stream", "stream_options", "parallel_tool_calls"),
    *("reasoning.max_tokens", "thinking.budget_tokens"),
    *("tool_choice.function.name", "tools[].function.strict"),
)


def counting(fields: Iterable[Field], for_answers: Collection[str]) -> tuple[Field, ...]:
    """`fields` in a request to count its prompt, where those `for_answers` have no effect.

    An object that has none is named as one.
    """
    return tuple(
        replace(field, reading=Reading.IGNORED, neutral=()) if field.name in for_answers else field
        for field in fields
        if not any(field.name.startswith(f"{name}.") for name in for_answers)
    )


TOKENIZE = Dialect(
    title="`/v1/tokenize`",
    route="/v1/tokenize",
    structs=(PromptRequest, ChatRequest),
    usual=CHAT.usual,
    fields=(
        *counting(CHAT.fields, _FOR_ANSWERS),
        ignored("usage at the end", "stream_options", {"include_usage": True},
                on={**CHAT.usual, "stream": True}),
        works("conversation or prompt", "prompt", "ho", on=TEXT),
        refused("template of the request's own", ADDS_SPECIAL, True, neutral=(False, None),
                where="with `messages`"),
        refused("template of the request's own", ADDS_SPECIAL, False, on=TEXT, neutral=(True,),
                where="with `prompt`"),
        refused("at the top", "colour", "red", on=TEXT, title="any"),
        refused("form of the answer", "return_token_strs", True, neutral=(False, None)),
    ),
    more=frozenset({*CHAT.more, *NEUTRAL, ADDS_SPECIAL}),
    script=COUNTED,
    counts=True,
)  # fmt: skip

DETOKENIZE = Dialect(
    title="`/v1/detokenize`",
    route="/v1/detokenize",
    structs=(TokensRequest,),
    usual=TOKENS,
    fields=(
        works("model", "model", "other", fails=404),
        works("conversation or prompt", "tokens", [7]),
        UNKNOWN_AT_THE_TOP,
    ),
    script=COUNTED,
    counts=True,
)
