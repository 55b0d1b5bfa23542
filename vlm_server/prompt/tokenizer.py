"""The token ids of a conversation.

The tokenizer is a copy that is never changed, so it needs no lock; processors set padding and
truncation on their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from vlm_server.errors import ContextLengthExceeded, InvalidRequest
from vlm_server.interfaces.model_spec import ModelSpec
from vlm_server.interfaces.prompts import MAX_OPTION_TOKENS
from vlm_server.prompt.media.processing import TokenLayout
from vlm_server.prompt.special_tokens import SpecialTokens
from vlm_server.prompt.template.chat import Chat, field_of, join_texts
from vlm_server.prompt.template.templates import ChatTemplate, template_of

_TAIL_TOKENS = 8
"""The end of a prompt with which an option is tokenized."""
_NOTHING = r"(?!)"
"""A pattern that matches nowhere."""


class PromptTokenizer:
    """Renders and tokenizes prompts of one model, with one token for each image and video."""

    def __init__(self, spec: ModelSpec) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(spec.backend.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokens = {
            token_id: str(spec.tokenizer.convert_ids_to_tokens(token_id))
            for token_id in spec.media_token_ids
        }
        video_token = None if spec.video_token_id is None else self._tokens[spec.video_token_id]
        self.template = ChatTemplate(
            template_of(spec), spec.image_placeholders, video_token, tuple(spec.template_variables)
        )
        self.template.check()
        either = (self.template.video_placeholder, self.template.placeholder)
        placeholders = [text for text in either if text]
        self._special = SpecialTokens(spec.tokenizer, {*placeholders, *self._tokens.values()})
        self._placeholders = re.compile("|".join(map(re.escape, placeholders)) or _NOTHING)
        self._mark = spec.image_mark
        self._bos: str | None = spec.tokenizer.bos_token
        self._adds_special = spec.adds_special_tokens
        longest = max(map(len, self._tokenizer.get_vocab()))
        self._max_option_characters = MAX_OPTION_TOKENS * longest
        self._context_tokens = spec.context_tokens
        self._vocabulary_size = spec.vocabulary_size
        self._max_characters = spec.context_tokens * longest

    def generation_suffix(self, variables: Mapping[str, Any]) -> list[int]:
        """Ids of the generation prompt, which the template writes after the last message."""
        text = self.template.generation_suffix(variables)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def tokenize(self, chat: Chat, media: Sequence[TokenLayout]) -> list[int]:
        """Ids of the prompt of an arranged chat, up to where the answer begins.

        media: its images and videos, in order. Raises InvalidRequest for a conversation that the
        template refuses, and ContextLengthExceeded for a text too long for any tokenization.
        """
        chat = replace(chat, messages=join_texts(chat.messages))
        param = field_of(chat.messages)
        user_text = "\n".join(chat.texts())
        self._check_length(user_text, param)
        mark: str | None = None
        if self._special.may_begin_in(user_text):
            mark = self._special.choose_mark(user_text)
            rendered = self._render(chat, mark) if mark else self._render_unmarked(chat)
        else:
            rendered = self.template.render(chat, str)
        text = self._place_media(rendered, media, param)
        token_ids = self._ids(text, param, adds_special=self._adds_special)
        return self._special.remove_marks(token_ids, mark) if mark else token_ids

    def tokenize_text(self, text: str) -> list[int]:
        """Ids of a prompt without a template: control tokens in it are parsed as such.

        Raises InvalidRequest for tokens that stand for media, and ContextLengthExceeded.
        """
        self._check_length(text, "prompt")
        token_ids = self._ids(text, "prompt", adds_special=True)
        self._check_no_media(token_ids)
        return token_ids

    def tokenize_pair(
        self, first: str, second: str, param: str
    ) -> tuple[list[int], NDArray[np.int32]]:
        """Ids of two texts as one input, and for each token which of them it is of: 0 or 1.

        Raises InvalidRequest and ContextLengthExceeded.
        """
        self._check_length(first + second, param)
        try:
            pair = [(first, second)]
            (encoding,) = self._tokenizer.encode_batch(pair, add_special_tokens=True)
        except (TypeError, UnicodeEncodeError):
            raise _no_text(param) from None
        return list(encoding.ids), np.array(encoding.type_ids, dtype=np.int32)

    def count(self, text: str) -> int:
        """The tokens of `text`; of one that is too long for the context, as many as fill that."""
        return len(self._ids(text[: self._max_characters], "prompt", adds_special=False))

    def tokenize_prediction(self, text: str) -> tuple[int, ...]:
        """Ids of the expected text of the answer."""
        self._check_length(text, "prediction")
        return tuple(self._ids(text, "prediction", adds_special=False))

    def tokenize_options(
        self, options: Sequence[str], prompt_ids: Sequence[int], param: str, num_spellings: int = 1
    ) -> list[tuple[int, ...]]:
        """Ids of each option as the text that follows `prompt_ids`.

        Raises InvalidRequest for control tokens, for an option of no tokens or too many, and for
        equal ones: as texts they differ, but not to a tokenizer that normalizes them. The
        `num_spellings` of one answer, which come one after the other, may be equal.
        """
        if any(len(option) > self._max_option_characters for option in options):
            message = f"An option has more than {MAX_OPTION_TOKENS} tokens."
            raise InvalidRequest(message, param)
        tail = self.text_of(prompt_ids[-_TAIL_TOKENS:])
        texts = [tail, *(tail + option for option in options), *options]
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            raise _no_text(param) from None
        (tail_ids, *ids), count = (encoding.ids for encoding in encodings), len(options)
        tokenized, first_numbers = list[tuple[int, ...]](), dict[tuple[int, ...], int]()
        for number, (after_tail, alone) in enumerate(zip(ids[:count], ids[count:], strict=True)):
            is_after = after_tail[: len(tail_ids)] == tail_ids
            option_ids = tuple(after_tail[len(tail_ids) :] if is_after else alone)
            if self._special.count(options[number]):
                raise InvalidRequest(f"Option {number} has a control token.", param)
            if not 1 <= len(option_ids) <= MAX_OPTION_TOKENS:
                raise InvalidRequest(
                    f"Option {number} has {len(option_ids)} tokens; an option has 1 to "
                    f"{MAX_OPTION_TOKENS}.",
                    param,
                )
            other = first_numbers.setdefault(option_ids, number)
            if other // num_spellings != number // num_spellings:
                message = f"Options {other} and {number} are the same tokens to this model."
                raise InvalidRequest(message, param)
            tokenized.append(option_ids)
        return tokenized

    def check_ids(self, token_ids: Sequence[int], *, allows_media: bool = False) -> list[int]:
        """The ids of a prompt given as ids, checked. Raises InvalidRequest."""
        size, token_of = self._vocabulary_size, self._tokenizer.id_to_token
        if not all(0 <= i < size and token_of(i) is not None for i in set(token_ids)):
            raise InvalidRequest("This model's tokenizer does not have one of the ids.", "prompt")
        if not allows_media:
            self._check_no_media(token_ids)
        return list(token_ids)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, control tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _check_no_media(self, token_ids: Sequence[int]) -> None:
        if not self._tokens.keys().isdisjoint(token_ids):
            raise InvalidRequest("The prompt has tokens that stand for images.", "prompt")

    def _check_length(self, text: str, param: str) -> None:
        if len(text) > self._max_characters:
            raise ContextLengthExceeded.of_prompt(
                self._context_tokens,
                f"{len(text)} characters, whatever their tokens. Send fewer or shorter messages.",
                param,
            )

    def _render(self, chat: Chat, mark: str) -> str:
        """The prompt, with marks that break up control tokens in user text."""
        special, render = self._special, self.template.render
        rendered = render(chat, lambda text: special.disarm(text, mark))
        strict = render(chat, lambda text: special.disarm_beginnings(text, mark))
        # A template that removed text inside a broken-up token has made it whole again.
        return strict if special.count(rendered) > special.count(strict) else rendered

    def _render_unmarked(self, chat: Chat) -> str:
        """The prompt of a text that has every mark. Raises InvalidRequest for control tokens."""
        rendered = self.template.render(chat, str)
        harmless = self.template.render(chat, self._special.without_beginnings)
        if self._special.count(rendered) > self._special.count(harmless):
            message = "the text mixes control tokens and private-use marks"
            raise InvalidRequest(message, field_of(chat.messages))
        return rendered

    def _place_media(self, rendered: str, media: Sequence[TokenLayout], param: str) -> str:
        text, *parts = self._placeholders.split(rendered)
        if len(parts) != len(media):
            message = f"this model's chat template keeps {len(parts)} of {len(media)} images"
            raise InvalidRequest(message, param)
        for layout, part in zip(media, parts, strict=True):
            prefix = layout.prefix
            if self._mark and text.endswith(self._mark):
                prefix = prefix.removeprefix(self._mark)
            text += prefix + self._tokens[layout.token_id] + layout.suffix + part
        return text

    def _ids(self, text: str, param: str, *, adds_special: bool) -> list[int]:
        """The ids of `text`. Raises InvalidRequest for lone surrogates."""
        has_bos = self._bos is not None and text.startswith(self._bos)
        adds_special = adds_special and not has_bos
        try:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=adds_special)
        except (TypeError, UnicodeEncodeError):
            raise _no_text(param) from None
        return list(encoding.ids)


def _no_text(param: str) -> InvalidRequest:
    message = "the prompt has characters that are not Unicode text, such as lone surrogates"
    return InvalidRequest(message, param)
