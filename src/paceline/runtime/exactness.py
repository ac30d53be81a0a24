"""Comparisons of a model's rows on this machine: the evidence for `exact` in a result.

A condition is measured when the first answer that depends on it has ended, so that no token waits
for it (before that answer for a small model), and stored for all processes. Invariant: a comparison
is used only with the engine, the model and the machine that it was made with.
"""

import contextlib
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.engines.base import Engine
from paceline.engines.exact import CONDITIONS, RowComparison, measure_invariance
from paceline.errors import CacheFull, ModelError
from paceline.models import Progress, cache_dir
from paceline.storage.files import digest_of, read_json, store_json

MEASUREMENTS = "measurements"
"""Folder in the cache for measurements of models on this machine."""

_ENDING = ".exact"

_FORM = 1
"""Version of the comparisons; other versions are ignored."""


class Exactness:
    """The comparisons of an engine with a model."""

    def __init__(self, engine: Engine, fingerprint: str, folder: Path) -> None:
        """Read earlier comparisons; `fingerprint` is that of the model's weights."""
        self._engine = engine
        self._depends = {**engine.describe(), "model": fingerprint, "form": str(_FORM)}
        self._path = folder / f"{digest_of(sorted(self._depends.items()))}{_ENDING}"
        self._compared = _read(self._path)[1]

    def comparisons(
        self,
        names: Set[str] = frozenset(CONDITIONS),
        progress: Progress | None = None,
        make_room: Callable[[], None] = lambda: None,
    ) -> Mapping[str, RowComparison] | None:
        """Return conditions -> comparison, measured now where one is missing.

        `make_room` frees the slots of idle KV. Conditions that do not fit into the free slots are
        missing; returns None without any free slot.
        """
        missing = names - self._compared.keys()
        if missing:
            make_room()  # `measure_invariance` skips conditions that do not fit
            try:
                label = "measuring whether drafts change a token, once per model"
                with progress.task(label) if progress else contextlib.nullcontext():
                    self._compared |= measure_invariance(self._engine, missing)
            except CacheFull:
                return None
            compared = {name: asdict(result) for name, result in self._compared.items()}
            store_json(self._path, {"depends_on": self._depends, "compared": compared})
        known = {name: result for name, result in self._compared.items() if name in names}
        return known if known or not names else None

    def evidence(
        self,
        names: Set[str],
        make_room: Callable[[], None],
        progress: Progress | None = None,
    ) -> Mapping[str, RowComparison] | None:
        """Return the comparisons of all conditions in `names`, or None if one is missing."""
        compared = self.comparisons(names, progress, make_room)
        return compared if compared is not None and compared.keys() == names else None

    def holds(self, evidence: Mapping[str, RowComparison] | None, length: int) -> bool:
        """Return whether the rows of `length` tokens are those of plain decoding."""
        return (
            self._engine.min_rows > 1
            and length <= self._engine.compared_keys
            and evidence is not None
            and all(compared.holds for compared in evidence.values())
        )


def stored_exactness(fingerprint: str) -> list[dict[str, Any]]:
    """Return a model's stored comparisons as JSON: one entry per engine and settings."""
    entries = []
    for path in sorted((cache_dir() / MEASUREMENTS).glob(f"*{_ENDING}")):
        depends, compared = _read(path)
        if (depends.get("model"), depends.get("form")) == (fingerprint, str(_FORM)):
            conditions = {name: result.as_dict() for name, result in compared.items()}
            entries.append({"engine": depends, "conditions": conditions})
    return entries


def _read(path: Path) -> tuple[dict[str, str], dict[str, RowComparison]]:
    """Return the conditions and comparisons of a stored file; empty if it is missing or damaged."""
    try:
        content = read_json(path)
        compared = {
            name: RowComparison(**content["compared"][name]) for name in content["compared"]
        }
        return {**content["depends_on"]}, compared
    except (ModelError, KeyError, TypeError):
        return {}, {}
