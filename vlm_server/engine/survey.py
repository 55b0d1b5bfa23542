"""`python -m vlm_server.engine.survey`: examines one checkpoint; see `checkpoints.survey`."""

from __future__ import annotations

import logging
import os
import sys

import msgspec

from vlm_server.engine.memory.governor import MIB
from vlm_server.hub.survey import Survey, SurveyRequest
from vlm_server.platform import backend
from vlm_server.platform.footprint import be_killed_first


def main() -> None:
    """Answer the request on standard input; what libraries print goes to standard error."""
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    be_killed_first()
    logging.basicConfig(level=logging.ERROR)
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=SurveyRequest)
    with os.fdopen(answer, "wb") as out:
        out.write(msgspec.json.encode(_survey(request)))


def _survey(request: SurveyRequest) -> Survey:
    try:  # mlx may lack its backend
        from vlm_server.engine.start import LEAST_TOKENS
        from vlm_server.runner.loading.survey import survey
    except ImportError as error:
        return Survey(refusal=backend.not_loaded(error))
    return _with_room(survey(request, LEAST_TOKENS), LEAST_TOKENS)


def _with_room(found: Survey, least_tokens: int) -> Survey:
    """What is refused after the start, too: a model that leaves no room for a short request."""
    least = min(least_tokens, found.context_tokens)
    if found.fitting_tokens is None or found.fitting_tokens >= least:
        return found
    free = (found.limit_bytes - found.weight_bytes) / MIB
    reason = (
        f"the model leaves no room for requests: beside its weights {free:.0f} MiB of "
        f"memory.limit_bytes are left, enough for {found.fitting_tokens} tokens, and {least} are "
        "needed: raise that, or serve a smaller or a quantized checkpoint"
    )
    return msgspec.structs.replace(found, refusal=reason)


if __name__ == "__main__":
    main()
