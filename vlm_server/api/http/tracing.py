"""Traces for OpenTelemetry (https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/).

A span is made when its request has ended; it holds names, counts and times, never contents. The
library, of the extra `otel`, is imported only if traces are enabled. It sends spans from its own
thread and drops spans that it can't send.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import vlm_server
from vlm_server.api.http.access_log import Entry
from vlm_server.errors import ConfigError
from vlm_server.settings import Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.util.types import AttributeValue

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_EXPORT_SECONDS = 5.0
"""Time limit on sending a batch, and so on the end of the daemon."""
_MISSING = (
    "the extra `otel` is not installed: scripts/setup otel in a clone, "
    "else install again with vlm-server[otel]"
)


def start_tracer(tracing: Tracing, operations: Mapping[str, str]) -> Tracer | None:
    """A tracer, if there is a collector for it; `operations` are those of `Tracer`.

    Raises ConfigError if the settings name a collector and the extra is not installed.
    """
    if not (tracing.endpoint or any(os.environ.get(name) for name in ENDPOINT_VARIABLES)):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import (
            SERVICE_NAME,
            SERVICE_VERSION,
            OTELResourceDetector,
            Resource,
        )
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        if tracing.endpoint:
            raise ConfigError(f"`tracing.endpoint` is set, and {_MISSING}") from None
        logger.warning("no traces are sent: %s", _MISSING)
        return None
    resource = Resource({SERVICE_NAME: "vlm_server", SERVICE_VERSION: vlm_server.__version__})
    resource = resource.merge(OTELResourceDetector().detect())  # OTEL_SERVICE_NAME and the like
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    endpoint = _with_path(tracing.endpoint) if tracing.endpoint else None
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracer(provider, operations)


class Tracer:
    """Makes a span of each request to a generating route, and one of each of its phases.

    A request with a `traceparent` (https://www.w3.org/TR/trace-context/) becomes part of that
    trace, and is left out if the sender did not sample the trace.
    """

    def __init__(self, provider: TracerProvider, operations: Mapping[str, str]) -> None:
        """`operations`: `gen_ai.operation.name` by route; other routes have no spans."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("vlm_server", vlm_server.__version__)
        self._propagator = TraceContextTextMapPropagator()
        self._operations = operations

    def record(self, entry: Entry, method: str, route: str, headers: Mapping[str, str]) -> None:
        """Make the spans of a request, and name its trace in metrics.

        Never raises, whatever a client sent.
        """
        operation = self._operations.get(route)
        if operation is None or method != "POST":
            return
        try:
            trace_id = self._record(entry, operation, route, headers)
        except Exception:
            logger.exception("id=%s can't be traced", entry.request_id)
            return
        if trace_id is not None and entry.answer is not None:
            entry.answer.set_exemplars(trace_id)

    def close(self) -> None:
        """Send the remaining spans; may take seconds."""
        self._provider.shutdown()

    def _record(
        self, entry: Entry, operation: str, route: str, headers: Mapping[str, str]
    ) -> str | None:
        """The id of the trace in hexadecimal digits, if it is sampled."""
        from opentelemetry.trace import (
            SpanKind,
            Status,
            StatusCode,
            format_trace_id,
            set_span_in_context,
        )

        answer = entry.answer
        epoch = time.time() - time.monotonic()
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        parent = self._propagator.extract(carrier)
        name = operation if answer is None else f"{operation} {answer.model}"
        span = self._tracer.start_span(
            name,
            context=parent,
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(epoch + entry.received_at),
            attributes=_attributes(entry, operation, route),
        )
        if entry.error_code is not None:
            span.set_status(Status(StatusCode.ERROR))
        if span.is_recording() and answer is not None:
            inside = set_span_in_context(span)
            for phase, start, end in answer.spans:
                child = self._tracer.start_span(
                    phase, context=inside, start_time=_nanoseconds(epoch + start)
                )
                child.end(_nanoseconds(epoch + end))
        span.end(_nanoseconds(epoch + time.monotonic()))
        context = span.get_span_context()
        return format_trace_id(context.trace_id) if context.trace_flags.sampled else None


def _with_path(url: str) -> str:
    """`url`, with the default path of traces if it has none."""
    return f"{url.rstrip('/')}/v1/traces" if urlsplit(url).path in ("", "/") else url


def _attributes(entry: Entry, operation: str, route: str) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "vlm_server",
        "http.route": route,
        "http.request.method": "POST",
        "http.response.status_code": entry.status,
        "vlm_server.request_id": entry.request_id,
        "vlm_server.images": entry.images,
        "vlm_server.videos": entry.videos,
        "vlm_server.pages": entry.pages,
    }
    if entry.error_code is not None:
        attributes["error.type"] = entry.error_code
    answer = entry.answer
    if answer is None:
        return attributes
    attributes |= {
        "gen_ai.request.model": answer.model,
        "gen_ai.response.model": answer.model,
        "gen_ai.response.id": answer.response_id,
        "gen_ai.request.stream": answer.is_stream,
        "gen_ai.response.finish_reasons": [
            reason for _, reason in sorted(answer.finish_reasons.items())
        ],
        "gen_ai.usage.input_tokens": answer.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": answer.usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": answer.usage.cached_tokens,
    }
    if answer.first_at is not None:
        seconds = answer.first_at - entry.received_at
        attributes["gen_ai.response.time_to_first_chunk"] = seconds
    return attributes


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
