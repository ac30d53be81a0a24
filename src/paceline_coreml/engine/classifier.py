"""Runs a Core ML artifact that classifies tokens: one score per token and label.

Each text runs in one forward pass, because every row attends to both sides. Short texts are packed
into one pass, where the mask separates them; the rest of the pass is padding. Invariant: a text has
the same scores alone and packed, up to the rounding of sums with more zero terms.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidRequest, ModelError
from paceline.storage.coreml import EMBEDDINGS
from paceline_coreml.engine.artifact import ROTARY, TOKEN_CLASSIFICATION, read_artifact
from paceline_coreml.engine.call import Bucket
from paceline_coreml.engine.inputs import HIDDEN
from paceline_coreml.engine.packages import REHEARSED, PackageOpener, on_a_mac

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Labelled:
    labels: tuple[str, ...]
    """Each token's best label."""
    scores: Floats
    """[tokens, labels] logits, in the order of `TextClassifier.labels`."""


class TextClassifier:
    """A token classifier; see the top of this file. `label` is not thread-safe."""

    def __init__(
        self,
        folder: Path,
        *,
        units: str = "cpu-and-ne",
        rounding: str = "f16",
        on_message: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Validate an artifact and load its shards; see `PackageOpener`.

        Raises:
            ModelError: the artifact is corrupt or not a classifier, or a shard cannot be loaded.
            InvalidRequest: units or rounding are unknown.
            MissingExtra: coremltools is not installed.
        """
        self.artifact = artifact = read_artifact(folder)
        if artifact.task != TOKEN_CLASSIFICATION:
            raise ModelError(
                f"{folder} is for {artifact.task} and has no labels; expected a conversion of a "
                "token classifier, such as OpenAI's Privacy Filter"
            )
        self.labels = artifact.labels
        self.units = units if on_a_mac() else REHEARSED
        self.longest = artifact.rows
        """Maximum tokens per text."""
        self._embeddings = np.load(folder / EMBEDDINGS, mmap_mode="r")
        self._cos, self._sin = np.load(folder / ROTARY)
        opener = PackageOpener(artifact, units=units, rounding=rounding, on_message=on_message)
        self._buckets = {
            rows: Bucket(artifact, opener.open_all(artifact.function(rows)), rows)
            for rows in artifact.widths
        }

    def label(self, texts: Sequence[Sequence[int]]) -> list[Labelled]:
        """Classify the tokens of texts, in as few forward passes as their order allows.

        Token ids are from the model's own tokenizer. Raises InvalidRequest if a text is empty,
        longer than `longest`, or has an unknown token.
        """
        for number, text in enumerate(texts):
            self._check(text, f"text {number + 1} of {len(texts)}")
        results: list[Labelled] = []
        for packed in _pack(texts, self.longest):
            results += self._run(packed)
        return results

    def _check(self, text: Sequence[int], which: str) -> None:
        if not text:
            raise InvalidRequest(f"{which} is empty; expected at least one token")
        if len(text) > self.longest:
            # Exact chunks would have to overlap by window * layers tokens on both sides, far more
            # than the rows of a pass.
            raise InvalidRequest(
                f"{which} has {len(text)} tokens; {self.artifact.folder} supports at most "
                f"{self.longest}; shorten the text, or convert the model again with more rows"
            )
        unknown = [token for token in text if not 0 <= token < self.artifact.vocab_size]
        if unknown:
            raise InvalidRequest(
                f"{which} has the token {unknown[0]}; expected 0 to {self.artifact.vocab_size - 1}"
            )

    def _run(self, texts: Sequence[Sequence[int]]) -> Iterator[Labelled]:
        """Classify packed texts in one pass of the smallest bucket that fits them."""
        lengths = [len(text) for text in texts]
        count = sum(lengths)
        rows = min(rows for rows in self._buckets if rows >= count)
        bucket = self._buckets[rows]
        tokens = [token for text in texts for token in text]
        inputs = packed_inputs(self._cos, self._sin, lengths, rows, self.artifact.reach)
        states = [None] * len(bucket.packages.layers)
        stream, _ = bucket.layers(states, self._embeddings[tokens], inputs, (), {})
        scores = np.zeros((count, len(self.labels)), np.float32)
        bucket.head(stream, 0, scores, None, {})
        for part in np.split(scores, np.cumsum(lengths)[:-1]):
            yield Labelled(tuple(self.labels[best] for best in part.argmax(-1)), part)


def packed_inputs(
    cos: Floats, sin: Floats, lengths: Sequence[int], width: int, window: int
) -> dict[str, Floats]:
    """Return the inputs of a pass with `width` rows, except the hidden states.

    Each row attends to rows of its own text at a distance of at most `window`. Padding follows the
    last text and attends to itself. `cos` and `sin` are [positions, r].
    """
    padding = width - sum(lengths)
    positions = np.concatenate([*map(np.arange, lengths), np.zeros(padding, np.int64)])
    text = np.repeat(np.arange(len(lengths) + 1), [*lengths, padding])
    near = np.abs(positions[:, None] - positions) <= window
    mask = np.where(near & (text[:, None] == text), 0, HIDDEN).astype(np.float32)
    return {"rope_cos": cos[positions], "rope_sin": sin[positions], "attn_mask": mask[None, None]}


def _pack(texts: Sequence[Sequence[int]], max_tokens: int) -> Iterator[list[Sequence[int]]]:
    """Yield groups of consecutive texts with at most `max_tokens` tokens in total."""
    taken: list[Sequence[int]] = []
    count = 0
    for text in texts:
        if count + len(text) > max_tokens:
            yield taken
            taken, count = [], 0
        taken.append(text)
        count += len(text)
    if taken:
        yield taken
