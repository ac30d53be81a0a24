"""`bench run` with settings that end in seconds."""

import json
from pathlib import Path
from typing import Any

from paceline.models import QUIET
from paceline.runtime.model import Model
from paceline.storage.report import Report
from paceline_lab.bench.run import bench_run

_SUITE = [
    ("one", "chat", "Hello"),
    ("two", "code", "this is one and the user, this is one and the user"),
    ("three", "chat", "2 + 2 = 12"),
]
"""Id, kind and content of prompts."""


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
    return bench_run(lambda _: model, **settings)


def write_suite(path: Path) -> Path:
    """A suite of three prompts of two kinds."""
    lines = [
        json.dumps({"id": name, "kind": kind, "messages": [{"role": "user", "content": content}]})
        for name, kind, content in _SUITE
    ]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return path
