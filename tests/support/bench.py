"""`bench run` with settings that end in seconds."""

from pathlib import Path
from typing import Any

from paceline.models import QUIET
from paceline.runtime.model import Model
from paceline.storage.report import Report
from paceline.tools.bench.run.command import bench_run


def bench(model: Model, suite: Path, **options: Any) -> Report:
    """`suffix` in fixed blocks against plain decoding, one round; `options` replace that."""
    settings: dict[str, Any] = {
        "kinds": [],
        "per_kind": None,
        "drafters": ["suffix"],
        "policy": "fixed",
        "rounds": 1,
        "max_tokens": 24,
        "progress": QUIET,
    }
    return bench_run(lambda _: model, suite=suite, **{**settings, **options})
