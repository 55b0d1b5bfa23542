"""Draws a study with matplotlib, a dependency of `dev`.

Bands are the least and most of all seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from scripts.simulation.points import Curve, Spread

_DOTS_PER_INCH = 110
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")

Curves = Mapping[str, Curve]


def one_machine(groups: Mapping[str, Curves], file: Path) -> None:
    """TTFT of one worker by users: a panel for each group of curves, knees as rings."""
    figure = Figure(figsize=(11, 8), dpi=_DOTS_PER_INCH, layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True).flat
    for axes, (title, curves) in zip(panels, groups.items(), strict=True):
        for color, (name, curve) in zip(_COLORS, curves.items(), strict=False):
            _line(axes, curve, "ttft_p99", color, name)
            _line(axes, curve, "ttft_p50", color, None, style="--")
            for each in curve.points:
                if int(each.at) == curve.knee:
                    axes.plot(each.at, each.ttft_p99.median, "o", ms=10, mfc="none", mec=color)
        axes.set(title=title, yscale="log")
        _numbers(axes)
        axes.legend(frameon=False, fontsize=9)
    for axes in figure.axes[2:]:
        axes.set_xlabel("users of one worker; ring: knee of p99")
    for axes in figure.axes[::2]:
        axes.set_ylabel("TTFT, s (p99 —, p50 - -)")
    figure.savefig(file)


def caches(curves: Curves, file: Path) -> None:
    """Hit rate and TTFT p99 of one worker by users, for sizes of its prefix cache."""
    figure = Figure(figsize=(11, 4.5), dpi=_DOTS_PER_INCH, layout="constrained")
    hits, times = figure.subplots(1, 2)
    for color, (name, curve) in zip(_COLORS, curves.items(), strict=False):
        _line(hits, curve, "hit_rate", color, name)
        _line(times, curve, "ttft_p99", color, name)
    hits.set(xlabel="users of one worker", ylabel="cached share of prompt tokens", ylim=(0, 1))
    times.set(xlabel="users of one worker", ylabel="TTFT p99, s", yscale="log")
    _numbers(times)
    hits.legend(frameon=False, title="prefix cache")
    figure.savefig(file)


def fleets(curves: Curves, file: Path) -> None:
    """Hit rate, TTFT and throughput by workers, for policies of the gateway."""
    figure = Figure(figsize=(13, 4.5), dpi=_DOTS_PER_INCH, layout="constrained")
    hits, times, rates = figure.subplots(1, 3)
    for color, (name, curve) in zip(_COLORS, curves.items(), strict=False):
        _line(hits, curve, "hit_rate", color, name)
        _line(times, curve, "ttft_p99", color, f"{name}, p99")
        _line(times, curve, "ttft_p50", color, f"{name}, p50", style="--")
        _line(rates, curve, "request_rate", color, name)
    hits.set(ylabel="cached share of prompt tokens", ylim=(0, 1))
    times.set(ylabel="TTFT, s", yscale="log")
    rates.set(ylabel="requests/s", yscale="log")
    _numbers(times)
    _numbers(rates)
    for axes in (hits, times, rates):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("workers")
        _plain(axes)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(file)


def losses(curves: Curves, file: Path) -> None:
    """TTFT p99 and hit rate over time; a worker is lost at 0."""
    figure = Figure(figsize=(11, 7), dpi=_DOTS_PER_INCH, layout="constrained")
    times, hits = figure.subplots(2, 1, sharex=True)
    for color, (name, curve) in zip(_COLORS, curves.items(), strict=False):
        _line(times, curve, "ttft_p99", color, name)
        _line(hits, curve, "hit_rate", color, name)
    times.set(ylabel="TTFT p99, s", yscale="log")
    _numbers(times)
    hits.set(
        xlabel="seconds since one worker was lost (end of the window)",
        ylabel="cached share of prompt tokens",
        ylim=(0, 1),
    )
    for axes in (times, hits):
        axes.axvline(0, color="#555555", linestyle=":", linewidth=1)
    times.legend(frameon=False)
    figure.savefig(file)


def _line(
    axes: Axes, curve: Curve, figure: str, color: str, name: str | None, style: str = "-"
) -> None:
    """The medians as a line, and a band from the least to the most."""
    at = [each.at for each in curve.points]
    spreads: Sequence[Spread] = [getattr(each, figure) for each in curve.points]
    axes.plot(at, [one.median for one in spreads], style, color=color, label=name, linewidth=1.5)
    least, most = [one.least for one in spreads], [one.most for one in spreads]
    axes.fill_between(at, least, most, color=color, alpha=0.15, linewidth=0)
    axes.grid(alpha=0.25)


def _numbers(axes: Axes) -> None:
    """Numbers as one says them, on a logarithmic axis."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(
        FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    )


def _plain(axes: Axes) -> None:
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
