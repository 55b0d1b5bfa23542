"""The ASGI application: middleware, and the dialect of each route's errors."""

from __future__ import annotations

from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from vlm_server.api.batches.lane import Lane
from vlm_server.api.dialects.anthropic.errors import PATH as MESSAGES
from vlm_server.api.dialects.anthropic.errors import encode as encode_anthropic
from vlm_server.api.dialects.files.endpoints import PATH as FILES
from vlm_server.api.dialects.ollama.render import encode_error as encode_ollama
from vlm_server.api.dialects.openai.watch.watches import Watches
from vlm_server.api.files.store import FileStore
from vlm_server.api.http import access_log, errors
from vlm_server.api.http.access.cors import Cors
from vlm_server.api.http.access.keys import KeyRing
from vlm_server.api.http.access_log import AnsweredRequests
from vlm_server.api.http.dialect import is_anthropics
from vlm_server.api.http.ended_requests import EndedRequests
from vlm_server.api.http.errors import EncodeError, encode_openai, method_not_allowed, not_found
from vlm_server.api.http.generation import Generation
from vlm_server.api.http.middleware import Errors, Gate, RequestLog
from vlm_server.api.http.queue.queue_slots import QueueSlots
from vlm_server.api.http.tracing import Tracer
from vlm_server.api.parsing.body_parser import BodyParser, start_pool
from vlm_server.api.routes import OPERATIONS, all_routes
from vlm_server.errors import RequestError
from vlm_server.platform.child.pool import ChildPool
from vlm_server.platform.log_tail import LogTail
from vlm_server.settings import Settings, Sources
from vlm_server.supervisor.engine_process.client import ModelClient


def create_app(
    settings: Settings,
    models: ModelClient,
    parsing_pool: ChildPool | None = None,
    tracer: Tracer | None = None,
    sources: Sources | None = None,
    files: FileStore | None = None,
    log_tail: LogTail | None = None,
    settings_file: Path | None = None,
) -> Starlette:
    """The ASGI application that serves `models` as `settings` say.

    The caller warms up and closes `parsing_pool`, which applications may share, and closes
    `files`. Its `state.queue_slots` counts requests, `state.event_logs` knows the answers that are
    made without a connection, `state.watches` the watches, to be closed before models are stopped,
    and `state.lane` runs batches.
    `sources` say where settings were given, and `settings_file` is where they may be. `tracer`
    records the requests that have ended; `log_tail` has the last lines of the log. Raises
    ConfigError if the file of API keys or the folder of files can't be used.
    """
    body_parser = BodyParser(parsing_pool or start_pool(settings.limits), settings.limits)
    answered, ended = AnsweredRequests(), EndedRequests(OPERATIONS)
    queue_slots = QueueSlots(settings.limits)
    files = FileStore(settings.files) if files is None else files  # an empty one is false
    generation = Generation(models, queue_slots, body_parser, settings, files)
    watches = Watches(generation)
    ring = KeyRing(settings.server)  # before middleware, which is made at the first request
    lane = Lane(settings.batches, files, generation.gaps, ring)
    app = Starlette(
        routes=all_routes(
            *(generation, settings, answered, ended, sources or {}, watches, lane),
            log_tail or LogTail(),
            settings_file,
        ),
        middleware=[
            Middleware(
                RequestLog,
                answered=answered,
                ended=ended,
                tracer=tracer,
                key_usage=generation.key_usage,
            ),
            Middleware(Cors, origins=settings.server.cors_origins),
            Middleware(Errors, models=models, queue_slots=queue_slots, encode_for=_encode_for),
            Middleware(Gate, server=settings.server, ring=ring),
        ],
        exception_handlers={HTTPException: _routing_error},
    )
    app.router.redirect_slashes = False
    app.state.queue_slots = queue_slots
    app.state.event_logs = generation.event_logs
    app.state.watches = watches
    app.state.lane = lane
    return app


def _encode_for(scope: Scope) -> EncodeError:
    """The error encoder of the dialect of the route; OpenAI's by default."""
    path = str(scope["path"])
    if path.startswith(FILES) and is_anthropics(Headers(scope=scope)):
        return encode_anthropic
    return next((encode for start, encode in _ENCODERS if path.startswith(start)), encode_openai)


_ENCODERS: tuple[tuple[str, EncodeError], ...] = (
    (MESSAGES, encode_anthropic),
    ("/api/v0/", encode_openai),
    ("/api/", encode_ollama),
)
"""Error encoders by the prefix of the dialect's routes."""


async def _routing_error(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405 in the dialect's shape."""
    assert isinstance(error, HTTPException)
    request_error: RequestError
    if error.status_code == 405:
        request_error = method_not_allowed(
            request, (error.headers or {}).get("Allow", "other methods")
        )
    else:
        request_error = not_found(request, request.app.routes)
    access_log.entry_of(request.scope).fail(request_error)
    return errors.response(request_error, _encode_for(request.scope), 1, error.headers)
