"""What a drafter takes from its target: embeddings, and the head's rows of the tokens to draft."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline_lab.train.answers import Answer


class TargetTensors(NamedTuple):
    """The target's tensors that the drafter uses."""

    embeddings: Tensor
    """[vocab, d]"""
    head: Tensor
    """[drafted, d] bf16: rows of the head for the tokens to draft."""
    column: Tensor
    """[vocab]: a token's index in `drafted`; -1: not drafted."""
    drafted: Tensor
    """[drafted]: token ids."""


def share_weights(
    embeddings: npt.NDArray[np.float32],
    head: npt.NDArray[np.float32],
    draft_vocab: Sequence[int],
    device: str,
) -> TargetTensors:
    """Copy the target's matrices to the device; of the head, the rows of `draft_vocab`."""
    vocab = len(embeddings)
    drafted = torch.tensor(list(draft_vocab))
    column = torch.full((vocab,), -1)
    column[drafted] = torch.arange(len(drafted))
    rows = torch.from_numpy(head)[drafted]
    return TargetTensors(
        torch.from_numpy(embeddings).to(device),
        rows.to(device, torch.bfloat16),
        column.to(device),
        drafted.to(device),
    )


def most_frequent(answers: Sequence[Answer], count: int, *, vocab: int, least: int) -> list[int]:
    """The `count` most frequent tokens of answers, ascending.

    Those that occur and, if these are less than `least`, the first others of the vocabulary.
    """
    tokens = np.concatenate([answer.answer for answer in answers])
    counts = np.bincount(tokens, minlength=vocab)
    order = np.argsort(-counts, kind="stable")[:count]
    return sorted(order[: max(np.count_nonzero(counts[order]), least)].tolist())
