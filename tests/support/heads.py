"""Draft heads of all forms, opened for a target of random embeddings, and their drafts.

`tests/data/heads.npz` has drafts that were recorded from implementations of their own, in plain
numpy and float64: DFlash from its paper (arXiv 2602.06036), DFlash 2 from z-lab/dflash, DSpark from
deepseek-ai/DeepSpec, heads of `mtp` from vLLM's `llama_eagle3` and `qwen3_5_mtp`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from paceline.decoding.sampling import Sampling
from paceline.decoding.types import ComputedBlock
from paceline.drafters import DrafterResources
from paceline.drafters.draft_sampling import DraftSampler
from paceline_mlx.heads.config import Llama3Rope
from paceline_mlx.heads.dflash.checkpoint import Chain, Config, Convolution
from support.dflash import tiny_config, write_checkpoint
from support.mtp import HeadForm, write_head
from support.scripts import ROOT

DRAFTS = 5

_LLAMA3 = Llama3Rope(8.0, 1.0, 4.0, 32)

BLOCKS: dict[str, dict[str, Any]] = {
    "one layer": {"num_hidden_layers": 1},
    "two layers": {},
    "three layers with a window in the middle": {
        "num_hidden_layers": 3,
        "windows": (None, 20, None),
    },
    "windows everywhere": {"windows": (40, 40)},
    "a window shorter than a block": {"windows": (3, None)},
    "llama3 rope": {"llama3_rope": _LLAMA3},
    "one tap": {"taps": (1,)},
    "heads wider than the hidden states": {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,
    },
    "another block, RoPE and epsilon": {
        "block_size": 16,
        "rope_theta": 500.0,
        "llama3_rope": _LLAMA3,
        "rms_norm_eps": 0.1,
    },
}

CHAINED: dict[str, dict[str, Any]] = {
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
        "input_embedding_scale": 1.5,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 4.0,
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

EAGLE = HeadForm(drafted=range(5, 300, 3))
OWN = HeadForm(own=True, taps=(1,), kv_heads=1, rotary=0.5)
CHAINS = {
    "eagle3": HeadForm(),
    "eagle3, a reduced vocabulary": EAGLE,
    "eagle3, one tap, wide heads": HeadForm(taps=(1,), heads=6, kv_heads=3, theta=500.0),
    "eagle3, DeepSpec's": HeadForm(deepspec=True, theta=1_000_000.0),
    "qwen3_5": OWN,
    "qwen3_5, all rotated": replace(OWN, rotary=1.0, kv_heads=2, heads=2, epsilon=0.1),
}


class Recorded:
    def __init__(self, form: str) -> None:
        with np.load(ROOT / "tests" / "data" / "heads.npz") as arrays:
            self._arrays = {
                name.removeprefix(f"{form}/"): array
                for name, array in arrays.items()
                if name.startswith(f"{form}/")
            }

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]


GREEDY = DraftSampler(Sampling(), 0, 320)


def sampler() -> DraftSampler:
    """Return the sampler of the recorded drafts that are not the most likely ones."""
    return DraftSampler(Sampling(temperature=0.8, seed=5), 0, 320)


class Ends:
    layers = 2

    def __init__(self, dtype: str = "float32") -> None:
        import mlx.core as mx

        rng = np.random.default_rng(9)
        embeddings, head = rng.normal(size=(320, 64)) / 8, rng.normal(size=(320, 64)) / 4
        self._embeddings, self._head = (
            mx.array(end.astype(np.float32)).astype(getattr(mx, dtype))
            for end in (embeddings, head)
        )

    def embed(self, tokens: Any) -> Any:
        return self._embeddings[tokens]

    def head(self, hidden: Any) -> Any:
        return hidden @ self._head.T

    def head_of(self, tokens: Any) -> Any:
        return lambda hidden: hidden @ self._head[tokens].T


def shared() -> DrafterResources:
    return DrafterResources(engine="mlx", opened=SimpleNamespace(model=Ends()))


class Text(NamedTuple):
    hidden: np.ndarray
    """[n, taps * d]"""
    tokens: Sequence[int]

    def rows(self, start: int = 0, end: int | None = None, shift: int = 0) -> Any:
        import mlx.core as mx

        from paceline_mlx.heads.cache import NewRows

        hidden = mx.array(self.hidden[start:end])
        following = self.tokens[start + 1 : start + 1 + len(hidden)]
        return NewRows(hidden, start + shift, following)

    def seen(self, start: int, end: int, wrong: int = 0, shift: int = 0) -> ComputedBlock:
        """The block of tokens from `start` to `end`; `wrong` tokens after it were rejected."""
        hidden = np.concatenate([self.hidden[start:end], np.ones((wrong, self.hidden.shape[1]))])
        taps = np.split(hidden.astype(np.float32), self.hidden.shape[1] // 64, axis=1)
        numbers = (0, 1) if len(taps) == 2 else (1,)
        tokens = [*self.tokens[start:end], *[7] * wrong]
        named = {f"tap.{number}": tap for number, tap in zip(numbers, taps, strict=True)}
        return ComputedBlock(tokens, start + shift, end - start, named)


Drafted = tuple[Sequence[int], Sequence[float]]


@dataclass
class Head:
    kind: str
    folder: Path
    config: Any

    @classmethod
    def block(cls, folder: Path, changes: dict[str, Any] | None = None, **written: Any) -> "Head":
        config: Config = tiny_config(**(changes or {}))
        write_checkpoint(folder, config, **{"kind": "F32", **written})
        return cls("dflash", folder, config)

    @classmethod
    def chain(cls, folder: Path, form: HeadForm) -> "Head":
        write_head(folder, form)
        return cls("mtp", folder, SimpleNamespace(tapped_size=64 * len(form.taps)))

    @property
    def spec(self) -> str:
        return f"{self.kind}:{self.folder}"

    @cached_property
    def network(self) -> Any:
        return self.opened()

    def opened(self, dtype: str = "float32", **options: Any) -> Any:
        from paceline_mlx.heads.dflash.network import Network
        from paceline_mlx.heads.mtp.network import ChainNetwork

        target: Any = Ends(dtype)
        if self.kind == "dflash":
            return Network(self.folder, target, **options)
        return ChainNetwork(self.folder, target, length=DRAFTS, **options)

    def text(self, count: int, seed: int = 0) -> Text:
        rng = np.random.default_rng((seed, count))
        rows = rng.normal(size=(count, self.config.tapped_size)).astype(np.float32)
        return Text(rows, rng.integers(0, 320, count + 1).tolist())

    def drafted(self, *parts: Any, token: int, cache: Any = None, **options: Any) -> Drafted:
        """Return the network's draft after rows, and `token` at the next position.

        All but the last of the `parts` are prefilled.
        """
        network, options = self.network, {"sampler": GREEDY, **options}
        cache = network.new_cache() if cache is None else cache
        for part in parts[:-1]:
            network.prefill(cache, part)
        if self.kind == "mtp":
            tokens, chances = network.draft(cache, parts[-1], DRAFTS, 0.0, **options)
        else:
            rows = parts[-1] if parts and len(parts[-1].tapped) else None
            position = rows.start + len(rows.tapped) if rows else len(cache)
            tokens, chances = network.draft(cache, token, position, rows, **options)
        return list(tokens), list(chances)


def assert_same(drafted: Drafted, expected: Drafted) -> None:
    assert list(drafted[0]) == list(expected[0])
    np.testing.assert_allclose(list(drafted[1]), list(expected[1]), rtol=1e-3)
