"""Return the report of a command for a loaded model."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from paceline.cli.options import ModelOptions, Output
from paceline.models import QUIET, Progress
from paceline.storage.report import Report


def report_of(
    command: Callable[..., int],
    load: Callable[..., Any],
    *,
    progress: Progress = QUIET,
    **options: Any,
) -> Report:
    """Return the report that a command prints; it gets its model from `load`."""
    reports: list[Report] = []

    def collect(report: Report, *_: Any, **__: Any) -> int:
        reports.append(report)
        return 0

    module = sys.modules[command.__module__]
    replaced = {"load_model": load, "print_report": collect}
    replaced |= dict.fromkeys(("measuring", "progress_of"), lambda _: progress)
    with pytest.MonkeyPatch.context() as patch:
        for name in replaced.keys() & vars(module):
            patch.setattr(module, name, replaced[name])
        command(**{"model": ModelOptions("any"), "output": Output(), **options})
    return reports[0]
