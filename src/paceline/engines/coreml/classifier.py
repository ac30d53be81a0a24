"""Runs a Core ML artifact that classifies tokens: of each token of a text, one score a label.

Knows shards, rows and masks; knows no words, and not what a label means. The rule: a text is read
whole, in one call, as every row of it sees others on both sides. Texts that fit share a call, one
behind the other, and do not see each other; what is left of a call is filled up. So a text's scores
are the same alone and among others, up to the rounding of sums over more numbers that are zero.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.engines.coreml.artifact import (
    ROTARY,
    TOKEN_CLASSIFICATION,
    read_artifact,
)
from paceline.engines.coreml.inputs import HIDDEN
from paceline.engines.coreml.packages import Packages, open_packages
from paceline.errors import InvalidRequest, ModelError
from paceline.storage.coreml import EMBEDDINGS

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Labelled:
    """What is said of one text."""

    labels: tuple[str, ...]
    """The best of each token."""
    scores: Floats
    """[tokens, labels], in the order of `TextClassifier.labels`: logits, not probabilities."""


class TextClassifier:
    """The classifier; see the top of this file. One at a time may call `label`."""

    def __init__(
        self,
        folder: Path,
        *,
        functions: Sequence[int] = (),
        units: str = "cpu-and-ne",
        rounding: str = "f16",
    ) -> None:
        """Validate an artifact and load its shards.

        Args:
            folder: the artifact.
            functions: numbers of rows to load programs for; none given: all there are. A call takes
                the smallest that holds its texts; each is loaded by itself and takes memory.
            units: compute units, on a Mac: see `packages.UNITS`.
            rounding: of the rehearsal, elsewhere: "f16" or "f32".

        Raises:
            ModelError: the artifact is not whole, or classifies no tokens, or a shard cannot be
                loaded.
            InvalidRequest: there are no such functions, units or rounding.
            MissingExtra: coremltools is not installed.
        """
        self.artifact = artifact = read_artifact(folder)
        if artifact.task != TOKEN_CLASSIFICATION:
            raise ModelError(
                f"{folder} is for {artifact.task} and has no labels; expected one for "
                f"{TOKEN_CLASSIFICATION}, made of such a model"
            )
        unknown = sorted(set(functions) - set(artifact.functions))
        if unknown:
            raise InvalidRequest(
                f"{folder} has no function for {unknown[0]} rows; expected some of "
                f"{', '.join(map(str, artifact.functions))}"
            )
        functions = sorted(functions or artifact.functions)
        self.labels = artifact.labels
        self.longest = functions[-1]
        """The most tokens of a text."""
        self._embeddings = np.load(folder / EMBEDDINGS, mmap_mode="r")
        self._cos, self._sin = np.load(folder / ROTARY)
        self._calls = {
            rows: _Call(
                open_packages(artifact, f"t{rows}", units, rounding),
                np.zeros((1, artifact.stream_size, rows, 1), np.float32),
            )
            for rows in functions
        }

    def label(self, texts: Sequence[Sequence[int]]) -> list[Labelled]:
        """Classify the tokens of texts, in as few calls as their order allows.

        Args:
            texts: token ids of each, as the model's own tokenizer gives them.

        Returns:
            As many as texts, in their order.

        Raises:
            InvalidRequest: a text is empty, or longer than `longest`, or has a token that the
                model does not know.
        """
        for number, text in enumerate(texts):
            self._check(text, f"text {number + 1} of {len(texts)}")
        found: list[Labelled] = []
        for together in _together(texts, self.longest):
            found += self._read(together)
        return found

    def _check(self, text: Sequence[int], which: str) -> None:
        if not text:
            raise InvalidRequest(f"{which} is empty; expected one token or more")
        if len(text) > self.longest:
            # Not in pieces: to be exact they would have to overlap by reach * layers tokens on both
            # sides, which is far more than such a call has rows.
            raise InvalidRequest(
                f"{which} has {len(text)} tokens; {self.artifact.folder} reads at most "
                f"{self.longest} in a call: cut the text, or convert the model again with more rows"
            )
        unknown = [token for token in text if not 0 <= token < self.artifact.vocab_size]
        if unknown:
            raise InvalidRequest(
                f"{which} has the token {unknown[0]}; expected 0 to {self.artifact.vocab_size - 1}"
            )

    def _read(self, texts: Sequence[Sequence[int]]) -> Iterator[Labelled]:
        """One call, by the smallest function that takes it."""
        lengths = [len(text) for text in texts]
        count = sum(lengths)
        rows = min(rows for rows in self._calls if rows >= count)
        call = self._calls[rows]
        tokens = [token for text in texts for token in text]
        size = self.artifact.hidden_size
        call.stream[0, :size, :count, 0] = self._embeddings[tokens].T
        call.stream[0, :size, count:, 0] = 0
        inputs = packed_inputs(self._cos, self._sin, lengths, rows, self.artifact.window)
        stream = call.stream
        for package in call.packages.layers:
            stream = package.predict({"hidden": stream, **inputs})["out_hidden"]
        (head,) = call.packages.heads
        scores = head.predict({"hidden": stream})["logits"][0, :, :count, 0].T
        for part in np.split(scores, np.cumsum(lengths)[:-1]):
            yield Labelled(tuple(self.labels[best] for best in part.argmax(-1)), part)


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call with a number of rows needs."""

    packages: Packages
    stream: Floats
    """[1, stream_size, rows, 1]"""


def packed_inputs(
    cos: Floats, sin: Floats, lengths: Sequence[int], width: int, reach: int
) -> dict[str, Floats]:
    """The inputs of a call with `width` rows, besides the hidden states.

    Texts of `lengths` stand one behind the other. A row sees those of its own text that are at most
    `reach` away; the rows behind the last text fill up the call, and see each other.

    Args:
        cos: [positions, r]
        sin: [positions, r]
        lengths: of each text, in tokens.
        width: T, at least the sum of lengths.
        reach: how far a row sees, in tokens.
    """
    rest = width - sum(lengths)
    places = np.concatenate([*map(np.arange, lengths), np.zeros(rest, np.int64)])
    text = np.repeat(np.arange(len(lengths) + 1), [*lengths, rest])
    near = np.abs(places[:, None] - places) <= reach
    mask = np.where(near & (text[:, None] == text), 0, HIDDEN).astype(np.float32)
    return {"rope_cos": cos[places], "rope_sin": sin[places], "attn_mask": mask[None, None]}


def _together(texts: Sequence[Sequence[int]], most: int) -> Iterator[list[Sequence[int]]]:
    """Texts in their order, as many at once as have `most` tokens."""
    taken: list[Sequence[int]] = []
    count = 0
    for text in texts:
        if count + len(text) > most:
            yield taken
            taken, count = [], 0
        taken.append(text)
        count += len(text)
    if taken:
        yield taken
