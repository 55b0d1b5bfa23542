"""The `Server-Timing` of a whole answer (https://www.w3.org/TR/server-timing/)."""

from __future__ import annotations

from vlm_server.api.http.metrics.recorder import AnswerRecorder


def server_timing(answer: AnswerRecorder, now: float) -> str:
    """How many milliseconds each phase took, and all until `now`."""
    seconds = {**answer.phase_seconds(), "total": now - answer.received_at}
    return ", ".join(f"{name};dur={1e3 * value:.1f}" for name, value in seconds.items())
