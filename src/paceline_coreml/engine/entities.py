"""Finds the entities of a text from its token labels.

A label is `O` for no entity, or a name, optionally with a prefix for the token's place: B- begins
an entity, I- is inside, E- ends it, and S- is a whole entity.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_OUTSIDE = "O"


class Entity(NamedTuple):
    label: str
    start: int
    """Position of the first character."""
    end: int
    """Position after the last character."""
    score: float
    """Mean probability of its tokens' labels."""


def probabilities(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return softmax probabilities of the best labels, [tokens], from logits [tokens, labels]."""
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    best: npt.NDArray[np.float32] = exponents.max(-1) / exponents.sum(-1)
    return best


def entities(
    text: str, offsets: Sequence[tuple[int, int]], labels: Sequence[str], scores: Sequence[float]
) -> list[Entity]:
    """Return the entities of a text, in order, without white space at their ends.

    Each token has an offset (start and end, in characters; empty tokens are ignored), its best
    label, and that label's probability as score.
    """
    spans: list[Entity] = []
    tokens: list[float] = []  # scores of the open entity's tokens
    open_name = ""
    for (start, end), label, score in zip(offsets, labels, scores, strict=True):
        if start == end:
            continue
        place, name = _split(label)
        if not name:
            open_name = ""
            continue
        if name == open_name and place not in "BS":
            tokens.append(float(score))
            spans[-1] = Entity(name, spans[-1].start, end, sum(tokens) / len(tokens))
        else:
            tokens = [float(score)]
            spans.append(Entity(name, start, end, tokens[0]))
        open_name = "" if place in ("E", "S") else name
    return [trimmed for entity in spans if (trimmed := _trimmed(text, entity)).start < trimmed.end]


def _split(label: str) -> tuple[str, str]:
    """Split a label: "B-person" into ("B", "person"), and "person" into ("I", "person")."""
    if label == _OUTSIDE:
        return "", ""
    if label[1:2] == "-" and label[0] in "BIES":
        return label[0], label[2:]
    return "I", label


def _trimmed(text: str, entity: Entity) -> Entity:
    part = text[entity.start : entity.end]
    start = entity.start + len(part) - len(part.lstrip())
    return entity._replace(start=start, end=start + len(part.strip()))
