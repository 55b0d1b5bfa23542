"""Settings of log, metrics and traces."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class Log(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Minimum severity of logged messages."),
    ] = "info"
    format: Annotated[
        Literal["text", "json"],
        Meta(description="How log lines are written: as text, or each as a JSON object."),
    ] = "text"


class Metrics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefix: Annotated[
        str,
        Meta(
            pattern="^([a-zA-Z_:][a-zA-Z0-9_:]*)?$",
            max_length=64,
            description="What the names of all metrics begin with; with `vllm:`, dashboards made "
            "for vLLM work as they are.",
        ),
    ] = "vlm_server_"


class Tracing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    endpoint: Annotated[
        str,
        Meta(
            description="URL of an OpenTelemetry collector that takes traces over HTTP, such as "
            "`http://127.0.0.1:4318`; empty is the environment variable "
            "`OTEL_EXPORTER_OTLP_ENDPOINT`, and no traces without it. Needs the extra `otel`."
        ),
    ] = ""
