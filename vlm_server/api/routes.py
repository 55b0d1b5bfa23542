"""All routes, by dialect, and their bodies."""

from __future__ import annotations

from starlette.routing import Route

from vlm_server.api.admin.administration import (
    Administration,
    CachesOf,
    ModelNamed,
    SettingsInForce,
)
from vlm_server.api.admin.health import Health
from vlm_server.api.admin.metrics import Metrics
from vlm_server.api.admin.models import LmStudioModels, Models
from vlm_server.api.admin.openapi import Body, OpenApi
from vlm_server.api.dialects import endpoints
from vlm_server.api.dialects.anthropic.errors import PATH as MESSAGES
from vlm_server.api.dialects.anthropic.schema import MessagesRequest
from vlm_server.api.dialects.ollama.models import Catalog, ModelRequest
from vlm_server.api.dialects.ollama.schema import OllamaChatRequest, OllamaGenerateRequest
from vlm_server.api.dialects.openai import completions, schema, tokenize
from vlm_server.api.dialects.openai.completions import CompletionRequest
from vlm_server.api.dialects.openai.schema import ChatRequest
from vlm_server.api.dialects.openai.tokenize import PromptRequest, TokensRequest
from vlm_server.api.dialects.responses import schema as responses_schema
from vlm_server.api.dialects.responses.schema import ResponsesRequest
from vlm_server.api.dialects.responses.store import ResponseStore
from vlm_server.api.dialects.responses.stored import (
    ResponsesEndpoint,
    StoredResponses,
    refuse_conversation,
)
from vlm_server.api.http.access import gate
from vlm_server.api.http.access_log import AnsweredRequests
from vlm_server.api.http.errors import ErrorBody
from vlm_server.api.http.generation import Endpoint, Generation
from vlm_server.api.page import page
from vlm_server.settings import Settings, Sources

_CHAT = Body((ChatRequest,), schema.HARMLESS, schema.NEUTRAL)
_TOKENIZE = Body((PromptRequest, ChatRequest), (tokenize.ADDS_SPECIAL,), tokenize.NEUTRAL)
_RESPONSE = Body((ResponsesRequest,), responses_schema.HARMLESS, responses_schema.NEUTRAL)
_MODEL = Body((ModelRequest,))
_NAMED = Body((ModelNamed,))
BODIES = {
    "/v1/chat/completions": _CHAT,
    "/api/v0/chat/completions": _CHAT,
    "/v1/completions": Body((CompletionRequest,), schema.HARMLESS, completions.NEUTRAL),
    "/v1/tokenize": _TOKENIZE,
    "/tokenize": _TOKENIZE,
    "/v1/detokenize": Body((TokensRequest,)),
    "/detokenize": Body((TokensRequest,)),
    "/v1/responses": _RESPONSE,
    "/v1/responses/input_tokens": _RESPONSE,
    MESSAGES: Body((MessagesRequest,)),
    f"{MESSAGES}/count_tokens": Body((MessagesRequest,)),
    "/api/chat": Body((OllamaChatRequest,)),
    "/api/generate": Body((OllamaGenerateRequest,)),
    "/api/show": _MODEL,
    "/api/pull": _MODEL,
    "/v1/models/load": _NAMED,
    "/v1/models/unload": _NAMED,
    "/v1/models/pull": _NAMED,
    "/v1/models/pull/cancel": _NAMED,
    "/v1/caches/clear": Body((CachesOf,)),
}
"""The bodies of routes, for `/openapi.json`."""
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/api/v0/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    MESSAGES: "chat",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
}
"""The names of generating routes' operations in traces."""
_ANY_METHOD = ["GET", "POST", "DELETE"]
_NO_OLLAMA = {
    "/api/copy": ["POST"],
    "/api/create": ["POST"],
    "/api/delete": ["DELETE"],
    "/api/embed": ["POST"],
    "/api/embeddings": ["POST"],
    "/api/push": ["POST"],
    "/api/blobs/{digest}": ["HEAD", "POST"],
}
"""Routes of Ollama's that change models or make embeddings: answered with 501."""


def all_routes(
    generation: Generation,
    settings: Settings,
    answered: AnsweredRequests,
    sources: Sources,
) -> list[Route]:
    """The routes of all dialects and operations."""
    stored = ResponseStore(settings.server)
    routes = [
        *_openai(generation),
        *_responses(generation, stored),
        *_anthropic(generation),
        *_ollama(generation),
        *_operations(generation, settings, answered, stored),
        *_page(generation, settings, sources),
    ]
    return [*routes, Route("/openapi.json", OpenApi(routes, BODIES, ErrorBody).show)]


def _openai(generation: Generation) -> list[Route]:
    chat = Endpoint(generation, endpoints.CHAT_COMPLETIONS)
    completion = Endpoint(generation, endpoints.COMPLETIONS)
    tokens = Endpoint(generation, endpoints.tokenize_for(generation.models))
    text = Endpoint(generation, endpoints.DETOKENIZE)
    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/api/v0/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completion, methods=["POST"]),
        Route("/v1/tokenize", tokens, methods=["POST"]),
        Route("/tokenize", tokens, methods=["POST"]),
        Route("/v1/detokenize", text, methods=["POST"]),
        Route("/detokenize", text, methods=["POST"]),
    ]


def _responses(generation: Generation, store: ResponseStore) -> list[Route]:
    stored = StoredResponses(store)
    make = Endpoint(generation, endpoints.responses_of(store), store)
    count = Endpoint(generation, endpoints.INPUT_TOKENS, store)
    one = "/v1/responses/{response_id}"
    return [
        Route("/v1/responses", ResponsesEndpoint(make, store), methods=["POST"]),
        Route("/v1/responses/input_tokens", count, methods=["POST"]),
        Route(one, stored.retrieve, methods=["GET"]),
        Route(one, stored.delete, methods=["DELETE"]),
        Route(f"{one}/cancel", stored.cancel, methods=["POST"]),
        Route(f"{one}/input_items", stored.input_items),
        *(
            Route(path, refuse_conversation, methods=_ANY_METHOD, include_in_schema=False)
            for path in ("/v1/conversations", "/v1/conversations/{rest:path}")
        ),
    ]


def _anthropic(generation: Generation) -> list[Route]:
    return [
        Route(MESSAGES, Endpoint(generation, endpoints.MESSAGES), methods=["POST"]),
        Route(
            f"{MESSAGES}/count_tokens",
            Endpoint(generation, endpoints.COUNT_TOKENS),
            methods=["POST"],
        ),
    ]


def _ollama(generation: Generation) -> list[Route]:
    # Ollama's own examples send bodies with curl, which does not call them JSON.
    chat = Endpoint(generation, endpoints.OLLAMA_CHAT, any_type=True)
    generate = Endpoint(generation, endpoints.OLLAMA_GENERATE, any_type=True)
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


def _administration(administration: Administration) -> list[Route]:
    posts = {
        "/v1/models/load": administration.load,
        "/v1/models/unload": administration.unload,
        "/v1/models/pull": administration.pull,
        "/v1/models/pull/cancel": administration.cancel_pull,
        "/v1/caches/clear": administration.clear_caches,
    }
    checkpoints = gate.admin_only(administration.checkpoints)
    return [
        *(Route(path, gate.admin_only(post), methods=["POST"]) for path, post in posts.items()),
        Route("/v1/checkpoints", checkpoints),
    ]


def _operations(
    generation: Generation,
    settings: Settings,
    answered: AnsweredRequests,
    stored: ResponseStore,
) -> list[Route]:
    queue_slots = generation.queue_slots
    models = Models(generation.models, settings)
    lm_studio = LmStudioModels(generation.models, settings.server)
    health = Health(generation.models, queue_slots, generation.in_flight, generation.metrics)
    metrics = Metrics(
        settings.metrics.prefix,
        generation.models,
        queue_slots,
        answered,
        generation.metrics,
        stored,
    )
    return [
        *_administration(Administration(generation, settings)),
        Route("/v1/models", models.list),
        Route("/v1/models/{model:path}", models.retrieve),
        Route("/api/v0/models", lm_studio.list),
        Route("/api/v0/models/{model:path}", lm_studio.retrieve),
        Route("/v1/loads", health.loads),
        Route("/v1/status", gate.admin_only(health.status)),
        Route("/v1/requests/{request_id}/cancel", gate.admin_only(health.cancel), methods=["POST"]),
        Route("/metrics", gate.admin_only(metrics.scrape)),
        *(Route(path, health.ready) for path in gate.READY),
        Route("/version", models.version),
        Route("/health/live", health.live),
    ]


def _page(generation: Generation, settings: Settings, sources: Sources) -> list[Route]:
    in_force = SettingsInForce(settings, sources)
    start = page.StartPage(page.read_files(), Models(generation.models, settings).page)
    return [
        Route("/", start.show),
        Route(f"{page.FOLDER}/{{name}}", start.file, include_in_schema=False),
        Route("/v1/settings", gate.admin_only(in_force.show)),
    ]
