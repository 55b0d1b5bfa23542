"""Splits the text of one choice into content, thoughts and tool calls, as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from vlm_server.engine.output.calls import Calls
from vlm_server.engine.output.control_spans import ControlSpans
from vlm_server.engine.output.forced_calls import ForcedCalls
from vlm_server.engine.output.free_calls import FreeCalls
from vlm_server.engine.output.marks import Marks, marks
from vlm_server.engine.output.pieces import BLANKS, Piece, Thought, add_piece
from vlm_server.interfaces.model_spec import ReasoningFormat


class _State(Enum):
    CONTENT = auto()
    THOUGHT = auto()
    CALL = auto()


class AnswerParser:
    """Text in, pieces out: nothing is lost or doubled, however the text was split.

    A mark is never sent, not even its beginning, unless it belongs to a broken call: that is
    content, as it was generated. A thought begins before any content, or right after a thought, a
    call or a header, but for blanks: elsewhere its mark is content. Control tokens are not sent
    either, but for those of a broken call. Blanks around a mark are dropped if nothing else stands
    beside it: at the beginning of the answer, between marks, and at its end; after a thought's
    marks, they always are. A thought that the answer ends in is one.
    """

    def __init__(
        self,
        calls: Calls,
        free: FreeCalls | None,
        forced: ForcedCalls | None,
        reasoning: ReasoningFormat | None,
        *,
        starts_in_thought: bool,
        content_has_marks: bool,
    ) -> None:
        """Without `content_has_marks` none are looked for once there is content."""
        self.num_reasoning_tokens = 0
        """Tokens with text of a thought, or with a part of its marks."""
        self.calls = calls
        self._free = free
        self._forced = forced
        self._reasoning = reasoning
        self._content_has_marks = content_has_marks
        self._control_spans = ControlSpans()
        self._num_announced = 0
        """Characters of raw text that were announced."""
        self._position = 0
        """Characters of raw text that were read: those before `_held`."""
        self._held = ""
        """What may become a mark."""
        self._num_undecided_tokens = 0
        """Tokens that `_held` came with."""
        self._has_thought = False
        """Whether the newest text has something of a thought."""
        self._has_marks = False
        """Whether there was a thought or a valid call."""
        self._blanks: list[str] = []
        """Those that nothing but a mark stands before, and nothing yet after them."""
        self._is_after_mark = True
        self._drops_blanks = False
        """Whether those right after the last mark are dropped, whatever follows."""
        self._pieces: list[Piece] = []
        self._enter(_State.CONTENT)
        if reasoning is not None and starts_in_thought:
            self._drops_blanks = True
            self._enter(_State.THOUGHT)

    # ---- what comes in ---------------------------------------------------------------

    def announce(self, text: str, num_control: int) -> None:
        """`text` will be pushed, later perhaps, unless a stop string ends the answer before.

        It ends with a control token of `num_control` characters, if that is not 0.
        """
        self._num_announced += len(text)
        if num_control:
            self._control_spans.add(self._num_announced - num_control, self._num_announced)

    def push(self, text: str) -> Sequence[Piece]:
        """What the text that one token brings, which may be none, brings."""
        self._pieces = []
        self._num_undecided_tokens += 1
        self._has_thought = self.is_in_thought
        self._held += text
        self._read(is_last=False)
        self._count_token(text)
        return self._pieces

    def flush(self, end_mark: str = "") -> Sequence[Piece]:
        """What was held back, now that the answer has ended.

        `end_mark` is the text of the token that ended it, which may end a call or a thought, too.
        """
        self._pieces = []
        if self._waits_for(end_mark):
            self._held += end_mark
        self._read(is_last=True)
        if self._free is not None and self._state is _State.CALL:
            self._end_call("", is_cut_off=self._free.has_end_mark)
        if self._blanks and not self._has_marks:
            self._add_content("".join(self._blanks))
        self._blanks = []
        if self._forced is not None and not self.is_ended:
            self._add_all(self._forced.flush())
        return self._pieces

    # ---- what it knows ---------------------------------------------------------------

    @property
    def is_in_thought(self) -> bool:
        return self._state is _State.THOUGHT

    @property
    def is_ended(self) -> bool:
        """Whether the answer ends here, since no more calls may follow."""
        return self.calls.is_full

    def _waits_for(self, mark: str) -> bool:
        """Whether `mark` is what ends a thought or a call that is under way."""
        if self._state is _State.CONTENT or not mark:
            return False
        return self._marks.find(mark) == (0, mark)

    # ---- states ----------------------------------------------------------------------

    def _enter(self, state: _State) -> None:
        self._state = state
        self._marks = self._marks_in(state)

    def _marks_in(self, state: _State) -> Marks:
        """What ends `state`."""
        if state is _State.CALL and self._free is not None:
            return self._free.ends
        reasoning = self._reasoning
        if state is _State.THOUGHT:
            return marks(reasoning.end if reasoning else "")
        thought = reasoning.start if reasoning and self._is_after_mark else ""
        headers = reasoning.headers if reasoning else ()
        return marks(thought, self._free.start if self._free else "", *headers)

    def _read(self, *, is_last: bool) -> None:
        """Read what is held up to what may become a mark; all, if it `is_last`."""
        while not self.is_ended:
            looked_for = self._marks
            length, mark = looked_for.find(self._held, is_last=is_last)
            self._take_text(length)
            if self._marks is not looked_for:  # what was found is none, by what stands before it
                continue
            if not mark:
                return
            self._pass_mark(mark)

    def _pass_mark(self, mark: str) -> None:
        if self._state is _State.CALL:
            assert self._free is not None
            self._pass_mark_in_call(self._free, mark)
            return
        self._skip(len(mark))
        if self._free is not None and mark == self._free.start:
            self._enter(_State.CALL)
            return
        if self._reasoning is not None and mark in self._reasoning.headers:
            self._has_marks = self._is_after_mark = True
            self._enter(_State.CONTENT)
            return
        self._has_thought = self._has_marks = self._is_after_mark = self._drops_blanks = True
        self._blanks = []
        self._enter(_State.CONTENT if self.is_in_thought else _State.THOUGHT)

    def _pass_mark_in_call(self, free: FreeCalls, mark: str) -> None:
        if free.is_text(mark):
            free.push(self._skip(len(mark)))
            self._enter(_State.CALL)
        elif not free.has_end_mark:
            self._end_call("")
        elif mark == free.start:
            self._end_call("", is_cut_off=True)
        else:
            self._end_call(self._skip(len(mark)))

    def _end_call(self, end_mark: str, *, is_cut_off: bool = False) -> None:
        assert self._free is not None
        read = self._free.end(end_mark, is_cut_off=is_cut_off)
        self._is_after_mark = not isinstance(read, str)
        self._enter(_State.CONTENT)
        if isinstance(read, str):
            self._add_content("".join(self._blanks) + read)
        else:
            self._pieces += read
            self._has_marks = True
            self._drops_blanks = False
        self._blanks = []

    # ---- text ------------------------------------------------------------------------

    def _skip(self, length: int) -> str:
        skipped, self._held = self._held[:length], self._held[length:]
        self._position += length
        return skipped

    def _unskip(self, text: str) -> None:
        """Read `text`, which was skipped last, again."""
        self._held = text + self._held
        self._position -= len(text)

    def _take_text(self, length: int) -> None:
        if not length:
            return
        start = self._position
        text = self._skip(length)
        if self._state is _State.CALL:
            assert self._free is not None
            self._unskip(text[self._free.push(text) :])
            if self._free.is_closed:
                self._end_call("")
            return
        text = self._control_spans.strip(text, start)
        if text and self._is_after_mark:
            text = self._without_blanks(text)
        if text and self.is_in_thought:
            add_piece(self._pieces, Thought(text))
        elif text:
            self._add_content(text)

    def _without_blanks(self, text: str) -> str:
        """`text` without the blanks it begins with, unless they are shown."""
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
        if self._forced is None:
            add_piece(self._pieces, text)
        else:
            self._add_all(self._forced.push(text))

    def _add_all(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            add_piece(self._pieces, piece)

    def _count_token(self, text: str) -> None:
        """Count the newest token, which brought `text`, if it is of a thought.

        So are those before it that were undecided.
        """
        if self._has_thought:
            self.num_reasoning_tokens += self._num_undecided_tokens
            self._num_undecided_tokens = 0
        elif len(self._held) <= len(text):
            self._num_undecided_tokens = 1 if self._held else 0
