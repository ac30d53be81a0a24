"""A trace as a picture: draft, accepted and bonus tokens of every step, and its time by part.

Invariants: hatches and outlines distinguish what colours do; the same trace gives the same bytes.
"""

from collections.abc import Sequence
from typing import Any, Literal

from paceline_lab.report.drawing import LOOKS, new_figure, pale, saved
from paceline_lab.trace.reader import RecordedTrace, TracedStep

_LEAST, _MOST, _A_STEP = 7.5, 40.0, 0.13
"""Inches: least and most width, and width per step."""

_PARTS = ("verify", "draft", "sample and text", "the rest of the host")


def picture(trace: RecordedTrace, title: str, form: Literal["png", "svg"]) -> bytes:
    """The picture, with `title` in it unless that is empty.

    Raises MissingExtra if matplotlib is not installed.
    """
    steps = trace.steps
    with new_figure() as drawn:
        width = min(max(_LEAST, 2 + _A_STEP * len(steps)), _MOST)
        drawn.set_size_inches(width, 6)
        above, below = drawn.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        _draw_tokens(steps, above)
        _draw_times(steps, below)
        below.set_xlabel("step")
        if title:
            above.set_title(title, loc="left", fontsize=9)
        return saved(drawn, form)


def sources(steps: Sequence[TracedStep]) -> list[str]:
    """Sources of accepted draft tokens, in the order of their first ones."""
    return list(dict.fromkeys(step.source for step in steps if step.stood))


def _draw_tokens(steps: Sequence[TracedStep], axes: Any) -> None:
    begin = [0] * len(steps)

    def stack(values: Sequence[int], label: str, **looks: Any) -> None:
        nonlocal begin
        axes.bar(range(1, len(steps) + 1), values, bottom=begin, width=0.8, label=label, **looks)
        begin = [a + b for a, b in zip(begin, values, strict=True)]

    # At the bottom, so that everything above it is gained by speculation.
    stack([step.bonus for step in steps], "bonus token", facecolor="0.35", edgecolor="black")
    for number, source in enumerate(sources(steps)):
        colour, _, _, hatch = LOOKS[number % len(LOOKS)]
        values = [step.stood if step.source == source else 0 for step in steps]
        stack(values, f"{source}, accepted", facecolor=pale(colour), edgecolor="black", hatch=hatch)
    stack(
        [step.rejected for step in steps],
        "rejected draft tokens",
        facecolor="white",
        edgecolor="0.5",
        linestyle=":",
    )
    axes.set_ylabel("tokens")
    axes.yaxis.get_major_locator().set_params(integer=True)
    _finish(axes)


def _draw_times(steps: Sequence[TracedStep], axes: Any) -> None:
    begin = [0.0] * len(steps)
    for number, (part, values) in enumerate(zip(_PARTS, _spent(steps), strict=True)):
        colour, _, _, hatch = LOOKS[number % len(LOOKS)]
        axes.bar(
            range(1, len(steps) + 1),
            values,
            bottom=begin,
            width=0.8,
            label=part,
            facecolor=pale(colour),
            edgecolor="black",
            linewidth=0.6,
            hatch=hatch,
        )
        begin = [a + b for a, b in zip(begin, values, strict=True)]
    axes.set_ylabel("milliseconds")
    _finish(axes)


def _spent(steps: Sequence[TracedStep]) -> list[list[float]]:
    """Milliseconds by part (`_PARTS`) and step."""
    times = [step.seconds for step in steps]
    return [
        [1e3 * seconds.verify for seconds in times],
        [1e3 * seconds.draft for seconds in times],
        [1e3 * seconds.sample for seconds in times],
        [1e3 * max(seconds.host - seconds.draft - seconds.sample, 0.0) for seconds in times],
    ]


def _finish(axes: Any) -> None:
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
