"""A frame of `top` as tables for a terminal."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vlm_server.cli.client.answer import STATE_WORDS
from vlm_server.cli.text import printable
from vlm_server.cli.top.fitting import Column, fitted_table, fitting
from vlm_server.cli.top.frame import LATENCIES, Frame, LiveFrame, ModelFrame
from vlm_server.sizes import memory_size

_BLOCKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_BAR_COLUMNS = 12
_RATES = 24
_KEYS = "q leaves \u00b7 p pauses \u00b7 m another model's times"
_MEMORY = {
    "weights_bytes": ("weights", "blue"),
    "kv_bytes": ("requests", "green"),
    "caches_bytes": ("caches", "cyan"),
    "pool_bytes": ("freed", "white"),
}
"""Parts of a model's memory: what they are called, and their colours."""
_FULL, _CLOSE = 0.95, 0.8
"""Parts of a limit from which a bar is red, and yellow."""
_FIXED_ROWS, _HEAD_ROWS = 5, 2
"""Rows above and below the tables, and those that each table takes besides its own."""
_MIN_ROWS_FOR_TIMES = 10
_WIDE_COLUMNS = 100
"""Columns from which models have a bar."""
_LATENCY_WORDS = dict(
    zip(LATENCIES, ("first token", "between tokens", "in the queue", "whole answer"), strict=True)
)
_PERCENTILES = ("p50", "p90", "p99", "max")
_MODEL_COLUMNS = (
    Column("MODEL", shortest=12),
    Column("STATE", shortest=9),
    Column("", 5),
    Column("MEMORY", 1),
    Column("WRITTEN/S", 2, is_right=True),
    Column("READ/S", 4, is_right=True),
    Column("REQUESTS", 3, is_right=True),
    Column("CACHED", 4, is_right=True),
)
_LIVE_COLUMNS = (
    Column("NOW", shortest=12),
    Column("WHO", 5, shortest=6),
    Column("MODEL", 3, shortest=10),
    Column("", 7),
    Column("TOKENS", 1, is_right=True),
    Column("RATE", 4, is_right=True),
    Column("WITH", 6, shortest=10),
    Column("AGE", 2, is_right=True),
)
_TIME_COLUMNS = (
    Column("TIMES", shortest=14),
    *(
        Column(one.upper(), rank, is_right=True)
        for one, rank in zip(_PERCENTILES, (0, 3, 2, 1), strict=True)
    ),
    Column("OF", 4, is_right=True),
)
_ENDED_COLUMNS = (
    Column("ENDED"),
    Column("WHO", 5, shortest=6),
    Column("MODEL", 3, shortest=10),
    Column("READ", 6, is_right=True),
    Column("WRITTEN", 2, is_right=True),
    Column("FIRST TOKEN", 4, is_right=True),
    Column("WHOLE", 1, is_right=True),
    Column("END", shortest=10),
)


class Screen:
    """Draws frames; `shown` counts the models whose times were asked for by a key."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque([0.0] * _RATES, maxlen=_RATES)
        self.shown = 0
        self.note = ""

    def take_rate(self, frame: Frame) -> None:
        """Add the frame's rate to the course."""
        self._rates.append(frame.tokens_per_second or 0.0)

    def draw(self, frame: Frame, columns: int, rows: int | None = None) -> RenderableType:
        """The frame; in `rows`, if that is known: the times are left out first."""
        names = _short_names(frame)
        head, models = self._head(frame, columns), _models(frame.models, names, columns)
        parts: list[RenderableType] = [head, Text(), models]
        loaded = [model for model in frame.models if model.latencies]
        num_live, num_ended = max(1, len(frame.live)), len(frame.ended)
        if rows is not None:
            room = rows - _FIXED_ROWS - len(frame.models) - 2 * _HEAD_ROWS
            num_live = min(num_live, max(2, room // 2))
            room -= num_live
            if room < _MIN_ROWS_FOR_TIMES:
                loaded = []
            times = _HEAD_ROWS + len(_LATENCY_WORDS) if loaded else 0
            num_ended = max(1, room - times)
        parts += [Text(), _live(frame.live, names, num_live, columns)]
        if loaded:
            model = loaded[self.shown % len(loaded)]
            name = names[model.name] if len(loaded) > 1 else ""
            parts += [Text(), _latencies(model, name, columns)]
        parts += [Text(), _ended(frame.ended[:num_ended], names, frame.time, columns)]
        return Group(*parts, *(() if rows is None else (Text(), self._foot(columns))))

    def _head(self, frame: Frame, columns: int) -> Text:
        written, read = map(_number, (frame.tokens_per_second, frame.read_per_second))
        parts = (
            (frame.url.removesuffix("/v1"), "bold", 0),
            (f"   {frame.in_flight} of {frame.limit} requests", "", 1),
            (f", {frame.waiting} waiting", "yellow" if frame.waiting else "", 3),
            (f"   {written} tokens/s", "", 2),
            (" written", "", 4),
            (f", {read} read", "", 5),
            (f"  {_course(self._rates)}", "green", 6),
        )
        widths, ranks = [len(text) for text, _, _ in parts], [rank for _, _, rank in parts]
        shown = (parts[place][:2] for place in fitting(widths, ranks, columns))
        return Text.assemble(*shown, no_wrap=True, overflow="ellipsis")

    def _foot(self, columns: int) -> Text:
        if self.note:
            return Text(self.note, "bold red", no_wrap=True, overflow="ellipsis")
        foot = Text(_KEYS, "dim", no_wrap=True, overflow="ellipsis")
        for noun, style in _MEMORY.values() if columns >= _WIDE_COLUMNS else ():
            foot.append("   \u2588 ", style).append(noun, "dim")
        return foot


def _models(models: Sequence[ModelFrame], names: Mapping[str, str], columns: int) -> Table:
    rows = []
    for model in models:
        part = model.memory_bytes / model.limit_bytes if model.limit_bytes else None
        of = f"{memory_size(model.memory_bytes)} of {memory_size(model.limit_bytes)}"
        row = (
            _plain(names[model.name]),
            _state(model),
            Text() if part is None or columns < _WIDE_COLUMNS else _memory_bar(model, part),
            of if part is not None else "",
            _number(model.written_per_second),
            _number(model.read_per_second),
            f"{model.requests}" + (f" ({model.waiting} wait)" if model.waiting else ""),
            "-" if model.cached_share is None else f"{model.cached_share:.0%}",
        )
        rows.append(row)
    return fitted_table(_MODEL_COLUMNS, rows, columns)


def _live(
    live: Sequence[LiveFrame], names: Mapping[str, str], num_rows: int, columns: int
) -> Table:
    rows: list[Sequence[str | Text]] = []
    shown = live if len(live) <= num_rows else live[: num_rows - 1]
    for one in shown:
        row = (
            Text(STATE_WORDS.get(one.state, one.state), _style_of(one.state)),
            _plain(one.key or "-"),
            _plain(names[one.model] if one.model else "-"),
            _bar(one.done / one.total) if one.total else Text(),
            f"{one.done:,} of {one.total:,}" if one.total else "",
            "" if one.tokens_per_second is None else f"{_number(one.tokens_per_second)}/s",
            _media(one.images, one.videos, one.pages),
            _seconds(one.seconds),
        )
        rows.append(row)
    if len(shown) < len(live):
        rows.append((Text(f"and {len(live) - len(shown)} more", "dim"),))
    if not live:
        rows.append((Text("nothing is asked", "dim"),))
    return fitted_table(_LIVE_COLUMNS, rows, columns)


def _latencies(model: ModelFrame, name: str, columns: int) -> Table:
    """`name` is the model's where others have times, too."""
    rows = []
    for key, words in _LATENCY_WORDS.items():
        if told := model.latencies.get(key):
            values = [_seconds(told.get(one)) for one in _PERCENTILES]
            rows.append((words, *values, f"{told.get('count', 0):,.0f}"))
    first, *others = _TIME_COLUMNS
    if name:
        first = first._replace(head=f"TIMES OF {_plain(name)}")
    return fitted_table((first, *others), rows, columns)


def _ended(
    ended: Sequence[dict[str, Any]], names: Mapping[str, str], now: float, columns: int
) -> Table:
    rows: list[Sequence[str | Text]] = []
    for one in ended:
        end = one["error"] or one["finish"] or str(one["status"])
        is_good = not one["error"] and one["status"] < 400
        row = (
            f"{_seconds(float(max(1, round(now - one['ended_at']))), decimals=0)} ago",
            _plain(one["key"] or "-"),
            _plain(names[one["model"]] if one["model"] else "-"),
            f"{one['prompt_tokens']:,}",
            f"{one['tokens']:,}",
            _seconds(one["first_token_seconds"]),
            _seconds(one["seconds"]),
            Text(printable(end), "" if is_good else "red"),
        )
        rows.append(row)
    if not ended:
        rows.append((Text("none yet", "dim"),))
    return fitted_table(_ENDED_COLUMNS, rows, columns)


def _bar(part: float) -> Text:
    part = min(1.0, max(0.0, part))
    filled = round(part * _BAR_COLUMNS)
    style = "red" if part > _FULL else "yellow" if part > _CLOSE else "green"
    return Text.assemble(("\u2588" * filled, style), ("\u2591" * (_BAR_COLUMNS - filled), "dim"))


def _memory_bar(model: ModelFrame, part: float) -> Text:
    """What a model's memory is used for, in parts of its limit; red close to the limit."""
    if not model.memory or part > _FULL:
        return _bar(part)
    bar, used_bytes = Text(), 0
    for name, (_, style) in _MEMORY.items():
        used_bytes += model.memory[name]
        edge = round(min(1.0, used_bytes / model.limit_bytes) * _BAR_COLUMNS)
        bar.append("\u2588" * (edge - len(bar)), style)
    return bar.append("\u2591" * (_BAR_COLUMNS - len(bar)), "dim")


def _course(rates: Sequence[float]) -> str:
    """The last rates, as columns as high as they are, compared with the highest."""
    highest = max(rates) or 1.0
    return "".join(_BLOCKS[round(rate / highest * (len(_BLOCKS) - 1))] for rate in rates)


def _state(model: ModelFrame) -> Text:
    style = {"ready": "green", "unloaded": "dim"}.get(model.state, "yellow")
    progress = model.progress
    text = f"{progress['fraction']:.0%} {progress['stage']}" if progress else model.state
    return Text(printable(text), style if "fail" not in model.state else "red")


def _short_names(frame: Frame) -> dict[str, str]:
    """The models' names without their organizations, but where several would be the same."""
    names = {model.name for model in frame.models} | {one.model for one in frame.live}
    names |= {one["model"] for one in frame.ended}
    short = {name: name.rpartition("/")[2] for name in names if name}
    counts = Counter(short.values())
    return {name: last if counts[last] == 1 else name for name, last in short.items()}


def _style_of(state: str) -> str:
    return "green" if state == "decode" else "yellow" if "wait" in state else "cyan"


def _media(images: int, videos: int, pages: int) -> str:
    counts = ((images, "picture"), (videos, "video"), (pages, "page"))
    return ", ".join(f"{count} {noun}{'s' if count > 1 else ''}" for count, noun in counts if count)


def _plain(text: str) -> Text:
    return Text(printable(text))


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _seconds(seconds: float | None, *, decimals: int = 1) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.{decimals}f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
