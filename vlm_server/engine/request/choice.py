"""One of a request's answers while it is generated: its tokens, its text and its end."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from vlm_server.engine.output.answer_parser import AnswerParser
from vlm_server.engine.output.detokenizer import Detokenizer
from vlm_server.engine.output.pieces import Piece, ReasoningPiece, add_piece
from vlm_server.engine.output.stops import StopChecker
from vlm_server.protocol import FinishReason, SamplingParams, ToolCallDelta


class Choice:
    """One of a request's answers, token by token until it has a `finish_reason`.

    Stop strings are searched for in emitted content and reasoning, not in marks or tool calls.
    """

    def __init__(self, sampling: SamplingParams, decoder: Tokenizer) -> None:
        self.num_generated = 0
        self.num_accepted = 0
        """The number of draft tokens in the answer."""
        self.num_rejected = 0
        self.finish_reason: FinishReason | None = None
        self._ignore_eos = sampling.ignore_eos
        self._decoder = decoder
        self._detokenizer = Detokenizer(decoder)
        self._stops = StopChecker(sampling.stop)
        self._kind: type[Piece] = str
        """The kind of the newest piece."""
        self._parser: AnswerParser | None = None

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.reached

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of reasoning tokens, including marks, among `num_generated`."""
        return 0 if self._parser is None else self._parser.num_reasoning_tokens

    @property
    def num_tool_calls(self) -> int:
        """The number of complete calls."""
        return 0 if self._parser is None else self._parser.calls.num_valid

    @property
    def num_broken_tool_calls(self) -> int:
        return 0 if self._parser is None else self._parser.calls.num_broken

    def set_parser(self, parser: AnswerParser | None) -> None:
        """Set the parser before the first token; None if all text is content."""
        assert not self.num_generated
        self._parser = parser
        self._detokenizer = Detokenizer(self._decoder, with_control=parser is not None)

    def append_token(
        self, token_id: int, eos_token_ids: frozenset[int], max_tokens: int
    ) -> Sequence[Piece]:
        """Append a token, which may end the answer; returns the pieces completed, at least one."""
        self.num_generated += 1
        end_mark = ""
        if token_id in eos_token_ids and not self._ignore_eos:
            self.finish_reason = "stop"
            text, end_mark = "", self._mark_of(token_id)
        else:
            text = self._detokenize(token_id)
            if self.num_generated >= max_tokens:
                self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self._detokenizer.flush()
        if self._parser is None:
            return self._stop_in((text,)) or ("",)
        return self._parse(self._parser, text, end_mark)

    def _parse(self, parser: AnswerParser, text: str, end_mark: str) -> Sequence[Piece]:
        """The pieces of `text`. `end_mark`: the text of the token that ended the answer."""
        was_in_reasoning = parser.is_in_reasoning
        pieces = list(parser.push(text))
        if self.finish_reason is not None:
            for piece in parser.flush(end_mark):
                add_piece(pieces, piece)
        emitted = self._stop_in(pieces)
        has_ended_in_call = parser.is_ended and self.stop is None
        if has_ended_in_call or (self.finish_reason == "stop" and parser.calls.num_valid):
            self.finish_reason = "tool_calls"
        return emitted or (ReasoningPiece("") if was_in_reasoning else "",)

    def _stop_in(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """The pieces before a stop string, which ends the answer."""
        if not self._stops.has_any:
            return pieces
        emitted: list[Piece] = []
        for piece in pieces:
            if type(piece) is not self._kind:  # no stop string spans two kinds of text
                self._emit_held(emitted)
                self._kind = type(piece)
            if isinstance(piece, ToolCallDelta):
                emitted.append(piece)
                continue
            text, is_stopped = self._stops.push(piece if isinstance(piece, str) else piece.text)
            self._emit(emitted, text)
            if is_stopped:
                self.finish_reason = "stop"
                return emitted
        if self.finish_reason is not None:
            self._emit_held(emitted)
        return emitted

    def _emit_held(self, emitted: list[Piece]) -> None:
        """Emit text that was held back as the possible beginning of a stop string."""
        self._emit(emitted, self._stops.flush())

    def _emit(self, emitted: list[Piece], text: str) -> None:
        if text:
            add_piece(emitted, ReasoningPiece(text) if self._kind is ReasoningPiece else text)

    def _detokenize(self, token_id: int) -> str:
        text = self._detokenizer.push(token_id)
        if self._parser is not None:
            self._parser.announce(text, self._detokenizer.num_control)
        return text

    def _mark_of(self, token_id: int) -> str:
        return self._decoder.decode([token_id], skip_special_tokens=False)
