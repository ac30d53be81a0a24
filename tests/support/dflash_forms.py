"""Forms of DFlash networks, ways to show them a text, and what their answers are compared by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np

from paceline.decoding.types import ComputedBlock
from paceline.drafters.dflash import Config, Network
from paceline.models import ModelFiles
from support.dflash import (
    Drafted,
    Ends,
    ends_of,
    parts,
    reference_draft,
    tiny_config,
    write_checkpoint,
)

FIRST_TOKENS = range(0, 320, 16)
"""Of the blocks that a comparison looks at."""


class Form(NamedTuple):
    """A form of network that must compute what the paper says."""

    changes: Mapping[str, Any] = MappingProxyType({})
    draft_vocab: Sequence[int] | None = None


FORMS = {
    "one layer": Form({"num_hidden_layers": 1}),
    "two layers": Form(),
    "three layers with a window in the middle": Form(
        {"num_hidden_layers": 3, "windows": (None, 20, None)}
    ),
    "windows everywhere": Form({"windows": (40, 40)}),
    "a window shorter than a block": Form({"windows": (3, None)}),
    "a reduced vocabulary": Form({}, range(5, 300, 3)),
    "one tap": Form({"target_layer_ids": (1,)}),
    "heads wider than the hidden states": Form(
        {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
    ),
    "another block, RoPE and epsilon": Form(
        {"block_size": 16, "rope_theta": 500.0, "rms_norm_eps": 0.1}
    ),
}


@dataclass
class Stored:
    """A checkpoint of random weights, and what it should say."""

    config: Config
    folder: Path
    files: ModelFiles
    """The target's."""
    ends: Ends
    weights: dict[str, np.ndarray]
    draft_vocab: Sequence[int] | None = None

    @classmethod
    def make(
        cls,
        files: ModelFiles,
        folder: Path,
        changes: Mapping[str, Any] | None = None,
        draft_vocab: Sequence[int] | None = None,
        *,
        kind: str = "F32",
    ) -> Self:
        """Write one of a form into an empty folder."""
        config = tiny_config(files, **(changes or {}))
        weights = write_checkpoint(folder, config, kind=kind, draft_vocab=draft_vocab)
        return cls(config, folder, files, ends_of(files), weights, draft_vocab)

    def features(self, count: int, seed: int = 0) -> np.ndarray:
        rng = np.random.default_rng((seed, count))
        return rng.normal(size=(count, self.config.tapped_size)).astype(np.float32)

    def expected(
        self, features: np.ndarray, token: int, position: int | None = None, **options: Any
    ) -> Drafted:
        at = len(features) if position is None else position
        options.setdefault("draft_vocab", self.draft_vocab)
        return reference_draft(self.config, self.weights, self.ends, features, token, at, **options)


def as_features(network: Network, rows: np.ndarray, token: int) -> Any:
    return network.draft(network.new_cache(), token, len(rows), rows, 0)


def read_at_once(network: Network, rows: np.ndarray, token: int) -> Any:
    context = network.new_cache()
    network.prefill(context, rows, 0)
    return network.draft(context, token, len(rows), rows[:0], 0)


def read_in_parts(network: Network, rows: np.ndarray, token: int) -> Any:
    context = network.new_cache()
    for start, part in parts(rows, 77):
        network.prefill(context, part, start)
    return network.draft(context, token, len(rows), rows[:0], 0)


def grown_by_drafting(network: Network, rows: np.ndarray, token: int) -> Any:
    context = network.new_cache()
    # Earlier blocks add their rows, and leave nothing else behind.
    for start, part in parts(rows, 61):
        network.draft(context, 7, start + len(part), part, start)
    return network.draft(context, token, len(rows), rows[:0], 0)


WAYS = [as_features, read_at_once, read_in_parts, grown_by_drafting]
"""By which a network comes to know the same rows."""


def assert_same(found: Sequence[tuple[Sequence[int], Sequence[float]]], expected: list[Drafted]):
    """All chances are the same, and all tokens but those that were as good as drawn by lot."""
    chances = np.array([each[1] for each in found])
    np.testing.assert_allclose(chances, [each.chances for each in expected], rtol=1e-4)
    same = np.array([each[0] for each in found]) == [each.tokens for each in expected]
    assert np.all(same | (np.array([each.margins for each in expected]) < 1e-3))
    assert np.mean(same) > 0.99


def assert_close(found: Sequence[tuple[Sequence[int], Sequence[float]]], expected: list[Drafted]):
    same = np.array([each[0] for each in found]) == [each.tokens for each in expected]
    assert np.mean(same) > 0.8
    chances = np.array([each[1] for each in found]) - [each.chances for each in expected]
    assert np.mean(np.abs(chances) < 0.1) > 0.98


def seen(rows: np.ndarray, start: int, kept: int | None = None) -> ComputedBlock:
    """A step whose taps are the two halves of `rows`."""
    first, second = np.split(rows, 2, axis=1)
    return ComputedBlock(
        [1] * len(rows),
        start,
        len(rows) if kept is None else kept,
        np.zeros((0, 320), np.float32),
        {"tap.0": first, "tap.1": second},
    )
