"""The concepts of fields, in the order of `docs/fields.md`: one row for each."""

from __future__ import annotations

SECTIONS: dict[str, tuple[str, ...]] = {
    "Request": (
        "model", "conversation or prompt", "questions", "system prompt", "earlier turns",
        "text after the answer", "template of the request's own", "variables of the template",
        "where the answer begins", "stored prompt, conversation", "shortening of the prompt",
        "size of the context", "prompt of the input's type", "fields of documents",
    ),
    "Answers": (
        "most tokens", "fewest tokens", "stop strings", "past the end", "number of answers",
        "prompt in the answer", "log probabilities", "likeliest tokens", "audio, modalities",
        "verbosity", "dimensions", "length of vectors",
    ),
    "Sampling": (
        "temperature", "top p", "top k", "min p", "seed", "presence penalty", "frequency penalty",
        "repetition penalty", "bias of tokens", "other samplers",
    ),
    "Structured output": ("format", "schema", "name, description", "strictness"),
    "Tools": (
        "tools", "name", "description", "parameters", "strict arguments", "type",
        "settings of Anthropic's tools", "choice", "tool that must be called", "allowed tools",
        "parallel calls", "number of calls", "tools that servers run", "functions (legacy)",
    ),
    "Thinking": ("on, off", "effort", "longest thought", "what is shown of it"),
    "Messages": (
        "role", "text", "refusal", "thought", "signature, encryption", "call", "result of a call",
        "tool of a result", "failure", "name of the speaker", "id", "status", "continuation",
        "cache marks", "what answers had",
    ),
    "Images and videos": (
        "image", "media type", "detail", "bounds of the size", "image by id", "video",
        "number of frames", "part of a video", "other parts",
    ),
    "Documents": (
        "document", "type of a document", "name, title", "context", "document by id", "pages",
        "size of pages", "text of pages", "citations",
    ),
    "Streams": ("stream", "usage at the end", "usage in every chunk", "padding"),
    "Service": (
        "storing", "metadata", "user", "cache hints", "moderation", "priority", "background",
        "context management", "drafts", "staying loaded", "engine's options", "form of the answer",
    ),
    "Unknown fields": (
        "at the top", "in messages, items, parts, calls and tools", "in other objects",
    ),
}  # fmt: skip

CONCEPTS = frozenset(concept for section in SECTIONS.values() for concept in section)
