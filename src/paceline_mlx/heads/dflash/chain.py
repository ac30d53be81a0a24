"""Chooses a block's draft tokens in order, each depending on the one before it; see `Chain`.

This file has DFlash 2's candidate selector and DSpark's Markov and confidence heads. They are tiny
and run in numpy, after the network has computed the block's rows. Their large tables have one row
per vocabulary token and keep the checkpoint's precision; a block reads only a few rows. Formulas:
z-lab/dflash (`CandidateSelector`) and deepseek-ai/DeepSpec (`markov_head.py`,
`AcceptRatePredictor`).
"""

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paceline.drafters.draft_sampling import DraftSampler
from paceline_mlx.heads.dflash.checkpoint import Chain
from paceline_mlx.hooks import Array as DeviceArray

Array = npt.NDArray[np.float32]


class Candidates(NamedTuple):
    """The network's outputs for the n drafts of a block, or for one of them."""

    tokens: npt.NDArray[np.int64]
    """[n, candidates], the tokens with the highest logits."""
    logits: Array
    """[n, candidates]"""
    hidden: Array
    """[n, d], outputs of the final norm."""


class ChainHead:
    def __init__(self, chain: Chain, tensors: Mapping[str, DeviceArray]) -> None:
        """Read `tensors`, whose names are those in `Chain.shapes`."""
        self._chain = chain
        self._small, self._tables = dict[str, Array](), list[DeviceArray]()
        for name, values in tensors.items():
            if name.endswith(("_codebook", "markov_w1.weight", "markov_w2.weight")):
                mx.eval(values)
                self._tables.append(values)
            else:
                self._small[name] = np.array(values.astype(mx.float32))

    def choose(
        self, rows: Candidates, token: int, position: int, sampler: DraftSampler
    ) -> tuple[list[int], list[float]]:
        """Return the drafts after `token`, which is at `position`, and their probabilities.

        Each draft is the pick of `sampler` after the one before it.
        """
        drafts: list[int] = []
        chances: list[float] = []
        state = np.zeros(self._chain.rank, np.float32)
        for at in range(len(rows.tokens)):
            row = Candidates(*(array[at] for array in rows))
            before = _rows(self._tables[0], token) if self._tables else state
            scores, state = self._scores(row, before, state)
            token, chance = sampler.pick(scores, position + 1 + at, row.tokens)
            if self._chain.confidence:
                chance = self._confidence(row.hidden, before)
            drafts.append(token)
            chances.append(chance)
        return drafts, chances

    def _scores(self, row: Candidates, before: Array, state: Array) -> tuple[Array, Array]:
        """Return the candidates' logits after the previous draft, [candidates], and RNN state."""
        kind, small, hidden = self._chain.kind, self._small, row.hidden
        if kind == "none":
            return row.logits, state
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
        return row.logits + _rows(self._tables[1], row.tokens) @ factor, state

    def _confidence(self, hidden: Array, before: Array) -> float:
        if self._chain.confidence_reads_draft:
            hidden = np.concatenate([hidden, before])
        return float(_sigmoid(_linear(self._small, "confidence_head.proj", hidden))[0])


def _rows(table: DeviceArray, tokens: int | npt.NDArray[np.int64]) -> Array:
    """Return rows of a table, read by the CPU: it shares the GPU's memory, so neither waits."""
    with mx.stream(mx.cpu):
        return np.array(table[mx.array(tokens)].astype(mx.float32))


def _linear(weights: Mapping[str, Array], name: str, values: Array) -> Array:
    return weights[f"{name}.weight"] @ values + weights[f"{name}.bias"]


def _sigmoid(values: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-values)), np.float32)
