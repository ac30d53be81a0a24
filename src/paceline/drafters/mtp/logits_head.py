"""A head that reads logits in place of hidden states, so that it drafts for any engine.

Many engines return logits alone. They are the last hidden state h times the output matrix W, so
that those of a few more tokens than h has values determine it:

    logits of some tokens S = W_S h        h = pinv(W_S) logits        fc h = (fc pinv(W_S)) logits

The last product is stored as `fc`, and nothing else tells this head from one of EAGLE-3's form
whose only tap is the state after the final norm. A prompt has no logits but its last, so that the
head reads states of the answer alone; in training it made no difference (51.4 and 51.1 % right).

It has `Embeddings` of its own, and needs no tensor of its target's files. A folder has
`config.json` and safetensors; matrices are int8 with a scale for each row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
import numpy.typing as npt

from paceline.drafters.mtp.checkpoint import Embeddings, Head, HeadConfig
from paceline.drafters.mtp.eagle3 import network_shapes, network_weights
from paceline.drafters.networks.config import HeadDim, PositiveFloat
from paceline.drafters.networks.tensors import Array, StoredTensor, check_tensors, stored_tensors
from paceline.errors import ModelError
from paceline.storage.files import read_json
from paceline.storage.int8 import Int8Matrix
from paceline.storage.validation import Count, Limit, Positive, validated

CONFIG = "config.json"
ARCHITECTURE: Final = "PacelineLogitsHead"
DRAFTED, SCALE = "drafted", ".scale"


@dataclass(kw_only=True)
class ConfigFile:
    """The fields of config.json."""

    architectures: Annotated[list[Literal["PacelineLogitsHead"]], Limit(min_length=1)]
    hidden_size: Positive
    intermediate_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: HeadDim
    vocab_size: Positive
    draft_vocab_size: Positive
    """Tokens that it drafts."""
    rank: Positive
    """Values of the embedding of a token that it does not draft."""
    rms_norm_eps: Annotated[float, Limit(ge=0)]
    rope_theta: PositiveFloat
    logits_of: Annotated[list[Count], Limit(min_length=1)]
    """Tokens whose logits are read."""


def read_file(folder: Path) -> ConfigFile:
    """Read and validate `config.json`. Raises ModelError; the message names every fault."""
    path = folder / CONFIG
    file = validated(ConfigFile, read_json(path), str(path), error=ModelError)
    if file.draft_vocab_size >= file.vocab_size or max(file.logits_of) >= file.vocab_size:
        raise ModelError(
            f"{path}: draft_vocab_size is {file.draft_vocab_size} and the last token of logits_of "
            f"{max(file.logits_of)}; expected less than vocab_size, {file.vocab_size}"
        )
    return file


def config_of(file: ConfigFile) -> HeadConfig:
    """The shape of the head."""
    return HeadConfig(
        hidden_size=file.hidden_size,
        intermediate_size=file.intermediate_size,
        num_attention_heads=file.num_attention_heads,
        num_key_value_heads=file.num_key_value_heads,
        head_dim=file.head_dim,
        rotary_dims=file.head_dim,
        vocab_size=file.vocab_size,
        rms_norm_eps=file.rms_norm_eps,
        rope_theta=file.rope_theta,
        taps=(),
        draft_vocab_size=file.draft_vocab_size,
        logits_of=tuple(file.logits_of),
    )


def reads_logits(path: Path) -> bool:
    """Whether a folder has a head of this form; it may be faulty."""
    try:
        raw = read_json(path / CONFIG) if (path / CONFIG).is_file() else None
    except ModelError:
        return False
    return isinstance(raw, dict) and raw.get("architectures") == [ARCHITECTURE]


def read_head(folder: Path) -> Head:
    """Read the weights. Raises ModelError; the message names the faulty tensors."""
    file = read_file(folder)
    tensors = stored_tensors(folder)
    shapes = shapes_of(file)
    scales = {f"{name}{SCALE}": (shape[0], 1) for name, shape in matrices_of(shapes).items()}
    check_tensors(folder, {**shapes, DRAFTED: (file.draft_vocab_size,)}, tensors, finite=False)
    check_tensors(folder, scales, tensors)

    def matrix(name: str) -> Int8Matrix:
        scale = tensors[f"{name}{SCALE}"].floats().astype(np.float16)
        return Int8Matrix(tensors[name].int8(), scale)

    def floats(name: str) -> Array:
        return matrix(name).floats() if f"{name}{SCALE}" in tensors else tensors[name].floats()

    weights = replace(
        network_weights(floats, shapes),
        embeddings=Embeddings(
            matrix("embeddings.drafted"), matrix("embeddings.rest"), floats("embeddings.into")
        ),
    )
    return Head(folder, config_of(file), weights, _drafted(folder, file, tensors))


def shapes_of(file: ConfigFile) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor but scales and `DRAFTED`."""
    d = file.hidden_size
    return {
        **network_shapes(config_of(file)),
        "embeddings.drafted": (file.draft_vocab_size, d),
        "embeddings.rest": (file.vocab_size - file.draft_vocab_size, file.rank),
        "embeddings.into": (d, file.rank),
    }


def matrices_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Those that are stored in int8; `fc` takes differences of logits, and needs more digits."""
    return {
        name: shape for name, shape in shapes.items() if len(shape) == 2 and name != "fc.weight"
    }


def _drafted(
    folder: Path, file: ConfigFile, tensors: Mapping[str, StoredTensor]
) -> npt.NDArray[np.int64]:
    tokens = tensors[DRAFTED].integers()
    if tokens[0] < 0 or tokens[-1] >= file.vocab_size or (np.diff(tokens) <= 0).any():
        raise ModelError(
            f"{folder}: {DRAFTED} has tokens that are not ascending, or not of the vocabulary"
        )
    return tokens
