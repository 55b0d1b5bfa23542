"""All errors, in one tree, with their HTTP status and error code.

    VlmServerError
    ├── ConfigError               the settings are invalid                 (no HTTP)
    │   ├── ModelMissing          a model's path leads nowhere             (no HTTP)
    │   └── NotAvailable          a named resource is missing at present   (no HTTP)
    ├── ModelLoadError            the checkpoint can't be loaded           (no HTTP)
    ├── EngineBroken              too many steps failed: end the process   (no HTTP)
    └── RequestError              one request fails, the others go on
        ├── InvalidRequest        400  invalid_value
        │   ├── UnsupportedField  400  unsupported_parameter
        │   ├── InvalidImage      400  invalid_image
        │   ├── InvalidVideo      400  invalid_video
        │   ├── InvalidDocument   400  invalid_document
        │   ├── ContextLengthExceeded  400  context_length_exceeded
        │   ├── PreviousResponseNotFound  400  previous_response_not_found
        │   ├── FileNotStored     400  file_not_found
        │   ├── ThreadUnsupported     400  thread_unsupported_request
        │   └── HeadersTooLarge   431  headers_too_large
        ├── Unauthorized          401  invalid_api_key
        ├── Forbidden             403  forbidden
        ├── NotFound              404  not_found
        │   └── ModelNotFound     404  model_not_found
        ├── MethodNotAllowed      405  method_not_allowed
        ├── RequestCancelled      410  request_cancelled
        ├── Conflict              409  conflict
        ├── RequestTimeout        408  request_timeout
        ├── PayloadTooLarge       413  payload_too_large
        │   ├── MemoryExceeded    413  memory_exceeded
        │   ├── DecodeBudgetExceeded  413  decode_budget_exceeded
        │   └── RequestTooCostly  413  request_too_costly
        ├── UnsupportedMediaType  415  unsupported_media_type
        ├── QueueFull             429  queue_full
        │   └── KeyLimitReached   429  key_limit_reached
        ├── InternalError         500  internal_error
        ├── NotSupported          501  not_supported
        ├── EngineDied            502  engine_died
        ├── OutOfMemory           503  out_of_memory
        ├── StepTooLong           503  step_too_long
        ├── EngineUnavailable     503  engine_unavailable
        ├── ModelDoesNotFit       503  model_does_not_fit
        ├── QueueTimeout          504  queue_timeout
        ├── FirstTokenTimeout     504  first_token_timeout
        ├── TokenTimeout          504  token_timeout
        ├── TotalTimeout          504  total_timeout
        └── StorageFull           507  storage_full

A `RequestError` is sent between processes as its `code`, `message` and `param`;
`RequestError.from_code` rebuilds it on the other side.
"""

from __future__ import annotations

from typing import ClassVar, Self


class VlmServerError(Exception):
    """Base class of all errors that this project raises on purpose.

    Each of its arguments is the text of one fault.
    """

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


class ConfigError(VlmServerError):
    """A setting is unknown, of the wrong type, or contradicts another."""


class ModelMissing(ConfigError):
    """No checkpoint has the path or the name in a setting."""


class NotAvailable(ConfigError):
    """A resource that a setting names is missing at present: a port, an address, a disk."""


class ModelLoadError(VlmServerError):
    """The checkpoint is missing, unsafe, too large or of an unsupported family."""


class EngineBroken(VlmServerError):
    """Too many steps in a row failed: the state of the device can't be trusted any more."""


class RequestError(VlmServerError):
    """One request can't be answered.

    `message` is shown to the client: it states the fault and never contains the payload, a path or
    an address. `param` is the field at fault, such as `messages[2].content[1]`.
    `retry_after_seconds` is the time until a retry may succeed, where known; it is not sent between
    processes.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"

    def __init__(
        self, message: str, param: str | None = None, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds

    @staticmethod
    def from_code(code: str, message: str, param: str | None) -> RequestError:
        """The error that `code` names; an unknown code is an `InternalError`."""
        return _BY_CODE.get(code, InternalError)(message, param)


class InvalidRequest(RequestError):
    status, code, type = 400, "invalid_value", "invalid_request_error"


class UnsupportedField(InvalidRequest):
    code = "unsupported_parameter"


class InvalidImage(InvalidRequest):
    code = "invalid_image"


class InvalidVideo(InvalidRequest):
    code = "invalid_video"


class InvalidDocument(InvalidRequest):
    code = "invalid_document"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"

    @classmethod
    def of_prompt(cls, context_tokens: int, num_tokens_text: str, param: str) -> Self:
        """The error in the words of OpenAI (LangChain, LiteLLM), vLLM and Anthropic, by which
        clients recognize it. `num_tokens_text`: the length of the prompt, and advice."""
        return cls(
            f"Input tokens exceed the configured limit of {context_tokens - 1} tokens: this "
            f"model's maximum context length is {context_tokens} tokens, with the answer. The "
            f"prompt is too long: {num_tokens_text}",
            param,
        )


class PreviousResponseNotFound(InvalidRequest):
    """The turns that a request continues are not, or no longer, stored for this client."""

    code = "previous_response_not_found"


class FileNotStored(InvalidRequest):
    """A request names a file, or the hash of bytes, that is not stored for this client."""

    code = "file_not_found"


class ThreadUnsupported(InvalidRequest):
    """The request begins or continues a conversation that the server would have to store."""

    code = "thread_unsupported_request"


class HeadersTooLarge(InvalidRequest):
    status, code = 431, "headers_too_large"


class Unauthorized(RequestError):
    status, code, type = 401, "invalid_api_key", "authentication_error"


class Forbidden(RequestError):
    status, code, type = 403, "forbidden", "permission_error"


class NotFound(RequestError):
    status, code, type = 404, "not_found", "invalid_request_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(RequestError):
    status, code, type = 405, "method_not_allowed", "invalid_request_error"


class Conflict(RequestError):
    """The request contradicts the settings."""

    status, code, type = 409, "conflict", "invalid_request_error"


class RequestTimeout(RequestError):
    status, code, type = 408, "request_timeout", "invalid_request_error"


class RequestCancelled(RequestError):
    """An operator ended the request. Clients do not retry this status by themselves."""

    status, code, type = 410, "request_cancelled", "invalid_request_error"


class PayloadTooLarge(RequestError):
    status, code, type = 413, "payload_too_large", "invalid_request_error"


class MemoryExceeded(PayloadTooLarge):
    """The request needs more device memory than there is, even if it ran alone."""

    code = "memory_exceeded"


class DecodeBudgetExceeded(PayloadTooLarge):
    """Decoding the images of the request takes more pixels or time than it may."""

    code = "decode_budget_exceeded"


class RequestTooCostly(PayloadTooLarge):
    """The request takes too much time or memory to parse, or engines crashed on its size."""

    code = "request_too_costly"


class UnsupportedMediaType(RequestError):
    status, code, type = 415, "unsupported_media_type", "invalid_request_error"


class QueueFull(RequestError):
    status, code, type = 429, "queue_full", "rate_limit_error"


class KeyLimitReached(QueueFull):
    """The number of requests in flight with this API key has reached its limit."""

    code = "key_limit_reached"


class InternalError(RequestError):
    status, code, type = 500, "internal_error", "server_error"


class NotSupported(RequestError):
    """The route exists in other servers, and has no function here."""

    status, code, type = 501, "not_supported", "invalid_request_error"


class EngineDied(RequestError):
    """The engine process ended while this request was in flight."""

    status, code, type = 502, "engine_died", "server_error"


class OutOfMemory(RequestError):
    """Device memory ran out while this request ran; a retry may succeed."""

    status, code, type = 503, "out_of_memory", "server_error"


class StepTooLong(RequestError):
    """The device ended a step that took too long; smaller steps may succeed."""

    status, code = 503, "step_too_long"


DeviceLimit = OutOfMemory | StepTooLong
"""Errors of which a retry with smaller steps may be free."""


class EngineUnavailable(RequestError):
    """The engine is starting, restarting or draining."""

    status, code, type = 503, "engine_unavailable", "server_error"


class ModelDoesNotFit(RequestError):
    """There is no memory for the model in addition to those that stay loaded."""

    status, code, type = 503, "model_does_not_fit", "server_error"


class QueueTimeout(RequestError):
    """The device did not begin with the request within its deadline."""

    status, code, type = 504, "queue_timeout", "server_error"


class FirstTokenTimeout(RequestError):
    """The answer did not begin within its deadline."""

    status, code, type = 504, "first_token_timeout", "server_error"


class TokenTimeout(RequestError):
    """The answer stopped for longer than its deadline between two tokens."""

    status, code, type = 504, "token_timeout", "server_error"


class TotalTimeout(RequestError):
    """The answer did not end within its deadline."""

    status, code, type = 504, "total_timeout", "server_error"


class StorageFull(RequestError):
    """The disk has no room for an uploaded file, or can't be written to."""

    status, code, type = 507, "storage_full", "server_error"


def _tree(root: type[RequestError]) -> list[type[RequestError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


_BY_CODE = {error.code: error for error in _tree(RequestError)}
