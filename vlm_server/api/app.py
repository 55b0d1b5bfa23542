"""The ASGI application: routes, middleware, and which dialect's errors they answer with."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from vlm_server.api.http import access_log, errors
from vlm_server.api.http.access import gate
from vlm_server.api.http.access.keys import KeyRing
from vlm_server.api.http.access_log import AnsweredRequests
from vlm_server.api.http.errors import EncodeError
from vlm_server.api.http.generation import Endpoint, Generation
from vlm_server.api.http.intake.intake import Intake, start_pool
from vlm_server.api.http.middleware import Errors, Gate, RequestLog
from vlm_server.api.http.openai_errors import encode as encode_openai
from vlm_server.api.http.queue.queue_slots import QueueSlots
from vlm_server.api.openai.chat import ChatCompletions
from vlm_server.api.operations.health import Health
from vlm_server.api.operations.metrics import Metrics
from vlm_server.api.operations.models import Models
from vlm_server.api.responses.responses import ResponsesEndpoint, StoredResponses
from vlm_server.api.responses.store import ResponseStore
from vlm_server.child.pool import ChildPool
from vlm_server.errors import MethodNotAllowed, NotFound, RequestError
from vlm_server.settings import Settings
from vlm_server.supervisor.client import EngineClient


def create_app(
    settings: Settings, engine: EngineClient, intake_pool: ChildPool | None = None
) -> Starlette:
    """The ASGI application that serves `engine` as `settings` say.

    `intake_pool` is for who warms it up and closes it, or shares it between applications. Raises
    ConfigError if the file of API keys can't be used.
    """
    intake = Intake(intake_pool or start_pool(settings.limits), settings.limits)
    answered = AnsweredRequests()
    queue_slots = QueueSlots(settings.limits)
    ring = KeyRing(settings.server)  # here, since middleware is made at the first request
    app = Starlette(
        routes=_routes(settings, engine, queue_slots, intake, answered),
        middleware=[
            Middleware(RequestLog, answered=answered),
            Middleware(Errors, engine=engine, queue_slots=queue_slots, encode_for=_encode_for),
            Middleware(Gate, server=settings.server, cache=settings.cache, ring=ring),
        ],
        exception_handlers={HTTPException: _routing_error},
    )
    app.router.redirect_slashes = False
    return app


def _routes(
    settings: Settings,
    engine: EngineClient,
    queue_slots: QueueSlots,
    intake: Intake,
    answered: AnsweredRequests,
) -> list[Route]:
    generation = Generation(engine, queue_slots, intake, settings)
    store = ResponseStore(settings.server)
    stored = StoredResponses(store)
    models = Models(engine)
    health = Health(engine, queue_slots)
    metrics = Metrics(engine, queue_slots, answered)
    return [
        Route("/", models.page),
        Route("/v1/chat/completions", Endpoint(generation, ChatCompletions()), methods=["POST"]),
        Route("/v1/responses", ResponsesEndpoint(generation, store), methods=["POST"]),
        Route("/v1/responses/{response_id}", stored.retrieve, methods=["GET"]),
        Route("/v1/responses/{response_id}", stored.delete, methods=["DELETE"]),
        Route("/v1/responses/{response_id}/cancel", stored.cancel, methods=["POST"]),
        Route("/v1/responses/{response_id}/input_items", stored.input_items),
        Route("/v1/models", models.list),
        Route("/v1/models/{model:path}", models.retrieve),
        Route("/v1/status", gate.admin_only(health.status)),
        Route("/metrics", gate.admin_only(metrics.scrape)),
        Route("/health/live", health.live),
        Route("/health/ready", health.ready),
    ]


def _encode_for(scope: Scope) -> EncodeError:
    """Errors are written as the dialect does whose route was asked for; OpenAI's by default."""
    path = str(scope["path"])
    return next((encode for start, encode in _ENCODERS if path.startswith(start)), encode_openai)


_ENCODERS: tuple[tuple[str, EncodeError], ...] = ()
"""By how the paths of a dialect's routes begin."""


async def _routing_error(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405 in the dialect's shape."""
    assert isinstance(error, HTTPException)
    ours: RequestError
    if error.status_code == 405:
        ours = MethodNotAllowed(f"The method {request.method} is not allowed on this route.")
    else:
        ours = NotFound("No such route. The routes are listed in docs/api.md.")
    access_log.of(request.scope).error_code = ours.code
    return errors.response(ours, _encode_for(request.scope), 1, error.headers)
