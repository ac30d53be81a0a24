"""Chooses the drafts of a block one after another, each by the one before it; see `Chain`.

DFlash 2's candidate selector and DSpark's Markov and confidence heads, which are tiny: after the
network has computed the rows of a block, they run here, in numpy, for every runtime alike. Their
large tables have a row per token of the vocabulary, of which a block reads a few; they stay in
their file. Formulas: z-lab/dflash (`CandidateSelector`) and deepseek-ai/DeepSpec
(`markov_head.py`, `AcceptRatePredictor`).
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.decoding.draft_sampling import DraftSampler
from paceline.drafters.dflash.checkpoint import Chain, Config
from paceline.drafters.networks.tensors import Array, StoredTensor


class Rows(NamedTuple):
    """What the network computes for the n drafts of a block."""

    tokens: npt.NDArray[np.int64]
    """[n, candidates], the tokens with the highest logits."""
    logits: Array
    """[n, candidates]"""
    hidden: Array
    """[n, d], outputs of the last norm."""


class ChainHead:
    """The heads of one checkpoint."""

    @classmethod
    def of(cls, config: Config, tensors: Mapping[str, StoredTensor]) -> "ChainHead | None":
        """The heads of a checkpoint; None: it drafts the tokens of a block independently."""
        return None if config.chain is None else cls(config.chain, tensors)

    def __init__(self, chain: Chain, tensors: Mapping[str, StoredTensor]) -> None:
        """Map the tables and read the matrices of `tensors`, as `read_tensors` finds them."""
        self._chain = chain
        self._small = {name: tensor.floats() for name, tensor in tensors.items() if _is_small(name)}
        tables = [tensor.rows() for name, tensor in tensors.items() if not _is_small(name)]
        self._before: Callable[[int], Array] | None = None
        self._after: Callable[[npt.NDArray[np.int64]], Array] | None = None
        if tables:
            self._before, self._after = tables

    def choose(
        self, rows: Rows, token: int, position: int, sampler: DraftSampler | None = None
    ) -> tuple[list[int], list[float]]:
        """The drafts after `token`, which is at `position`, and their probabilities.

        A draft is the likeliest after the one before it, or the pick of `sampler`.
        """
        drafts: list[int] = []
        chances: list[float] = []
        state = np.zeros(self._chain.rank, np.float32)
        for at, (tokens, logits, hidden) in enumerate(zip(*rows, strict=True)):
            before = self._before(token) if self._before is not None else state
            scores, state = self._scores(tokens, logits, hidden, before, state)
            if sampler is not None:
                token, chance = sampler.pick(scores, position + 1 + at, tokens)
            else:
                best = int(scores.argmax())
                token = int(tokens[best])
                chance = float(1 / np.exp(scores - scores[best]).sum())
            drafts.append(token)
            chances.append(self._confidence(hidden, before) if self._chain.confidence else chance)
        return drafts, chances

    def _scores(
        self,
        tokens: npt.NDArray[np.int64],
        logits: Array,
        hidden: Array,
        before: Array,
        state: Array,
    ) -> tuple[Array, Array]:
        """Logits of the candidates [candidates] after the draft before, and the cell's state."""
        kind, small = self._chain.kind, self._small
        if kind == "none" or self._after is None:
            return logits, state
        if kind == "selector":
            factor = before * (small["candidate_selector.hidden_projection.weight"] @ hidden)
        elif kind == "vanilla":
            factor = before
        elif kind == "gated":
            gate = _linear(small, "markov_head.gate_proj", np.concatenate([hidden, before]))
            factor = _sigmoid(gate) * before
        else:
            joint = np.concatenate([state, before, hidden])
            gate, new, out = np.split(_linear(small, "markov_head.joint_proj", joint), 3)
            state = _sigmoid(gate) * state + (1 - _sigmoid(gate)) * np.tanh(new)
            factor = np.tanh(out)
        return logits + self._after(tokens) @ factor, state

    def _confidence(self, hidden: Array, before: Array) -> float:
        """The chance that a draft is accepted if those before it are."""
        if self._chain.confidence_reads_draft:
            hidden = np.concatenate([hidden, before])
        return float(_sigmoid(_linear(self._small, "confidence_head.proj", hidden))[0])


def _is_small(name: str) -> bool:
    """False for a table, which has a row per token of the vocabulary."""
    return not name.endswith(("_codebook", "markov_w1.weight", "markov_w2.weight"))


def _linear(weights: Mapping[str, Array], name: str, values: Array) -> Array:
    return weights[f"{name}.weight"] @ values + weights[f"{name}.bias"]


def _sigmoid(values: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-values)), np.float32)
