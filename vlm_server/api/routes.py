"""All routes, by dialect, and their bodies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from starlette.routing import Route

from vlm_server.api.admin.administration import (
    Administration,
    CachesOf,
    ModelNamed,
    ModelToLoad,
)
from vlm_server.api.admin.current_settings import CurrentSettings
from vlm_server.api.admin.docs_page import docs_endpoint
from vlm_server.api.admin.health import Health
from vlm_server.api.admin.hub_models import HubModels
from vlm_server.api.admin.metrics import Metrics
from vlm_server.api.admin.models import Models
from vlm_server.api.admin.openapi import Parameter, RouteBody, constant_endpoint, document
from vlm_server.api.batches.lane import Lane
from vlm_server.api.batches.split_process import BatchBody
from vlm_server.api.dialects import endpoints
from vlm_server.api.dialects.anthropic.errors import PATH as MESSAGES
from vlm_server.api.dialects.anthropic.schema import MessagesRequest
from vlm_server.api.dialects.batches.endpoints import PATH as BATCHES
from vlm_server.api.dialects.batches.endpoints import Batches
from vlm_server.api.dialects.batches.message_batches import PATH as MESSAGE_BATCHES
from vlm_server.api.dialects.batches.message_batches import MessageBatches
from vlm_server.api.dialects.batches.schema import BatchRequest
from vlm_server.api.dialects.files.endpoints import MEDIA_PATH as MEDIA
from vlm_server.api.dialects.files.endpoints import PATH as FILES
from vlm_server.api.dialects.files.endpoints import Files, Media
from vlm_server.api.dialects.files.receive import Uploads
from vlm_server.api.dialects.files.schema import AnthropicForm, OpenAIForm
from vlm_server.api.dialects.ollama.embeddings import EmbeddingsRequest, EmbedRequest
from vlm_server.api.dialects.ollama.models import Catalog, ModelRequest
from vlm_server.api.dialects.ollama.schema import OllamaChatRequest, OllamaGenerateRequest
from vlm_server.api.dialects.openai import (
    completions,
    decisions,
    embeddings,
    rerank,
    schema,
    tokenize,
)
from vlm_server.api.dialects.openai.completions import CompletionRequest
from vlm_server.api.dialects.openai.decisions import DecisionRequest
from vlm_server.api.dialects.openai.embeddings import EmbeddingRequest
from vlm_server.api.dialects.openai.rerank import RerankRequest
from vlm_server.api.dialects.openai.schema import ChatRequest
from vlm_server.api.dialects.openai.tokenize import PromptRequest, TokensRequest
from vlm_server.api.dialects.openai.watch.endpoints import WatchEndpoint, WatchRoutes
from vlm_server.api.dialects.openai.watch.schema import WatchRequest
from vlm_server.api.dialects.openai.watch.watches import Watches
from vlm_server.api.dialects.responses import schema as responses_schema
from vlm_server.api.dialects.responses.schema import ResponsesRequest
from vlm_server.api.dialects.responses.store import ResponseStore
from vlm_server.api.dialects.responses.stored import (
    ResponsesEndpoint,
    StoredResponses,
    refuse_conversation,
)
from vlm_server.api.document_preview import DocumentPreview
from vlm_server.api.files.store import FileStore
from vlm_server.api.http.access import gate
from vlm_server.api.http.access_log import AnsweredRequests
from vlm_server.api.http.ended_requests import EndedRequests
from vlm_server.api.http.generation import Endpoint, Generation
from vlm_server.api.http.streams.event_logs import LAST_EVENT_HEADER, RESUMABLE_HEADER
from vlm_server.api.page.page import StartPage
from vlm_server.platform.log_tail import LogTail
from vlm_server.settings import Settings, Sources

_CHAT = RouteBody((ChatRequest,), schema.HARMLESS, schema.NEUTRAL)
_TOKENIZE = RouteBody((PromptRequest, ChatRequest), (tokenize.ADDS_SPECIAL,), tokenize.NEUTRAL)
_RESPONSE = RouteBody((ResponsesRequest,), responses_schema.HARMLESS, responses_schema.NEUTRAL)
_RERANK = RouteBody((RerankRequest,), schema.HARMLESS, rerank.NEUTRAL)
_MODEL = RouteBody((ModelRequest,))
_NAMED = RouteBody((ModelNamed,))
BODIES = {
    "/v1/chat/completions": _CHAT,
    "/api/v0/chat/completions": _CHAT,
    "/v1/completions": RouteBody((CompletionRequest,), schema.HARMLESS, completions.NEUTRAL),
    "/v1/embeddings": RouteBody((EmbeddingRequest,), schema.HARMLESS, embeddings.NEUTRAL),
    "/v1/decisions": RouteBody((DecisionRequest,), schema.HARMLESS, decisions.NEUTRAL),
    "/v1/watch": RouteBody((WatchRequest,), schema.HARMLESS),
    "/v1/watch/{watch_id}/frames": RouteBody((), content_type="image/*"),
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/rerank": _RERANK,
    "/v1/tokenize": _TOKENIZE,
    "/tokenize": _TOKENIZE,
    "/v1/detokenize": RouteBody((TokensRequest,)),
    "/detokenize": RouteBody((TokensRequest,)),
    "/v1/responses": _RESPONSE,
    "/v1/responses/input_tokens": _RESPONSE,
    MESSAGES: RouteBody((MessagesRequest,)),
    f"{MESSAGES}/count_tokens": RouteBody((MessagesRequest,)),
    FILES: RouteBody((OpenAIForm, AnthropicForm), content_type="multipart/form-data"),
    BATCHES: RouteBody((BatchRequest,)),
    MESSAGE_BATCHES: RouteBody((BatchBody,)),
    MEDIA: RouteBody((), content_type="application/octet-stream"),
    "/v1/documents/pages": RouteBody((), content_type="application/octet-stream"),
    "/api/chat": RouteBody((OllamaChatRequest,)),
    "/api/generate": RouteBody((OllamaGenerateRequest,)),
    "/api/embed": RouteBody((EmbedRequest,)),
    "/api/embeddings": RouteBody((EmbeddingsRequest,)),
    "/api/show": _MODEL,
    "/api/pull": _MODEL,
    "/v1/models/load": RouteBody((ModelToLoad,)),
    "/v1/models/unload": _NAMED,
    "/v1/models/pull": _NAMED,
    "/v1/models/pull/cancel": _NAMED,
    "/v1/caches/clear": RouteBody((CachesOf,)),
}
"""The bodies of routes, for `/openapi.json`."""
_RESUMING = (
    Parameter(RESUMABLE_HEADER, "header", "boolean", "POST"),
    Parameter(LAST_EVENT_HEADER, "header", "string", "POST"),
)
PARAMETERS = {
    "/v1/chat/completions": _RESUMING,
    "/v1/completions": _RESUMING,
    MESSAGES: _RESUMING,
    "/v1/responses": _RESUMING,
    "/v1/watch": _RESUMING,
    "/v1/watch/{watch_id}/frames": (Parameter("time", "query", "number", "POST"),),
    "/v1/documents/pages": (
        Parameter("pages", "query", "string", "POST"),
        Parameter("max_pixels", "query", "integer", "POST"),
    ),
    "/v1/status": (Parameter("model", "query", "string"),),
    "/v1/hub/search": (Parameter("query", "query", "string"),),
    "/v1/log": (Parameter("after", "query", "integer"),),
    "/v1/settings": (Parameter("check", "query", "boolean", "PATCH"),),
    "/v1/responses/{response_id}": (
        Parameter("stream", "query", "boolean"),
        Parameter("starting_after", "query", "integer"),
    ),
}
"""The parameters of routes besides their paths, for `/openapi.json`."""
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/api/v0/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/decisions": "decisions",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
    "/v1/responses": "chat",
    MESSAGES: "chat",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}
"""The names of generating routes' operations in traces."""
_ANY_METHOD = ["GET", "POST", "DELETE"]
_NO_OLLAMA = {
    "/api/copy": ["POST"],
    "/api/create": ["POST"],
    "/api/delete": ["DELETE"],
    "/api/push": ["POST"],
    "/api/blobs/{digest}": ["HEAD", "POST"],
}
"""Ollama's routes that change models: answered with 501."""


def all_routes(
    generation: Generation,
    settings: Settings,
    answered: AnsweredRequests,
    ended: EndedRequests,
    sources: Sources,
    watches: Watches,
    lane: Lane,
    log_tail: LogTail,
    settings_file: Path | None,
) -> list[Route]:
    """The routes of all dialects and operations."""
    stored = ResponseStore(settings.server)
    metrics = Metrics(settings.metrics.prefix, generation, answered, stored, watches, lane)
    routes = [
        *_openai(generation),
        *_responses(generation, stored),
        *_watches(generation, watches),
        _post(MESSAGES, Endpoint(generation, endpoints.MESSAGES)),
        _post(f"{MESSAGES}/count_tokens", Endpoint(generation, endpoints.COUNT_TOKENS)),
        *_ollama(generation),
        *_files(generation.files, settings),
        *_batches(generation, settings, lane),
        *_administration(
            Administration(generation, settings, log_tail), HubModels(generation.models, settings)
        ),
        *_operations(generation, settings, sources, settings_file),
        *_status(Health(generation, lane, ended)),
        _admin("/metrics", metrics.scrape),
    ]
    describe = cache(lambda: document(routes, BODIES, PARAMETERS))
    return [
        *routes,
        Route("/openapi.json", constant_endpoint(describe)),
        Route(gate.DOCS, docs_endpoint(describe), include_in_schema=False),
    ]


def _post(path: str, endpoint: Callable[..., Any]) -> Route:
    return Route(path, endpoint, methods=["POST"])


def _admin(path: str, endpoint: gate.Handler, method: str = "GET") -> Route:
    """A route that needs a key with admin rights."""
    return Route(path, gate.admin_only(endpoint), methods=[method])


def _openai(generation: Generation) -> list[Route]:
    chat = Endpoint(generation, endpoints.CHAT_COMPLETIONS)
    tokens = Endpoint(generation, endpoints.tokenize_for(generation.models))
    text = Endpoint(generation, endpoints.DETOKENIZE)
    ranking = Endpoint(generation, endpoints.RERANK)
    return [
        _post("/v1/chat/completions", chat),
        _post("/api/v0/chat/completions", chat),
        _post("/v1/completions", Endpoint(generation, endpoints.COMPLETIONS)),
        _post("/v1/embeddings", Endpoint(generation, endpoints.EMBEDDINGS)),
        _post("/v1/decisions", Endpoint(generation, endpoints.DECISIONS)),
        *(_post(path, ranking) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
        _post("/v1/tokenize", tokens),
        _post("/tokenize", tokens),
        _post("/v1/detokenize", text),
        _post("/detokenize", text),
        _post("/v1/documents/pages", DocumentPreview(generation).draw),
    ]


def _responses(generation: Generation, store: ResponseStore) -> list[Route]:
    responses = StoredResponses(store, generation.event_logs)
    make = Endpoint(generation, endpoints.responses_of(store), store)
    count = Endpoint(generation, endpoints.INPUT_TOKENS, store)
    path = "/v1/responses/{response_id}"
    return [
        _post("/v1/responses", ResponsesEndpoint(make, store)),
        _post("/v1/responses/input_tokens", count),
        Route(path, responses.retrieve),
        Route(path, responses.delete, methods=["DELETE"]),
        _post(f"{path}/cancel", responses.cancel),
        Route(f"{path}/input_items", responses.input_items),
        *(
            Route(path, refuse_conversation, methods=_ANY_METHOD, include_in_schema=False)
            for path in ("/v1/conversations", "/v1/conversations/{rest:path}")
        ),
    ]


def _watches(generation: Generation, watches: Watches) -> list[Route]:
    about = WatchRoutes(generation, watches)
    return [
        _post("/v1/watch", WatchEndpoint(generation, watches)),
        _post("/v1/watch/{watch_id}/frames", about.give_frame),
        Route("/v1/watch/{watch_id}", about.delete, methods=["DELETE"]),
    ]


def _ollama(generation: Generation) -> list[Route]:
    # Ollama's examples use curl, which does not declare bodies as JSON.
    chat = Endpoint(generation, endpoints.OLLAMA_CHAT, any_type=True)
    generate = Endpoint(generation, endpoints.OLLAMA_GENERATE, any_type=True)
    catalog = Catalog(generation)
    return [
        _post("/api/chat", chat),
        _post("/api/generate", generate),
        _post("/api/embed", Endpoint(generation, endpoints.OLLAMA_EMBED, any_type=True)),
        _post("/api/embeddings", Endpoint(generation, endpoints.OLLAMA_EMBEDDINGS, any_type=True)),
        Route("/api/tags", catalog.tags),
        _post("/api/show", catalog.show),
        Route("/api/ps", catalog.ps),
        Route("/api/version", catalog.version),
        _post("/api/pull", catalog.pull),
        *(
            Route(path, catalog.refuse, methods=methods, include_in_schema=False)
            for path, methods in _NO_OLLAMA.items()
        ),
    ]


def _files(store: FileStore, settings: Settings) -> list[Route]:
    uploads = Uploads(store, settings.files)
    files, media = Files(store, uploads, settings), Media(store, uploads)
    path = f"{FILES}/{{file_id}}"
    return [
        _post(FILES, files.create),
        Route(FILES, files.list),
        Route(path, files.retrieve),
        Route(path, files.delete, methods=["DELETE"]),
        Route(f"{path}/content", files.content),
        Route(MEDIA, media.put, methods=["PUT"]),
        Route(f"{MEDIA}/{{name}}", media.retrieve),
    ]


def _batches(generation: Generation, settings: Settings, lane: Lane) -> list[Route]:
    batches = Batches(generation, settings, lane)
    path = f"{BATCHES}/{{batch_id}}"
    messages = MessageBatches(generation, settings, lane)
    message_path = f"{MESSAGE_BATCHES}/{{batch_id}}"
    return [
        _post(BATCHES, batches.create),
        Route(BATCHES, batches.list),
        Route(path, batches.retrieve),
        _post(f"{path}/cancel", batches.cancel),
        _post(MESSAGE_BATCHES, messages.create),
        Route(MESSAGE_BATCHES, messages.list),
        Route(message_path, messages.retrieve),
        Route(message_path, messages.delete, methods=["DELETE"]),
        Route(f"{message_path}/results", messages.results),
        _post(f"{message_path}/cancel", messages.cancel),
    ]


def _administration(administration: Administration, hub: HubModels) -> list[Route]:
    return [
        _admin("/v1/models/load", administration.load, "POST"),
        _admin("/v1/models/unload", administration.unload, "POST"),
        _admin("/v1/models/pull", administration.pull, "POST"),
        _admin("/v1/models/pull/cancel", administration.cancel_pull, "POST"),
        _admin("/v1/caches/clear", administration.clear_caches, "POST"),
        _admin("/v1/checkpoints", administration.checkpoints),
        _admin("/v1/log", administration.log),
        _admin("/v1/hub/catalog", hub.catalog),
        _admin("/v1/hub/search", hub.search),
    ]


def _status(health: Health) -> list[Route]:
    return [
        Route("/v1/loads", health.loads),
        _admin("/v1/status", health.status),
        Route("/v1/requests/{request_id}/cancel", health.cancel, methods=["POST"]),
        *(Route(path, health.ready) for path in gate.READY),
        Route("/health/live", health.live),
    ]


def _operations(
    generation: Generation, settings: Settings, sources: Sources, settings_file: Path | None
) -> list[Route]:
    models = Models(generation.models, settings)
    current = CurrentSettings(generation, settings, sources, settings_file)
    start = StartPage(models.page)
    return [
        Route("/v1/models", models.list),
        Route("/v1/models/{model:path}", models.retrieve),
        Route("/api/v0/models", models.lm_studio_list),
        Route("/api/v0/models/{model:path}", models.lm_studio_retrieve),
        Route("/version", models.version),
        Route("/", start.show),
        Route(f"{gate.PAGE_FOLDER}/{{name:path}}", start.file, include_in_schema=False),
        _admin("/v1/settings", current.show),
        _admin("/v1/settings", current.change, "PATCH"),
    ]
