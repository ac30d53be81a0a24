"""A converted layer, as a package for the rehearsal, and calls of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline_coreml.engine.inputs import CallInputs
from support.coreml import tiny_llama

D, HEAD, SLOTS, ROWS = 64, 16, 24, 4
STATES = ("layers_0_mix_attention_k_state", "layers_0_mix_attention_v_state")


def family(folder: Path) -> Any:
    """A Llama of one layer."""
    from paceline_coreml.conversion.families import open_family

    return open_family(tiny_llama(folder, num_hidden_layers=1), slots=SLOTS, conv_slots=ROWS)


def converted(family: Any) -> Any:
    """Its layer as coremltools converts it, for 1 to ROWS rows."""
    from paceline_coreml.conversion.shards import ShardSizes, convert_layers

    return convert_layers(family, 0, 1, sizes=ShardSizes(ROWS, SLOTS, ROWS))


def hidden() -> np.ndarray:
    """[SLOTS, D]: the rows of a text."""
    return half(np.random.default_rng(0).normal(size=(SLOTS, D)))


def call(rows: Sequence[int]) -> dict[str, np.ndarray]:
    """The inputs for consecutive rows of a text."""
    count = len(rows)
    angles = np.arange(SLOTS)[:, None] * 10_000.0 ** (-np.arange(0, HEAD, 2) / HEAD)
    tables = (table.astype(np.float32) for table in (np.cos(angles), np.sin(angles)))
    block = hidden()[list(rows)].T[None, :, :, None]
    inputs = CallInputs(count, *tables).for_rows(rows[0], count)
    return {"hidden": block, **{name: array.copy() for name, array in inputs.items()}}


def half(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float16).astype(np.float32)
