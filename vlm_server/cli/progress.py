"""Progress of long work: one line that moves on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, TextIO

from vlm_server.cli.text import shorten_stage

if TYPE_CHECKING:
    from rich.progress import Progress, Task, TaskID, TimeRemainingColumn
    from rich.text import Text

logger = logging.getLogger(__name__)

_STEP = 0.05
_REFRESHES_PER_SECOND = 5
_BAR_COLUMNS = 24
_ROOM_FOR_CONTROL = 3
"""Columns left free for the `^C` of the terminal, which would begin a line of its own."""
_FIGURE_COLUMNS = 15
"""Columns for the figures after the text and the bar."""
_MIN_SECONDS_FOR_RATE = 5.0
_MAX_LEFT_SECONDS = 24 * 3600.0
"""A rate that would take longer is one of a start, or of a halt."""


class ProgressLine:
    """The progress on `stream`: a bar on a terminal, log lines elsewhere.

    A terminal that can't move its cursor (TERM=dumb) gets a line for each stage. A stage that
    advances in small steps, such as a download, gets a log line every 5 %.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._bar: _Bar | None = None
        self._logged = -1.0
        self._kind = ""

    def show(self, stage: str, fraction: float | None) -> None:
        """Show `stage` and `fraction` from 0 to 1, if known; an empty `stage` removes the line."""
        if not stage:
            self.clear()
            return
        if self._is_terminal:
            self._bar = self._bar or _Bar(self._stream)
            if self._bar.can_move:
                self._bar.show(stage, fraction)
                return
        if fraction is None:
            return
        text, kind = f"{stage} ({fraction:.0%})", _kind_of(stage)
        if 0 <= fraction - self._logged < _STEP and (kind == self._kind or not self._is_terminal):
            return
        self._logged, self._kind = fraction, kind
        if self._is_terminal:
            self._stream.write(f"{text}\n")
            self._stream.flush()
        else:
            logger.info("%s", text)

    def clear(self) -> None:
        """Remove the line from the terminal."""
        self._logged = -1.0
        if self._bar is not None:
            self._bar.clear()


class _Bar:
    """One line of `rich`, drawn by a thread of its own until it is cleared."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console  # slow to import

        self._console = Console(file=stream)
        self._console.width = max(1, self._console.width - _ROOM_FOR_CONTROL)
        self.can_move = self._console.is_terminal and not self._console.is_dumb_terminal
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._kind: tuple[str, bool] | None = None
        self._bar_columns = min(_BAR_COLUMNS, self._console.width // 5)

    def show(self, stage: str, fraction: float | None) -> None:
        kind = (_kind_of(stage), fraction is None)
        stage = shorten_stage(stage, self._console.width - self._bar_columns - _FIGURE_COLUMNS)
        if self._progress is None or self._task is None or kind != self._kind:
            self.clear()  # the remaining time is estimated per kind
            self._kind, self._progress = kind, self._new(with_bar=fraction is not None)
            self._task = self._progress.add_task(stage, total=1.0)
            self._progress.update(self._task, completed=fraction)
            self._progress.start()
            return
        self._progress.update(self._task, description=stage, completed=fraction)

    def clear(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = None

    def _new(self, *, with_bar: bool) -> Progress:
        from rich import progress
        from rich.table import Column

        text = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        is_plain = not self._console.encoding.startswith("utf")
        columns: list[progress.ProgressColumn] = [
            progress.SpinnerColumn("line" if is_plain else "dots"),
            progress.TextColumn("{task.description}", markup=False, table_column=text),
        ]
        if with_bar:
            columns += [
                progress.BarColumn(self._bar_columns),
                progress.TaskProgressColumn(),
                _time_left(),
            ]
        return progress.Progress(
            *columns,
            console=self._console,
            expand=True,
            transient=True,
            refresh_per_second=_REFRESHES_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
        )


def _time_left() -> TimeRemainingColumn:
    """The column of the time left, empty until the rate is worth the name."""
    from rich.progress import TimeRemainingColumn
    from rich.text import Text

    class TimeLeft(TimeRemainingColumn):
        def render(self, task: Task) -> Text:
            is_early = (task.elapsed or 0.0) < _MIN_SECONDS_FOR_RATE
            if is_early or (task.time_remaining or _MAX_LEFT_SECONDS) >= _MAX_LEFT_SECONDS:
                return Text()
            return super().render(task)

    return TimeLeft(compact=True)


def _kind_of(stage: str) -> str:
    """The beginning of a stage's text, which stays while its numbers change."""
    return re.split(r"[\d:]", stage, maxsplit=1)[0]
