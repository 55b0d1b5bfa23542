"""Questions to decide: the conversation that a question ends, and its options as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from msgspec import structs

from vlm_server.interfaces import PreparedPrompt
from vlm_server.prompt.media.processing import TokenLayout
from vlm_server.prompt.template.chat import Chat
from vlm_server.prompt.tokenizer import PromptTokenizer
from vlm_server.protocol import Submit, TextPart

_GAP = TextPart("\n\n")


def as_last_turn(submit: Submit) -> Submit:
    """`submit` with its last message, the question, as part of the user's turn before it."""
    *messages, question = submit.messages
    if messages and messages[-1].role == "user":
        content = messages.pop().content
        gap = (_GAP,) if content and isinstance(content[-1], TextPart) else ()
        question = structs.replace(question, content=(*content, *gap, *question.content))
    return structs.replace(submit, messages=(*messages, question))


def shared_tokens(
    prompts: PromptTokenizer, chat: Chat, layouts: Sequence[TokenLayout], token_ids: Sequence[int]
) -> int:
    """How many of `token_ids` prompts with other questions about the conversation begin with.

    chat: ends with the question, after all media.
    """
    *earlier, last = chat.messages
    *parts, question = last.content
    assert isinstance(question, TextPart)
    other = TextPart("B" if question.text.startswith("A") else "A")
    message = structs.replace(last, content=(*parts, other))
    other_ids = prompts.tokenize(replace(chat, messages=(*earlier, message)), layouts)
    length = min(len(token_ids), len(other_ids))
    differ = np.flatnonzero(np.array(token_ids[:length]) != np.array(other_ids[:length]))
    return int(differ[0]) if len(differ) else length


def with_snapshot(prompt: PreparedPrompt, point: int, *, has_states: bool) -> PreparedPrompt:
    """`prompt` with a further snapshot point, if it may have one there."""
    if not max(1, prompt.atomic_prefill_tokens) <= point < prompt.num_tokens:
        return prompt
    points = tuple(sorted({*prompt.snapshot_points, point}))
    return replace(prompt, snapshot_points=points, chunk_ends=points if has_states else ())


def with_options(prompt: PreparedPrompt, option_ids: Sequence[tuple[int, ...]]) -> PreparedPrompt:
    """`prompt` with its options, in an order that does not depend on the request's."""
    options = sorted(set(option_ids), key=lambda ids: (len(ids), ids))
    places = {ids: place for place, ids in enumerate(options)}
    return replace(
        prompt, options=tuple(options), option_places=tuple(places[ids] for ids in option_ids)
    )
