"""Forms of DFlash checkpoints, opened, and the comparison with the reference."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from paceline.decoding.types import ComputedBlock
from paceline.drafters import DrafterResources
from paceline_mlx.heads.config import Llama3Rope
from paceline_mlx.heads.dflash.checkpoint import Chain, Config, Convolution
from support.dflash import (
    ENDS,
    Drafted,
    Ends,
    parts,
    reference_draft,
    tiny_config,
    write_checkpoint,
)

FIRST_TOKENS = range(0, 320, 16)
"""First tokens of the blocks that a test compares."""


FORMS: dict[str, dict[str, Any]] = {
    "one layer": {"num_hidden_layers": 1},
    "two layers": {},
    "three layers with a window in the middle": {
        "num_hidden_layers": 3,
        "windows": (None, 20, None),
    },
    "windows everywhere": {"windows": (40, 40)},
    "a window shorter than a block": {"windows": (3, None)},
    "llama3 rope": {"llama3_rope": Llama3Rope(8.0, 1.0, 4.0, 32)},
    "one tap": {"target_layer_ids": (1,)},
    "heads wider than the hidden states": {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,
    },
    "another block, RoPE and epsilon": {
        "block_size": 16,
        "rope_theta": 500.0,
        "llama3_rope": Llama3Rope(8.0, 1.0, 4.0, 32),
        "rms_norm_eps": 0.1,
    },
}
"""Forms of checkpoints that the network must run as the paper says, in changes to a config."""

CHAINED = {
    "dflash 2": {
        "windows": (40, 40),
        "causal": False,
        "convolution": Convolution(2, 16),
        "chain": Chain("selector", 8, 16),
    },
    "dflash 2, causal, three taps, scaled": {
        "causal": True,
        "convolution": Convolution(3, 8),
        "chain": Chain("selector", 4, 5),
        "embedding_scale": 1.5,
        "logit_scale": 0.5,
        "logit_cap": 4.0,
    },
    **{
        f"dspark, {name}": {"first_drafted": 0, "causal": False, "chain": chain}
        for name, chain in {
            "vanilla": Chain("vanilla", 8, 256, confidence=True, confidence_reads_draft=True),
            "gated": Chain("gated", 8, 256),
            "rnn": Chain("rnn", 8, 256, confidence=True),
            "no Markov head": Chain("none", 0, 256, confidence=True),
            "no head": None,
        }.items()
    },
}
"""Forms that others publish, in changes to a config; tested in `test_dflash_forms.py`."""


class MlxEnds:
    """Embeddings and head of a target in MLX, in place of a `LoadedModel`."""

    layers = 2

    def __init__(self, ends: Ends = ENDS, dtype: str = "float32") -> None:
        import mlx.core as mx

        self._embeddings, self._head = (
            mx.array(end.astype(np.float32)).astype(getattr(mx, dtype)) for end in ends
        )

    def embed(self, tokens: Any) -> Any:
        return self._embeddings[tokens]

    def head(self, hidden: Any) -> Any:
        return hidden @ self._head.T

    def head_of(self, tokens: Any) -> Any:
        return lambda hidden: hidden @ self._head[tokens].T


class FromNumpy:
    """A network or head that takes hidden states as numpy arrays, too."""

    def __init__(self, network: Any) -> None:
        self._network = network

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._network, name)
        if name not in ("prefill", "draft"):
            return member
        return lambda *arguments, **options: member(*map(_on_device, arguments), **options)


def _on_device(argument: Any) -> Any:
    import mlx.core as mx

    from paceline_mlx.heads.mtp.cache import Rows

    if isinstance(argument, Rows):
        return argument._replace(tapped=mx.array(argument.tapped))
    return mx.array(argument) if isinstance(argument, np.ndarray) else argument


def shared() -> DrafterResources:
    """What drafters for `ENDS` share."""
    return DrafterResources(engine="mlx", opened=SimpleNamespace(model=MlxEnds()))


@dataclass
class Case:
    """A checkpoint of random weights, and its expected drafts."""

    config: Config
    folder: Path
    weights: dict[str, np.ndarray]
    _expected: dict[Any, Drafted] = field(default_factory=dict, init=False)

    @classmethod
    def make(
        cls,
        folder: Path,
        changes: Mapping[str, Any] | None = None,
        *,
        kind: str = "F32",
    ) -> Self:
        """Write a checkpoint of a form into an empty folder."""
        config = tiny_config(**(changes or {}))
        weights = write_checkpoint(folder, config, kind=kind)
        return cls(config, folder, weights)

    @cached_property
    def network(self) -> Any:
        return self.opened()

    @property
    def spec(self) -> str:
        return f"dflash:{self.folder}"

    def opened(self, folder: Path | None = None, **options: Any) -> Any:
        from paceline_mlx.heads.dflash.network import Network

        target: Any = MlxEnds()
        return FromNumpy(Network(folder or self.folder, target, **options))

    def tapped(self, count: int, seed: int = 0) -> np.ndarray:
        """Random hidden states, [count, taps * d]."""
        rng = np.random.default_rng((seed, count))
        return rng.normal(size=(count, self.config.tapped_size)).astype(np.float32)

    def expected(
        self, tapped: np.ndarray, token: int, position: int | None = None, **options: Any
    ) -> Drafted:
        at = len(tapped) if position is None else position
        key = (tapped.tobytes(), token, at, *map(repr, options.values()))
        if key not in self._expected:
            self._expected[key] = reference_draft(
                self.config, self.weights, ENDS, tapped, token, at, **options
            )
        return self._expected[key]


MakeCase = Callable[..., Case]
"""Arguments as of `Case.make` without the folder."""


def without_prefill(network: Any, rows: np.ndarray, token: int) -> Any:
    return network.draft(network.new_cache(), token, len(rows), rows, 0)


def prefilled(network: Any, rows: np.ndarray, token: int) -> Any:
    cache = network.new_cache()
    network.prefill(cache, rows, 0)
    return network.draft(cache, token, len(rows), rows[:0], 0)


def prefilled_in_chunks(network: Any, rows: np.ndarray, token: int) -> Any:
    cache = network.new_cache()
    for start, part in parts(rows, 77):
        network.prefill(cache, part, start)
    return network.draft(cache, token, len(rows), rows[:0], 0)


def grown_by_drafting(network: Any, rows: np.ndarray, token: int) -> Any:
    cache = network.new_cache()
    # A draft appends its context rows to the cache, and none of its block.
    for start, part in parts(rows, 61):
        network.draft(cache, 7, start + len(part), part, start)
    return network.draft(cache, token, len(rows), rows[:0], 0)


WAYS = [without_prefill, prefilled, prefilled_in_chunks, grown_by_drafting]
"""Ways to fill a cache with the same rows."""


def assert_same(result: Sequence[tuple[Sequence[int], Sequence[float]]], expected: list[Drafted]):
    """All probabilities are equal, and all tokens except near ties."""
    chances = np.array([item[1] for item in result])
    np.testing.assert_allclose(chances, [item.chances for item in expected], rtol=1e-4)
    same = np.array([item[0] for item in result]) == [item.tokens for item in expected]
    assert np.all(same | (np.array([item.margins for item in expected]) < 1e-3))
    assert np.mean(same) > 0.99


def assert_close(result: Sequence[tuple[Sequence[int], Sequence[float]]], expected: list[Drafted]):
    same = np.array([item[0] for item in result]) == [item.tokens for item in expected]
    assert np.mean(same) > 0.8
    chances = np.array([item[1] for item in result]) - [item.chances for item in expected]
    assert np.mean(np.abs(chances) < 0.1) > 0.98


def seen(rows: np.ndarray, start: int, kept: int | None = None) -> ComputedBlock:
    """A computed block whose two taps are the halves of `rows`."""
    first, second = np.split(rows, 2, axis=1)
    return ComputedBlock(
        [1] * len(rows),
        start,
        len(rows) if kept is None else kept,
        {"tap.0": first, "tap.1": second},
    )
