"""One of a request's answers while it is generated: its tokens, its text and its end."""

from __future__ import annotations

from collections.abc import Sequence

from vlm_server.engine.request.detokenizer import Decoder, Detokenizer
from vlm_server.engine.request.output.answer_parser import AnswerParser
from vlm_server.engine.request.output.pieces import Piece, Thought, add_piece
from vlm_server.engine.request.stops import StopChecker
from vlm_server.protocol import FinishReason, SamplingParams


class Choice:
    """One of a request's answers, token by token until it has a `finish_reason`.

    Stop strings are looked for in the text as the model writes it. With a parser, that has the
    control tokens and all marks in it.
    """

    def __init__(self, sampling: SamplingParams, decoder: Decoder) -> None:
        self.num_generated = 0
        self.finish_reason: FinishReason | None = None
        self._ignore_eos = sampling.ignore_eos
        self._decoder = decoder
        self._detokenizer = Detokenizer(decoder)
        self._stops = StopChecker(sampling.stop)
        self._parser: AnswerParser | None = None

    @property
    def stop(self) -> str | None:
        """The stop string that ended it."""
        return self._stops.reached

    @property
    def num_reasoning_tokens(self) -> int:
        """Of `num_generated`, those of thoughts; those of their marks count."""
        return 0 if self._parser is None else self._parser.num_reasoning_tokens

    @property
    def num_tool_calls(self) -> int:
        """Complete calls."""
        return 0 if self._parser is None else self._parser.calls.num_valid

    @property
    def num_broken_tool_calls(self) -> int:
        return 0 if self._parser is None else self._parser.calls.num_broken

    def read_with(self, parser: AnswerParser | None) -> None:
        """Split the answer, of which there is nothing yet, with `parser`; None: all is content."""
        assert not self.num_generated
        self._parser = parser
        self._detokenizer = Detokenizer(self._decoder, with_control=parser is not None)

    def append_token(
        self, token_id: int, eos_token_ids: frozenset[int], max_tokens: int
    ) -> Sequence[Piece]:
        """What a sampled token brings, at least an empty text; may end the answer."""
        self.num_generated += 1
        is_end = token_id in eos_token_ids and not self._ignore_eos
        if is_end:
            self.finish_reason = "stop"
            text = self._last_text()[0]
        else:
            text, is_stopped = self._stops.push(self._detokenize(token_id))
            is_last = self.num_generated >= max_tokens
            if is_last and not is_stopped:
                rest, is_stopped = self._last_text()
                text += rest
            if is_stopped or is_last:
                self.finish_reason = "stop" if is_stopped else "length"
        if self._parser is None:
            return (text,)
        return self._parse(self._parser, text, self._mark_of(token_id) if is_end else "")

    def _parse(self, parser: AnswerParser, text: str, end_mark: str) -> Sequence[Piece]:
        """The pieces of `text`. `end_mark`: the text of the token that has ended the answer."""
        was_in_thought = parser.is_in_thought
        pieces = list(parser.push(text))
        if self.finish_reason is not None:
            for piece in parser.flush(end_mark):
                add_piece(pieces, piece)
            if self.finish_reason == "stop" and parser.calls.num_valid:
                self.finish_reason = "tool_calls"
        if parser.is_ended:
            self.finish_reason = "tool_calls"
        return pieces or (Thought("") if was_in_thought else "",)

    def _detokenize(self, token_id: int) -> str:
        text = self._detokenizer.push(token_id)
        if self._parser is not None:
            self._parser.announce(text, self._detokenizer.num_control)
        return text

    def _mark_of(self, token_id: int) -> str:
        return self._decoder.decode([token_id], skip_special_tokens=False)

    def _last_text(self) -> tuple[str, bool]:
        """(what was held back, whether a stop string was in it)."""
        text, is_stopped = self._stops.push(self._detokenizer.flush())
        return text + self._stops.flush(), is_stopped
