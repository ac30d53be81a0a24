"""Entities of a text, from the labels of its tokens.

A label is `O` for no entity, or a name, alone or after the token's place in the entity: B- begins
it, I- is inside it, E- ends it, S- is the whole of it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_OUTSIDE = "O"


class Entity(NamedTuple):
    label: str
    start: int
    """First character."""
    end: int
    """After the last character."""
    score: float
    """Mean probability of the labels of its tokens."""


def probabilities(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """[tokens]: softmax probabilities of the tokens' best labels; `logits`: [tokens, labels]."""
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    best: npt.NDArray[np.float32] = exponents.max(-1) / exponents.sum(-1)
    return best


def entities(
    text: str, offsets: Sequence[tuple[int, int]], labels: Sequence[str], scores: Sequence[float]
) -> list[Entity]:
    """The entities of a text, in order, without white space at their ends.

    Args:
        text: the text.
        offsets: start and end of the tokens, in characters. An empty token is in no entity.
        labels: best label per token.
        scores: probabilities of these labels.
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
    """Place and name of a label: ("B", "person") of "B-person", ("I", "person") of "person"."""
    if label == _OUTSIDE:
        return "", ""
    if label[1:2] == "-" and label[0] in "BIES":
        return label[0], label[2:]
    return "I", label


def _trimmed(text: str, entity: Entity) -> Entity:
    part = text[entity.start : entity.end]
    start = entity.start + len(part) - len(part.lstrip())
    return entity._replace(start=start, end=start + len(part.strip()))
