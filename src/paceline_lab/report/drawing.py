"""Draws charts (`charts.py`) with matplotlib.

Invariants: markers also distinguish what colors do; a range is drawn if there is one; the same
chart gives the same bytes, whatever the user's matplotlib settings are.
"""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from paceline.errors import MissingExtra, pip_install
from paceline.models import cache_dir
from paceline_lab.report.charts import Chart

_WIDTH = 7.5  # inches
_LINE_LETTERS = 80
"""Letters that fit on a line below a chart; a mark is as wide as six."""

_LOOKS = tuple(
    zip(
        (
            *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"),
            *("#7f7f7f", "#332288", "#882255", "#44aa99", "#999933"),
        ),
        "os^DvPX*<>pd",
        strict=True,
    )
)
"""Color (Okabe and Ito's, then some of Tol's, both safe for the color-blind), and marker."""

_SETTINGS: Mapping[str, Any] = {
    "svg.hashsalt": "paceline",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "lines.linewidth": 1.6,
}


def picture(chart: Chart, form: Literal["png", "svg"], names: Sequence[str] = ()) -> bytes:
    """Return a chart as a picture.

    A PNG has its title; an SVG is for a page that has the title as text. A name has the same
    color and marker in all charts that get the same `names`. Raises MissingExtra if
    matplotlib is not installed.
    """
    with _new_figure() as figure:
        axes = figure.add_subplot()
        if chart.series.keys().isdisjoint(names):
            names = ()
        _draw(chart, axes, names)
        if form == "png":
            axes.set_title(chart.title)
        return _saved(figure, form)


def _saved(figure: Any, form: Literal["png", "svg"]) -> bytes:
    """Return a figure's file without date and version, so that equal figures have equal bytes."""
    file = io.BytesIO()
    metadata = {"Software": None} if form == "png" else {"Date": None, "Creator": None}
    figure.savefig(file, format=form, dpi=150, metadata=metadata)
    return file.getvalue()


@contextmanager
def _new_figure() -> Iterator[Any]:
    """Yield a figure with paceline's settings, not the user's."""
    # Store matplotlib's font cache in paceline's cache folder, not in the home folder.
    os.environ.setdefault("MPLCONFIGDIR", str(cache_dir() / "matplotlib"))
    try:
        import matplotlib.figure
    except ImportError as error:
        raise MissingExtra(f"charts need: {pip_install('lab')}") from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield matplotlib.figure.Figure(layout="constrained")


def _draw(chart: Chart, axes: Any, names: Sequence[str]) -> None:
    room = 0.8 / len(chart.series)
    height = 1.6 + len(chart.groups) * (0.22 + 0.17 * len(chart.series))
    axes.figure.set_size_inches(_WIDTH, height)
    axes.set_xlabel(chart.measure)
    if chart.line is not None:
        spreads = [spread for column in chart.series.values() for spread in column if spread]
        _log(axes, [chart.line, *(end for spread in spreads for end in spread)])
        axes.axvline(chart.line, color="black", linewidth=0.8)
    for number, (name, column) in enumerate(chart.series.items()):
        colour, marker = _look(name, names, number)
        marks = [(place, spread) for place, spread in enumerate(column) if spread is not None]
        heights = [place - 0.4 + room * (number + 0.5) for place, _ in marks]
        middle = [spread.median for _, spread in marks]
        axes.hlines(
            heights,
            [spread.min_value for _, spread in marks],
            [spread.max_value for _, spread in marks],
            color=colour,
            linewidth=1.2,
        )
        axes.plot(
            middle, heights, marker, color=colour, markeredgecolor="black", label=name, markersize=7
        )
    if chart.line is None:
        axes.set_xlim(left=0)
    for place in range(1, len(chart.groups)):
        axes.axhline(place - 0.5, color="0.85", linewidth=0.8)
    axes.set_yticks(range(len(chart.groups)), chart.groups)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(chart.groups) - 0.5, -0.5)  # the first group on top
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    _legend(axes)


def _look(name: str, names: Sequence[str], number: int) -> tuple[str, str]:
    """Return the look for the index in `names`; other names use their number after those."""
    place = names.index(name) if name in names else len(names) + number
    return _LOOKS[place % len(_LOOKS)]


def _log(axes: Any, values: Sequence[float]) -> None:
    """Make the x axis logarithmic, with round numbers as ticks."""
    axes.set_xscale("log")
    low, high = min(values), max(values)
    known = [0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64]
    ticks = [value for value in known if low * 0.8 <= value <= high * 1.25]
    axes.xaxis.set_ticks(ticks, [f"{value:g}" for value in ticks])
    axes.xaxis.minorticks_off()


def _legend(axes: Any) -> None:
    """Draw the legend below the chart, with as many columns as fit."""
    labels = axes.get_legend_handles_labels()[1]
    columns = max(_LINE_LETTERS // (max(map(len, labels)) + 6), 1)
    ncols = min(columns, len(labels))
    axes.figure.legend(loc="outside lower center", ncols=ncols, frameon=False)
