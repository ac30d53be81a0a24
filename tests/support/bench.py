"""`bench run` with settings for runs of a few seconds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.runtime.model import Model
from paceline.storage.report import Report
from paceline_lab.cli.options import MeasurementArguments
from paceline_lab.cli.run import run
from support.reports import report_of

_SUITE = [
    ("one", "chat", "Hello"),
    ("two", "code", "this is one and the user, this is one and the user"),
    ("three", "chat", "2 + 2 = 12"),
]
"""Id, kind and content of prompts."""


def bench(
    model: Model, suite: Path, *, load: Callable[..., Model] | None = None, **options: Any
) -> Report:
    """`suffix` in fixed blocks against plain decoding, one round; `options` replace that."""
    measured = {"suite": suite, "rounds": 1, "max_tokens": 24}
    for name in options.keys() & {*measured, "limit", "output"}:
        measured[name] = options.pop(name)
    settings = {"drafter": ["suffix"], "policy": "fixed", **options}
    measurement = MeasurementArguments(**measured)
    return report_of(run, load or (lambda *_, **__: model), measurement=measurement, **settings)


def write_suite(path: Path) -> Path:
    """A suite of three prompts of two kinds."""
    lines = [
        json.dumps({"id": name, "kind": kind, "messages": [{"role": "user", "content": content}]})
        for name, kind, content in _SUITE
    ]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return path
