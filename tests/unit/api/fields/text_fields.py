"""Fields of OpenAI's text completions."""

from __future__ import annotations

from typing import Any

from tests.unit.api.fields.field import Dialect, Reading, refused, unknown_elsewhere, works
from tests.unit.api.fields.openai_fields import (
    HARMLESS_FIELDS,
    SAMPLING,
    UNKNOWN_AT_THE_TOP,
    formats,
    streams,
)
from vlm_server.api.dialects.openai.completions import NEUTRAL, CompletionRequest
from vlm_server.api.dialects.openai.schema import HARMLESS

USUAL: dict[str, Any] = {"model": "demo", "prompt": "hi"}

COMPLETIONS = Dialect(
    title="OpenAI completions",
    route="/v1/completions",
    structs=(CompletionRequest,),
    usual=USUAL,
    fields=(
        *SAMPLING,
        works("conversation or prompt", "prompt", [5, 6]),
        works("most tokens", "max_tokens", 9),
        works("log probabilities", "logprobs", 0),
        works("likeliest tokens", "logprobs", 5, on={**USUAL, "logprobs": 0}),
        *formats(USUAL),
        *streams(USUAL),
        *HARMLESS_FIELDS,
        UNKNOWN_AT_THE_TOP,
        *unknown_elsewhere(Reading.REFUSED, ("stream_options", {**USUAL, "stream": True})),
        refused("number of answers", "best_of", 2, neutral=(1, None)),
        refused("prompt in the answer", "echo", True, neutral=(False, None)),
        refused("text after the answer", "suffix", "x", neutral=("", None)),
    ),
    more=HARMLESS | NEUTRAL.keys(),
)
