"""Writes the folder of a table that was counted from the target's answers."""

from pathlib import Path
from typing import Any

import numpy as np

import paceline
from paceline.drafters.table import COLUMNS, KIND, halves
from paceline.drafters.table_counts import Entries
from paceline.storage.files import writing
from paceline.storage.manifest import begin_artifact, write_manifest


def write_table(
    entries: Entries, folder: Path, *, target: str, vocab_size: int, facts: dict[str, Any]
) -> None:
    """Write a table's folder; `facts` go into its manifest."""
    begin_artifact(folder, KIND)
    about = {
        "made_by": f"paceline {paceline.__version__}",
        "target": target,
        "vocab_size": vocab_size,
        "entries": len(entries.keys),
        **facts,
    }
    columns = entries.columns(vocab_size)
    with writing(folder):
        # A running process may have the old files mapped: replace them, never write into them.
        for name, column in zip(COLUMNS, columns._replace(keys=halves(columns.keys)), strict=True):
            np.save(folder / f".{name}", column)
            (folder / f".{name}").replace(folder / name)
        write_manifest(folder, KIND, about, COLUMNS)
