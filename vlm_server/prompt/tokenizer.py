"""A conversation to token ids. Knows the chat template and the tokenizer; knows no pixels.

Needs no lock: the tokenizer is a copy that nobody changes, while processors set padding and
truncation on theirs. Encoding lets other Python threads run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers
from mlx_vlm.utils import should_add_special_tokens

from vlm_server.errors import ContextLengthExceeded, InvalidRequest
from vlm_server.prompt.special_tokens import SpecialTokens
from vlm_server.prompt.templates import ChatTemplate, join_texts
from vlm_server.protocol import Message, TextPart
from vlm_server.runner.model.load import LoadedModel


@dataclass(frozen=True, slots=True)
class Placeholder:
    """What is written for one picture or video: the token that stands for it, and text around."""

    token_id: int
    prefix: str
    suffix: str


class PromptTokenizer:
    """Renders and tokenizes prompts of one model, with one token for each picture and video."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(loaded.backend.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        media_ids = [i for i in (loaded.image_token_id, loaded.video_token_id) if i is not None]
        self._tokens = {i: str(loaded.tokenizer.convert_ids_to_tokens(i)) for i in media_ids}
        self._template = ChatTemplate(loaded.processor, *self._tokens.values())
        placeholders = {self.placeholder, *self._tokens.values()}
        self._special = SpecialTokens(loaded.tokenizer, placeholders)
        either = filter(None, (self.video_placeholder, self.placeholder))
        self._placeholders = re.compile("|".join(map(re.escape, either)))
        self._bos: str | None = loaded.tokenizer.bos_token
        self._adds_special = should_add_special_tokens(loaded.model_type, loaded.processor)
        longest = max(map(len, self._tokenizer.get_vocab()))
        self._context_tokens = loaded.context_tokens
        self._max_characters = loaded.context_tokens * longest

    @property
    def placeholder(self) -> str:
        """What stands for one picture in a rendered prompt."""
        return self._template.placeholder

    @property
    def video_placeholder(self) -> str | None:
        """What stands for one video; None if the template knows no videos."""
        return self._template.video_placeholder

    @property
    def generation_suffix(self) -> list[int]:
        """Ids of what the template writes after the last message to begin the answer."""
        text = self._template.generation_suffix
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def tokenize(self, messages: Sequence[Message], places: Sequence[Placeholder]) -> list[int]:
        """Ids of the prompt up to where the answer begins.

        `places` are those of the pictures and videos, in order. Raises
        InvalidRequest for a conversation that the template refuses, ContextLengthExceeded,
        without tokenizing it, for a text that could not fit whatever its tokens are.
        """
        messages = join_texts(messages)
        user_text = "\n".join(
            part.text
            for message in messages
            for part in message.content
            if isinstance(part, TextPart)
        )
        if len(user_text) > self._max_characters:
            raise ContextLengthExceeded(
                f"{len(user_text)} characters are more than this model's context of "
                f"{self._context_tokens} tokens can hold",
                "messages",
            )
        mark = self._special.choose_mark(user_text) if self._special.are_in(user_text) else ""
        if mark is None:
            raise InvalidRequest("the text mixes control tokens and private-use marks", "messages")
        rendered = self._template.render(
            messages, lambda text: self._special.disarm(text, mark) if mark else text
        )
        token_ids = self._encode(self._place_media(rendered, places))
        return self._special.remove_marks(token_ids, mark) if mark else token_ids

    def _place_media(self, rendered: str, places: Sequence[Placeholder]) -> str:
        text, *pieces = self._placeholders.split(rendered)
        if len(pieces) != len(places):
            raise InvalidRequest(
                f"this model's chat template keeps {len(pieces)} of {len(places)} pictures",
                "messages",
            )
        for place, piece in zip(places, pieces, strict=True):
            text += place.prefix + self._tokens[place.token_id] + place.suffix + piece
        return text

    def _encode(self, text: str) -> list[int]:
        has_bos = self._bos is not None and text.startswith(self._bos)
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=self._adds_special and not has_bos
        )
        return list(encoding.ids)
