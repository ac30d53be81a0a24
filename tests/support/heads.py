"""Forms of heads of `mtp`, opened, and the comparison with the reference."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.decoding.policy import Fixed
from paceline.decoding.stopping import Stopping
from paceline.decoding.types import ComputedBlock
from paceline.drafters import DrafterResources, create
from paceline.engines.base import Engine
from paceline_mlx.heads.mtp.cache import Rows
from paceline_mlx.heads.mtp.read import read_head
from support.dflash import ENDS
from support.driver import generation, run
from support.mtp import Chain, HeadForm, next_in_round, reference_chain, write_head
from support.networks import FromNumpy, MlxEnds

DRAFTS = 5

OWN = HeadForm(own=True, taps=(1,), kv_heads=1, rotary=0.5)
FORMS = {
    "eagle3": HeadForm(),
    "eagle3, a reduced vocabulary": HeadForm(drafted=range(5, 300, 3)),
    "eagle3, one tap, wide heads": HeadForm(taps=(1,), heads=6, kv_heads=3, theta=500.0),
    "eagle3, DeepSpec's": HeadForm(deepspec=True, theta=1_000_000.0),
    "qwen3_5": OWN,
    "qwen3_5, all rotated": replace(OWN, rotary=1.0, kv_heads=2, heads=2, epsilon=0.1),
}


@dataclass
class HeadCase:
    """A head of random weights, opened, and its expected chains."""

    form: HeadForm
    folder: Path
    weights: dict[str, np.ndarray] = field(init=False)
    head: Any = field(init=False)

    def __post_init__(self) -> None:
        from paceline_mlx.heads.mtp.network import HeadNetwork

        self.weights = write_head(self.folder, self.form)
        target: Any = MlxEnds()
        self.head = FromNumpy(HeadNetwork(read_head(self.folder, lambda: 2), target))

    @property
    def spec(self) -> str:
        return f"mtp:{self.folder}"

    def text(self, count: int, seed: int = 0) -> "Text":
        """Random hidden states of `count` tokens, and one token more."""
        rng = np.random.default_rng((seed, count))
        rows = rng.normal(size=(count, len(self.form.taps) * self.form.d)).astype(np.float32)
        return Text(rows, rng.integers(0, self.form.vocab, count + 1).tolist())

    def expected(
        self,
        text: "Text",
        drafts: int = DRAFTS,
        positions: Sequence[int] | None = None,
        chosen: Sequence[int] = (),
    ) -> Chain:
        return reference_chain(
            self.form,
            self.weights,
            ENDS,
            text.hidden,
            text.tokens[1:],
            drafts,
            positions=positions,
            chosen=chosen,
        )


class Text(NamedTuple):
    """A text that a target has computed up to its last token."""

    hidden: np.ndarray
    """[n, taps * d]"""
    tokens: list[int]
    """n + 1 tokens."""

    def rows(self, start: int = 0, end: int | None = None) -> Rows:
        """The rows from `start` to `end`."""
        hidden = self.hidden[start:end]
        return Rows(hidden, self.tokens[start + 1 : start + 1 + len(hidden)], start)

    def seen(
        self, form: HeadForm, start: int, end: int, wrong: int = 0, shift: int = 0
    ) -> ComputedBlock:
        """The block of tokens from `start` to `end`; `wrong` tokens after it were rejected."""
        hidden = np.concatenate([self.hidden[start:end], np.ones((wrong, self.hidden.shape[1]))])
        parts = np.split(hidden.astype(np.float32), len(form.taps), axis=1)
        taps = {f"tap.{tap}": part for tap, part in zip(form.taps, parts, strict=True)}
        tokens = [*self.tokens[start:end], *[7] * wrong]
        return ComputedBlock(tokens, start + shift, end - start, taps)


def assert_chain(result: tuple[Sequence[int], Sequence[float]], expected: Chain) -> None:
    """As many as both have: probabilities to 1e-3, and tokens, except after a near tie."""
    tokens, chances = result
    assert tokens
    for at, margin in enumerate(expected.margins[: len(tokens)]):
        np.testing.assert_allclose(chances[at], expected.chances[at], rtol=1e-3)
        if margin < 1e-3:
            return
        assert tokens[at] == expected.tokens[at]


LENGTH = 37
"""Tokens of the answers below."""


STARTS = ((40, 1), (83, 2), (120, 9), (161, 30))
"""First token and length of the prompts below."""


def answers_in_rounds(
    engine: Engine,
    spec: str,
    shared: DrafterResources,
    block: int,
    starts: Sequence[tuple[int, int]] = STARTS,
) -> list[Any]:
    """Answers of a target that repeats rounds of eight tokens; the test fails if one is wrong.

    The prompts have several lengths, are cut into chunks of several sizes, and share their calls.
    """
    ran = [
        generation(
            engine,
            [*range(start, start + count)],
            stopping=Stopping(max_tokens=LENGTH),
            drafters=create(spec, shared),
            policy=Fixed(block),
            prefill_chunk=1 + 3 * start % 11,
        )
        for start, count in starts
    ]
    for one, told in zip(ran, run(engine, ran), strict=True):
        expected = [next_in_round(one.tokens[-LENGTH - 1])]
        while len(expected) < LENGTH:
            expected.append(next_in_round(expected[-1]))
        assert told.tokens == expected
    return ran
