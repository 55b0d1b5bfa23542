"""What holds an answer to a grammar, a JSON schema or calls that must be made, and what excludes
what: one rule for all dialects.
"""

from __future__ import annotations

from typing import NamedTuple

from vlm_server.api.parsing.leniency import Collector
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import Tools


class ConstraintFields(NamedTuple):
    """A dialect's own names of the fields, for errors and what is ignored.

    `continued` is the one by which an answer goes on where the assistant's last message ends.
    """

    schema: str
    continued: str
    calls: str = "tool_choice"


def must_call(tools: Tools | None) -> bool:
    """Whether the answer is calls, without any text."""
    return tools is not None and tools.choice == "required"


def check_constraints(
    tools: Tools | None,
    json_schema: str | None,
    fields: ConstraintFields,
    ignored: Collector,
    *,
    continues: bool,
) -> str | None:
    """The schema that the answer has to match.

    An answer of calls that must be made has no text, so that it gets no schema; the field is
    ignored, as OpenAI does, and named. Raises InvalidRequest for an answer that `continues` the
    assistant's last message and is constrained: a grammar begins anew.
    """
    is_forced = must_call(tools)
    if is_forced and json_schema is not None:
        ignored.add(fields.schema, True)
        json_schema = None
    if continues and (is_forced or json_schema is not None):
        constraint = fields.calls if is_forced else fields.schema
        raise InvalidRequest(
            f"An answer that goes on where the assistant's last message ends (`{fields.continued}`)"
            f" can't be combined with `{constraint}`, which makes it begin anew.",
            fields.continued,
        )
    return json_schema
