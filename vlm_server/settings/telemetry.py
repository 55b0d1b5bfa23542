"""Settings of log, metrics and traces."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class Log(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum severity of logged messages."""
    format: Literal["text", "json"] = "text"
    """How log lines are written: as text, or each as a JSON object."""


class MetricsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefix: Annotated[str, Meta(pattern="^([a-zA-Z_:][a-zA-Z0-9_:]*)?$", max_length=64)] = (
        "vlm_server_"
    )
    """What the names of all metrics begin with; with `vllm:`, dashboards made for vLLM work as they
    are."""


class Tracing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    endpoint: str = ""
    """URL of an OpenTelemetry collector that takes traces over HTTP, such as
    `http://127.0.0.1:4318`; empty is the environment variable `OTEL_EXPORTER_OTLP_ENDPOINT`, and no
    traces without it. Needs the extra `otel`."""
