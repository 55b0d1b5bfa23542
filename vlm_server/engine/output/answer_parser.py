"""The parser of one choice's text stream into content, reasoning and tool calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum, auto

from vlm_server.engine.output.auto_calls import AutoCallParser
from vlm_server.engine.output.calls import Calls
from vlm_server.engine.output.formats import Formats
from vlm_server.engine.output.pieces import BLANKS, Marks, Piece, ReasoningPiece, add_piece, marks
from vlm_server.engine.output.required_calls import RequiredCallParser
from vlm_server.interfaces import AnswerFormat
from vlm_server.interfaces.model_spec import ReasoningFormat


def build_parser(
    formats: Formats, answer: AnswerFormat | None, *, is_json: bool
) -> AnswerParser | None:
    """A parser for one answer; None if all of its text is content.

    With `is_json` the content, if there is any, is JSON that a grammar ensures, and has no marks.
    """
    if answer is None:
        return None
    may_call = bool(answer.tools) and formats.tools is not None
    if not (may_call or answer.is_required or formats.reasoning):
        return None
    calls = Calls(answer, formats.tools)
    auto_calls = None
    if formats.tools is not None and may_call and not answer.is_required:
        auto_calls = AutoCallParser(formats.tools, answer.tools, calls)
    return AnswerParser(
        calls,
        auto_calls,
        RequiredCallParser(calls) if answer.is_required else None,
        formats.reasoning,
        starts_in_reasoning=answer.starts_in_reasoning,
        content_has_marks=not (is_json or answer.is_required),
    )


class _State(Enum):
    CONTENT = auto()
    REASONING = auto()
    CALL = auto()


class AnswerParser:
    """Turns text into pieces, independent of how the text was split; loses and doubles nothing.

    Marks and control tokens, and their beginnings, are never sent, except those of a broken call,
    which becomes content as it was generated. Reasoning begins before any content, or after
    reasoning, a call or a header, with only blanks between; elsewhere its mark is content.
    Reasoning may end with the answer. Blanks around a mark are dropped at the beginning and end of
    the answer and between marks; after a mark of reasoning, always.
    """

    def __init__(
        self,
        calls: Calls,
        auto_calls: AutoCallParser | None,
        required_calls: RequiredCallParser | None,
        reasoning: ReasoningFormat | None,
        *,
        starts_in_reasoning: bool,
        content_has_marks: bool,
    ) -> None:
        """Without `content_has_marks` the search for marks ends where content begins."""
        self.num_reasoning_tokens = 0
        """The number of tokens with text of reasoning, or with a part of its marks."""
        self.calls = calls
        self._auto = auto_calls
        self._required = required_calls
        self._reasoning = reasoning
        self._content_has_marks = content_has_marks
        self._control_spans = _ControlSpans()
        self._num_announced = 0
        """The number of characters of announced raw text."""
        self._position = 0
        """The number of characters of raw text before `_held`."""
        self._held_text = ""
        """Text that may become a mark."""
        self._num_undecided_tokens = 0
        """The number of tokens of `_held`."""
        self._has_reasoning = False
        """Whether the newest token belongs to reasoning."""
        self._has_marks = False
        """Whether there was reasoning or a valid call."""
        self._blanks: list[str] = []
        """Blanks after a mark, with no other text after them yet."""
        self._is_after_mark = True
        self._drops_blanks = False
        """Whether blanks after the last mark are dropped even if text follows."""
        self._pieces: list[Piece] = []
        self._enter(_State.CONTENT)
        if reasoning is not None and starts_in_reasoning:
            self._drops_blanks = True
            self._enter(_State.REASONING)

    # ---- input -----------------------------------------------------------------------

    def announce(self, text: str, num_control: int) -> None:
        """Announce `text`, which will be pushed unless a stop string ends the answer before.

        Its last `num_control` characters are a control token.
        """
        self._num_announced += len(text)
        if num_control:
            self._control_spans.add(self._num_announced - num_control, self._num_announced)

    def push(self, text: str) -> Sequence[Piece]:
        """The pieces that the text of one token, perhaps empty, completes."""
        self._pieces = []
        self._num_undecided_tokens += 1
        self._has_reasoning = self.is_in_reasoning
        self._held_text += text
        self._read(is_last=False)
        self._count_token(text)
        return self._pieces

    def flush(self, end_mark: str = "") -> Sequence[Piece]:
        """The pieces that were held back until the end of the answer.

        `end_mark`: the text of the token that ended the answer, which may also end a call or
        reasoning.
        """
        self._pieces = []
        if self._waits_for(end_mark):
            self._held_text += end_mark
        self._read(is_last=True)
        if self._auto is not None and self._state is _State.CALL:
            self._end_call("", is_cut_off=self._auto.has_end_mark)
        if self._blanks and not self._has_marks:
            self._add_content("".join(self._blanks))
        self._blanks = []
        if self._required is not None and not self.is_ended:
            self._add_all(self._required.flush())
        return self._pieces

    # ---- readings --------------------------------------------------------------------

    @property
    def is_in_reasoning(self) -> bool:
        return self._state is _State.REASONING

    @property
    def is_ended(self) -> bool:
        """Whether the answer ends here, since no more calls may follow."""
        return self.calls.is_full

    def _waits_for(self, mark: str) -> bool:
        """Whether `mark` ends the call or reasoning under way."""
        if self._state is _State.CONTENT or not mark:
            return False
        return self._marks.find(mark) == (0, mark)

    # ---- states ----------------------------------------------------------------------

    def _enter(self, state: _State) -> None:
        self._state = state
        self._marks = self._marks_in(state)

    def _marks_in(self, state: _State) -> Marks:
        if state is _State.CALL and self._auto is not None:
            return self._auto.ends
        reasoning = self._reasoning
        if state is _State.REASONING:
            return marks(reasoning.end if reasoning else "")
        headers = reasoning.headers if reasoning else ()
        if not self._is_after_mark:
            return marks(self._auto.start if self._auto else "", *headers)
        calls = self._auto.starts if self._auto else ()
        return marks(reasoning.start if reasoning else "", *calls, *headers)

    def _read(self, *, is_last: bool) -> None:
        """Read the held text up to a possible mark; all of it, if it `is_last`."""
        while not self.is_ended:
            looked_for = self._marks
            length, mark = looked_for.find(self._held_text, is_last=is_last)
            self._take_text(length)
            if self._marks is not looked_for:  # the text before the mark makes it content
                continue
            if not mark:
                return
            self._pass_mark(mark)

    def _pass_mark(self, mark: str) -> None:
        if self._state is _State.CALL:
            assert self._auto is not None
            self._pass_mark_in_call(self._auto, mark)
            return
        self._skip(len(mark))
        if self._auto is not None and mark in self._auto.starts:
            self._auto.begin(mark)
            self._enter(_State.CALL)
            return
        if self._reasoning is not None and mark in self._reasoning.headers:
            self._has_marks = self._is_after_mark = True
            self._enter(_State.CONTENT)
            return
        self._has_reasoning = self._has_marks = self._is_after_mark = self._drops_blanks = True
        self._blanks = []
        self._enter(_State.CONTENT if self.is_in_reasoning else _State.REASONING)

    def _pass_mark_in_call(self, auto_calls: AutoCallParser, mark: str) -> None:
        if auto_calls.is_text(mark):
            auto_calls.push(self._skip(len(mark)))
            self._enter(_State.CALL)
        elif not auto_calls.has_end_mark:
            self._end_call("")
        elif mark == auto_calls.start:
            self._end_call("", is_cut_off=True)
        else:
            self._end_call(self._skip(len(mark)))

    def _end_call(self, end_mark: str, *, is_cut_off: bool = False) -> None:
        assert self._auto is not None
        calls = self._auto.end(end_mark, is_cut_off=is_cut_off)
        self._is_after_mark = not isinstance(calls, str)
        self._enter(_State.CONTENT)
        if isinstance(calls, str):
            self._add_content("".join(self._blanks) + calls)
        else:
            self._pieces += calls
            self._has_marks = True
            self._drops_blanks = False
        self._blanks = []

    # ---- text ------------------------------------------------------------------------

    def _skip(self, length: int) -> str:
        skipped, self._held_text = self._held_text[:length], self._held_text[length:]
        self._position += length
        return skipped

    def _unskip(self, text: str) -> None:
        self._held_text = text + self._held_text
        self._position -= len(text)

    def _take_text(self, length: int) -> None:
        if not length:
            return
        start = self._position
        text = self._skip(length)
        if self._state is _State.CALL:
            assert self._auto is not None
            self._unskip(text[self._auto.push(text) :])
            if self._auto.is_closed:
                self._end_call("")
            return
        text = self._control_spans.strip(text, start)
        if text and self._is_after_mark:
            text = self._without_blanks(text)
        if text and self.is_in_reasoning:
            add_piece(self._pieces, ReasoningPiece(text))
        elif text:
            self._add_content(text)

    def _without_blanks(self, text: str) -> str:
        """`text` without leading blanks, unless they are content."""
        bare = text.lstrip(BLANKS)
        if len(bare) < len(text) and not self._drops_blanks:
            self._blanks.append(text[: len(text) - len(bare)])
        if not bare:
            return ""
        blanks, self._blanks = self._blanks, []
        self._is_after_mark = self._drops_blanks = False
        self._enter(self._state)
        return "".join(blanks) + bare

    def _add_content(self, text: str) -> None:
        if not self._content_has_marks:
            self._marks = marks()
        if self._required is None:
            add_piece(self._pieces, text)
        else:
            self._add_all(self._required.push(text))

    def _add_all(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            add_piece(self._pieces, piece)

    def _count_token(self, text: str) -> None:
        """Count the newest token, whose text is `text`, if it belongs to reasoning.

        Undecided tokens before it then do, too.
        """
        if self._has_reasoning:
            self.num_reasoning_tokens += self._num_undecided_tokens
            self._num_undecided_tokens = 0
        elif len(self._held_text) <= len(text):
            self._num_undecided_tokens = 1 if self._held_text else 0


class _ControlSpans:
    """Positions of control tokens, in characters of the answer's raw text; these are never sent."""

    def __init__(self) -> None:
        self._spans: deque[tuple[int, int]] = deque()

    def add(self, start: int, end: int) -> None:
        """Append a span that comes after all others."""
        self._spans.append((start, end))

    def strip(self, text: str, start: int) -> str:
        """`text` without control tokens. `start`: its position, which never decreases."""
        while self._spans and self._spans[0][1] <= start:
            self._spans.popleft()
        end, kept, at = start + len(text), [], start
        for first, last in self._spans:
            if first >= end:
                break
            kept.append(text[at - start : max(first, at) - start])
            at = min(last, end)
        return "".join(kept) + text[at - start :] if kept else text
