"""JSON schemas in requests of tests, and the check of their answers."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from tests.integration.harness import EngineHarness
from vlm_server.interfaces import SeqId
from vlm_server.protocol import Finished, SamplingParams

SHAPE = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "grün", '\u2028"\\\n']},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "label": {"type": "string", "maxLength": 6},
        "filled": {"type": "boolean"},
    },
    "required": ["colour", "count", "label", "filled"],
    "additionalProperties": False,
}
"""Of a shape in a picture."""


def schema_sampling(schema: Any, seed: int | None = None, **changes: Any) -> SamplingParams:
    """Greedy without a seed."""
    fields = {"max_tokens": 100, "temperature": 0.0 if seed is None else 1.5, "seed": seed}
    return SamplingParams(json_schema=json.dumps(schema), **fields | changes)


def conforming_answer(engine: EngineHarness, request_id: str, schema: Any) -> Any:
    """The answer of a request, checked against its schema."""
    end = engine.ends[request_id]
    assert isinstance(end, Finished), end
    assert engine.finish_reasons[SeqId(request_id)] == "stop"
    answer = json.loads(engine.texts[request_id])
    jsonschema.validate(answer, schema)
    return answer
