"""OpenAI's `usage` of an answer, and our extensions to it."""

from __future__ import annotations

from typing import Any

from vlm_server.protocol import Finished, Usage


def answer_usage(usage: Usage) -> dict[str, Any]:
    """The usage of generated text. Prediction tokens are those of all drafts: see `docs/api.md`."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }


def prompt_usage(usage: Usage) -> dict[str, Any]:
    """The usage of a request whose answer has no tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def media_usage(finished: Finished) -> dict[str, Any]:
    """Our extensions `images`, `videos` and `documents`: the tokens of each."""
    media = {
        "images": finished.images,
        "videos": finished.videos,
        "documents": finished.documents,
    }
    return {name: uses for name, uses in media.items() if uses}
