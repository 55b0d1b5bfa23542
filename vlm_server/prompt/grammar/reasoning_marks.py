"""The marks around a model's reasoning as tokens, and masks of the tokens allowed near them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import tokenizers
from numpy.typing import NDArray

from vlm_server.interfaces.model_spec import ModelSpec, ReasoningFormat

Mask = NDArray[np.bool_]


class ReasoningMarks:
    """The marks of one model. Masks are read-only and shared by all answers. Thread-safe.

    start_ids: the start mark. closing_ids: the end mark with the text between it and the answer,
    most often blanks that the chat template writes. after_ids: this text. in_channels: whether the
    model writes in channels, and so reasons unless it is asked not to. window: the most tokens of a
    mark.
    """

    def __init__(self, spec: ModelSpec, marks: ReasoningFormat) -> None:
        self._backend = tokenizers.Tokenizer.from_str(spec.backend.to_str())
        self._size = spec.vocabulary_size
        self._start, self._end = marks.start, marks.end
        after = marks.after or _blanks_behind(marks.end, spec.chat_template or "")
        self.start_ids = self._ids(marks.start)
        self.closing_ids = self._ids(marks.end + after)
        self.after_ids = self._ids(after)
        self._header_ids = self._ids(marks.answer_header)
        self.in_channels = bool(marks.answer_header)
        self.window = max(len(marks.start), len(marks.end)) + 1
        self.everything = self._without(())
        self._no_ends = self._without(spec.eos_token_ids)
        self.only = lru_cache(64)(self._only)
        self._not_beyond = self._masks_within_the_mark()

    def ids_before_text(self, *, starts: bool) -> list[int]:
        """Ids between a prompt and the text of an answer without reasoning.

        starts: whether the prompt ends inside reasoning.
        """
        return self.closing_ids if starts else self._header_ids

    def may_start_in(self, token_ids: Sequence[int]) -> bool | None:
        """Whether the answer `token_ids` has begun reasoning; None if it still may."""
        text = self._text(token_ids).lstrip()
        if text.startswith(self._start):
            return bool(self._start)
        return None if self._start.startswith(text) else False

    def text_after_end(self, token_ids: Sequence[int]) -> str | None:
        """The text of `token_ids` after the end mark; None without one."""
        _, mark, rest = self._text(token_ids).partition(self._end)
        return rest if mark else None

    def mask_inside(self, token_ids: Sequence[int]) -> Mask:
        """The mask inside reasoning, after `token_ids`: no end token, nothing past the end mark."""
        text = self._text(token_ids)
        for rest, mask in self._not_beyond.items():
            if text.endswith(self._end.removesuffix(rest)):
                return mask
        return self._no_ends

    def _ids(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids) if text else []

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False))

    def _without(self, token_ids: Iterable[int]) -> Mask:
        mask = np.ones(self._size, dtype=np.bool_)
        mask[[i for i in token_ids if 0 <= i < self._size]] = False
        return _read_only(mask)

    def _only(self, token_id: int) -> Mask:
        mask = np.zeros(self._size, dtype=np.bool_)
        mask[token_id] = True
        return _read_only(mask)

    def _masks_within_the_mark(self) -> dict[str, Mask]:
        """Masks by the missing rest of the end mark, the shortest rest first."""
        rests = [self._end[i:] for i in range(len(self._end) - 1, 0, -1)]
        beyond: dict[str, list[int]] = {rest: [] for rest in rests}
        spelled, is_spelled_in_bytes = tuple(rests), not self._end.isascii()
        for name, token_id in self._backend.get_vocab().items():
            if is_spelled_in_bytes or name.startswith(spelled):
                text = self._text([token_id])
                for rest in rests:
                    if text.startswith(rest) and text[len(rest) :].strip():
                        beyond[rest].append(token_id)
        ends = self._no_ends
        return {rest: self._without(ids) & ends if ids else ends for rest, ids in beyond.items()}


def _blanks_behind(mark: str, chat_template: str) -> str:
    r"""The longest run of line breaks after `mark` in a template, also written as `\n`."""
    runs = re.findall(re.escape(mark) + r"((?:\n|\\n)+)", chat_template)
    return max((run.replace("\\n", "\n") for run in runs), key=len, default="")


def _read_only(mask: Mask) -> Mask:
    mask.flags.writeable = False
    return mask
