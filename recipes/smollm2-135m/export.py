"""Writes a trained head as `paceline.drafters.mtp.logits_head` reads it: one that reads logits.

An engine returns logits, not states. They are W h, so the logits of a few more tokens than h has
values give h back, and the matrix that does it is folded into the head's first one. Which tokens:
those whose rows of W differ the most, among common ones, because rare rows are badly trained.
"""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from head import Head
from safetensors.numpy import save_file
from torch import Tensor

from paceline.drafters.mtp import HeadConfig, logits_head
from paceline.storage.files import write_json, writing
from paceline.storage.int8 import quantized

WEIGHTS = "model.safetensors"
CANDIDATES = 16_384
"""Common tokens among which those are chosen whose logits are read."""
REDUNDANCY = 4 / 3
"""Logits that are read for each value of a state: with some to spare, rounding averages out."""


def write_head(head: Head, target: Tensor, folder: Path) -> None:
    """Write `config.json` and weights: matrices in int8, `fc` and norms in float16.

    `target` [vocab, d] is the model's output matrix.
    """
    candidates = head.words.order[:CANDIDATES]
    count = min(round(REDUNDANCY * target.shape[1]), len(candidates))
    tokens = candidates[spanning_rows(target[candidates].double(), count)].sort().values
    # fc h / std = (fc / std) pinv(W_S) logits_S
    folded = (head.fc.weight / head.std).double() @ torch.linalg.pinv(target[tokens].double())
    weights = {**head.state_dict(), "fc.weight": folded}
    file = _config(head.config, tokens.tolist(), *head.words.rest.shape)
    shapes = logits_head.shapes_of(file)
    matrices = logits_head.matrices_of(shapes)
    tensors: dict[str, npt.NDArray[np.generic]] = {
        logits_head.ORDER: head.words.order.cpu().numpy().astype(np.int32)
    }
    for name in shapes:
        weight = weights[name].detach().cpu().numpy().astype(np.float32)
        if name in matrices:
            tensors[name], tensors[f"{name}{logits_head.SCALE}"] = quantized(weight)
        else:
            tensors[name] = weight.astype(np.float16)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / f".{WEIGHTS}")
        (folder / f".{WEIGHTS}").replace(folder / WEIGHTS)
        write_json(folder / logits_head.CONFIG, asdict(file))


def spanning_rows(rows: Tensor, count: int) -> Tensor:
    """Indices [count] of rows [n, d] that span all others well; float64.

    Gram-Schmidt with pivots: the longest row is chosen, its direction is taken out of all rows,
    and so forth. After d rows nothing is left, and the next round begins with those not chosen.
    """
    chosen: list[int] = []
    rest = rows
    for number in range(count):
        if number % rows.shape[1] == 0:
            rest = rows.clone()
        lengths = rest.square().sum(1)
        lengths[chosen] = -1
        pivot = int(lengths.argmax())
        direction = rest[pivot] / rest[pivot].norm()
        rest = rest - torch.outer(rest @ direction, direction)
        chosen.append(pivot)
    return torch.tensor(chosen, device=rows.device)


def _config(config: HeadConfig, tokens: list[int], rest: int, rank: int) -> logits_head.ConfigFile:
    return logits_head.ConfigFile(
        architectures=[logits_head.ARCHITECTURE],
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        common_words=config.vocab_size - rest,
        rank=rank,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_theta,
        logits_of=tokens,
    )
