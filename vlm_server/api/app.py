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
from vlm_server.api.http.queue.queue_slots import QueueSlots
from vlm_server.api.ollama.catalog import Catalog
from vlm_server.api.ollama.chat import Chat as OllamaChat
from vlm_server.api.ollama.errors import encode as encode_ollama
from vlm_server.api.ollama.generate import Generate as OllamaGenerate
from vlm_server.api.openai.chat import ChatCompletions
from vlm_server.api.openai.errors import encode as encode_openai
from vlm_server.api.operations.health import Health
from vlm_server.api.operations.metrics import Metrics
from vlm_server.api.operations.models import Models
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
    models = Models(engine)
    health = Health(engine, queue_slots)
    metrics = Metrics(engine, queue_slots, answered)
    return [
        Route("/", models.page),
        Route("/v1/chat/completions", Endpoint(generation, ChatCompletions()), methods=["POST"]),
        Route("/v1/models", models.list),
        Route("/v1/models/{model:path}", models.retrieve),
        Route("/v1/status", gate.admin_only(health.status)),
        Route("/metrics", gate.admin_only(metrics.scrape)),
        Route("/health/live", health.live),
        Route("/health/ready", health.ready),
        *_ollama_routes(generation),
    ]


def _ollama_routes(generation: Generation) -> list[Route]:
    # Ollama's own examples send bodies with curl, which does not call them JSON.
    chat = Endpoint(generation, OllamaChat(), any_type=True)
    generate = Endpoint(generation, OllamaGenerate(), any_type=True)
    catalog = Catalog(generation)
    return [
        Route("/api/chat", chat, methods=["POST"]),
        Route("/api/generate", generate, methods=["POST"]),
        Route("/api/tags", catalog.tags),
        Route("/api/show", catalog.show, methods=["POST"]),
        Route("/api/ps", catalog.ps),
        Route("/api/version", catalog.version),
        Route("/api/pull", catalog.pull, methods=["POST"]),
        *(
            Route(path, catalog.refuse, methods=methods, include_in_schema=False)
            for path, methods in _NO_OLLAMA.items()
        ),
    ]


_NO_OLLAMA = {
    "/api/copy": ["POST"],
    "/api/create": ["POST"],
    "/api/delete": ["DELETE"],
    "/api/embed": ["POST"],
    "/api/embeddings": ["POST"],
    "/api/push": ["POST"],
    "/api/blobs/{digest}": ["HEAD", "POST"],
}
"""What Ollama does with models, and a server of one model does not."""


def _encode_for(scope: Scope) -> EncodeError:
    """Errors are written as the dialect does whose route was asked for; OpenAI's by default."""
    path = str(scope["path"])
    return next((encode for start, encode in _ENCODERS if path.startswith(start)), encode_openai)


_ENCODERS: tuple[tuple[str, EncodeError], ...] = (
    ("/api/v0/", encode_openai),
    ("/api/", encode_ollama),
)
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
