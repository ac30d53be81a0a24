"""`bench run` with settings that end in seconds."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.bench.measurement import Measurement
from paceline.bench.run.command import bench_run
from paceline.models import QUIET
from paceline.runtime.model import Model
from paceline.storage.report import Report
from paceline_lab.arguments import Contenders


def measurement_of(settings: dict[str, Any]) -> Measurement:
    """The measurement that settings have, which are left with the rest."""
    names = {field.name for field in fields(Measurement)} & settings.keys()
    return Measurement(**{name: settings.pop(name) for name in names})


def contenders_of(settings: dict[str, Any]) -> Contenders:
    return Contenders(**{field.name: settings.pop(field.name) for field in fields(Contenders)})


def bench(model: Model, suite: Path, **options: Any) -> Report:
    """`suffix` in fixed blocks against plain decoding, one round; `options` replace that."""
    settings: dict[str, Any] = {
        "suite": suite,
        "drafters": ["suffix"],
        "policy": "fixed",
        "rounds": 1,
        "max_tokens": 24,
        "progress": QUIET,
        **options,
    }
    return bench_run(lambda _: model, measurement_of(settings), **settings)
