"""The ASGI application: routes, middleware, and which dialect's errors they answer with."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from vlm_server.api.anthropic.errors import encode as encode_anthropic
from vlm_server.api.anthropic.messages import PATH as MESSAGES
from vlm_server.api.anthropic.messages import CountTokens, Messages
from vlm_server.api.anthropic.schema import MessagesRequest
from vlm_server.api.http import access_log, errors
from vlm_server.api.http.access import gate
from vlm_server.api.http.access.keys import KeyRing
from vlm_server.api.http.access_log import AnsweredRequests
from vlm_server.api.http.errors import EncodeError
from vlm_server.api.http.generation import Endpoint, Generation
from vlm_server.api.http.intake.intake import Intake, start_pool
from vlm_server.api.http.middleware import Errors, Gate, RequestLog
from vlm_server.api.http.missing_route import not_found
from vlm_server.api.http.queue.queue_slots import QueueSlots
from vlm_server.api.ollama.catalog import Catalog, ModelRequest
from vlm_server.api.ollama.chat import Chat as OllamaChat
from vlm_server.api.ollama.errors import encode as encode_ollama
from vlm_server.api.ollama.generate import Generate as OllamaGenerate
from vlm_server.api.ollama.schema import OllamaChatRequest, OllamaGenerateRequest
from vlm_server.api.openai import completions_intake, schema, tokenize_intake
from vlm_server.api.openai.chat import ChatCompletions
from vlm_server.api.openai.completions import Completions
from vlm_server.api.openai.completions_intake import CompletionRequest
from vlm_server.api.openai.errors import ErrorBody
from vlm_server.api.openai.errors import encode as encode_openai
from vlm_server.api.openai.schema import ChatRequest
from vlm_server.api.openai.tokenize import Detokenize, Tokenize
from vlm_server.api.openai.tokenize_intake import PromptRequest, TokensRequest
from vlm_server.api.operations.health import Health
from vlm_server.api.operations.lm_studio import LmStudioModels
from vlm_server.api.operations.metrics import Metrics
from vlm_server.api.operations.models import Models
from vlm_server.api.operations.openapi import Body, OpenApi
from vlm_server.child.pool import ChildPool
from vlm_server.errors import MethodNotAllowed, RequestError
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
    chat = Endpoint(generation, ChatCompletions())
    models = Models(engine, settings)
    lm_studio = LmStudioModels(engine)
    health = Health(engine, queue_slots)
    metrics = Metrics(engine, queue_slots, answered)
    routes = [
        Route("/", models.page),
        *(
            Route(f"{start}/chat/completions", chat, methods=["POST"])
            for start in ("/v1", "/api/v0")
        ),
        Route(MESSAGES, Endpoint(generation, Messages()), methods=["POST"]),
        Route(f"{MESSAGES}/count_tokens", Endpoint(generation, CountTokens()), methods=["POST"]),
        Route("/v1/completions", Endpoint(generation, Completions()), methods=["POST"]),
        *(
            Route(f"{start}/{name}", Endpoint(generation, dialect), methods=["POST"])
            for name, dialect in (("tokenize", Tokenize(engine)), ("detokenize", Detokenize()))
            for start in ("/v1", "")
        ),
        Route("/v1/models", models.list),
        Route("/v1/models/{model:path}", models.retrieve),
        Route("/api/v0/models", lm_studio.list),
        Route("/api/v0/models/{model:path}", lm_studio.retrieve),
        Route("/v1/status", gate.admin_only(health.status)),
        Route("/metrics", gate.admin_only(metrics.scrape)),
        Route("/health", health.ready),
        Route("/health/live", health.live),
        Route("/health/ready", health.ready),
        *_ollama_routes(generation),
    ]
    return [*routes, Route("/openapi.json", OpenApi(routes, _BODIES, ErrorBody).show)]


_BODIES = {
    "/v1/chat/completions": Body((ChatRequest,), schema.HARMLESS, schema.NEUTRAL),
    "/v1/completions": Body((CompletionRequest,), schema.HARMLESS, completions_intake.NEUTRAL),
    "/v1/tokenize": Body((PromptRequest, ChatRequest), (), tokenize_intake.NEUTRAL),
    "/v1/detokenize": Body((TokensRequest,)),
    MESSAGES: Body((MessagesRequest,)),
    f"{MESSAGES}/count_tokens": Body((MessagesRequest,)),
    "/api/chat": Body((OllamaChatRequest,)),
    "/api/generate": Body((OllamaGenerateRequest,)),
    "/api/show": Body((ModelRequest,)),
    "/api/pull": Body((ModelRequest,)),
}
_BODIES |= {
    "/api/v0/chat/completions": _BODIES["/v1/chat/completions"],
    "/detokenize": _BODIES["/v1/detokenize"],
    "/tokenize": _BODIES["/v1/tokenize"],
}
"""What routes take, for `/openapi.json`."""


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
    (MESSAGES, encode_anthropic),
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
        ours = not_found(request, request.app.routes)
    access_log.of(request.scope).error_code = ours.code
    return errors.response(ours, _encode_for(request.scope), 1, error.headers)
