"""A conversation to token ids. Knows the chat template and the tokenizer; knows no pixels.

Needs no lock: the tokenizer is a copy that nobody changes, while processors set padding and
truncation on theirs. Encoding lets other Python threads run.
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from mlx_vlm.utils import should_add_special_tokens

from vlm_server.errors import ContextLengthExceeded, InvalidRequest
from vlm_server.protocol import Message, TextPart
from vlm_server.runner.loading import LoadedModel
from vlm_server.runner.special_tokens import SpecialTokens
from vlm_server.runner.templates import ChatTemplate, join_texts


class PromptTokenizer:
    """Renders and tokenizes prompts of one model, with one image token for each picture."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(loaded.backend.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._image_token: str = loaded.tokenizer.convert_ids_to_tokens(loaded.image_token_id)
        self._template = ChatTemplate(loaded.processor, self._image_token)
        self._special = SpecialTokens(loaded.tokenizer, {self.placeholder, self._image_token})
        self._bos: str | None = loaded.tokenizer.bos_token
        self._adds_special = should_add_special_tokens(loaded.model_type, loaded.processor)
        longest = max(map(len, self._tokenizer.get_vocab()))
        self._context_tokens = loaded.context_tokens
        self._max_characters = loaded.context_tokens * longest

    @property
    def placeholder(self) -> str:
        """What stands for one picture in a rendered prompt."""
        return self._template.placeholder

    def tokenize(
        self, messages: Sequence[Message], surroundings: Sequence[tuple[str, str]]
    ) -> list[int]:
        """Ids of the prompt up to where the answer begins.

        `surroundings` are the texts before and after each picture's image token. Raises
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
        token_ids = self._encode(self._place_images(rendered, surroundings))
        return self._special.remove_marks(token_ids, mark) if mark else token_ids

    def _place_images(self, rendered: str, surroundings: Sequence[tuple[str, str]]) -> str:
        text, *pieces = rendered.split(self.placeholder)
        if len(pieces) != len(surroundings):
            raise InvalidRequest(
                f"this model's chat template keeps {len(pieces)} of {len(surroundings)} pictures",
                "messages",
            )
        for (before, after), piece in zip(surroundings, pieces, strict=True):
            text += before + self._image_token + after + piece
        return text

    def _encode(self, text: str) -> list[int]:
        has_bos = self._bos is not None and text.startswith(self._bos)
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=self._adds_special and not has_bos
        )
        return list(encoding.ids)
