"""Packages that tests need in addition to the extra `test`; tests are skipped without them."""

import re
from collections.abc import Container, Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

NEEDED: Mapping[str, tuple[str, ...]] = {
    "mlx": ("mlx_lm", "torch", "transformers"),
    "coreml": ("coremltools", "torch", "transformers"),
    "ik_llama.cpp": ("ik_llama_cpp",),
    "llama.cpp": ("xllamacpp",),
}
MARKS: Mapping[str, Any] = {"mlx": pytest.mark.mlx, "coreml": pytest.mark.coreml}

MARKED = "reference or coreml or mlx"
"""The expression that CI gives to `-m` where all packages are installed."""


@cache
def may_be_marked(path: Path) -> bool:
    """False for a file of tests without a marker of `MARKED`, as far as its text tells."""
    # In conformance/ the fixtures bring them.
    names = r"mark\.(reference|coreml|mlx)\b|support\.packages import"
    return "conformance" in path.parts or bool(re.search(names, path.read_text("utf-8")))


def missing(name: str) -> list[str]:
    """Modules that are not installed; none for a name that is not in `NEEDED`."""
    return [module for module in NEEDED.get(name, ()) if find_spec(module) is None]


def params(
    names: Iterable[str], needs: Mapping[str, str] | None = None, slow: Container[str] = ()
) -> list[Any]:
    """Marked parameters, without those whose packages are missing.

    Thousands of skips would take minutes; `test_engines.py` has one for each of `NEEDED`.
    `needs`: parameter -> its name in `NEEDED`, if different.
    """
    marked = []
    for name in names:
        kind = (needs or {}).get(name, name)
        if not missing(kind):
            marks = [MARKS[kind]] if kind in MARKS else []
            marks += [pytest.mark.slow] if name in slow else []
            marked.append(pytest.param(name, marks=marks))
    return marked
