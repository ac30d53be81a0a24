"""Plots a training run: acceptance length tau and loss against trained texts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline_lab.figures import import_matplotlib

PICTURE = "curve.png"


def plot_curve(curve: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Plot a run's evaluations into `folder`; return the path."""
    done = [point["texts"] / 1e3 for point in curve]
    figure = import_matplotlib().figure.Figure(figsize=(7, 4), layout="constrained")
    left = figure.add_subplot()
    left.plot(done, [point["tau"] for point in curve], "o-", color="black", label="tau")
    left.set_xlabel("trained texts, thousands")
    left.set_ylabel("tau: tokens per target call, held-out answers")
    right = left.twinx()
    right.plot(done, [point["loss"] for point in curve], "--", color="gray", label="loss")
    right.set_ylabel("loss")
    lines = [*left.get_lines(), *right.get_lines()]
    left.legend(lines, [str(line.get_label()) for line in lines], loc="center right")
    left.grid(alpha=0.3)
    path = folder / PICTURE
    figure.savefig(path, dpi=120)
    return path
