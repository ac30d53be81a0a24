"""Reads EAGLE-3 heads (arXiv 2503.01840) in the format that vLLM and SGLang load.

A checkpoint has a `config.json` with the architecture `LlamaForCausalLMEagle3`, and safetensors:
`fc`; one decoder layer `midlayer`, whose attention reads embedding and hidden state concatenated;
`norm`; `lm_head` over a reduced vocabulary; and `d2t`: row k stands for the token k + d2t[k].

Taps: without ids, vLLM and SGLang tap the target's layers 1, L // 2 - 1 and L - 4 of L. A top-level
`eagle_aux_hidden_state_layer_ids` counts from the embeddings (vLLM: id j is the output of layer
j - 1); inside `eagle_config` it counts layers from 0 (SGLang, SpecForge).

DeepSpec's format (`Qwen3Eagle3Model`, deepseek-ai/DeepSpec) has the same layer as `layers.0`, with
norms of queries and keys, and `target_layer_ids` from 0. It uses the target's embeddings and head;
the frozen copies in the checkpoint are not read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

from paceline.errors import ModelError
from paceline.storage.files import read_json
from paceline.storage.validation import Count, Limit, Positive, list_faults, validated
from paceline_mlx.heads.config import CONFIG, DrafterFile, with_fields_of
from paceline_mlx.heads.mtp.head import ChainConfig, HeadWeights
from paceline_mlx.heads.weights import Weights, check_tensors, stored_tensors
from paceline_mlx.hooks import Array

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Qwen3Eagle3Model")
_IDS = "eagle_aux_hidden_state_layer_ids"
_LAYER = "midlayer."


@dataclass
class _EagleConfig:
    use_aux_hidden_state: Literal[True] = True
    eagle_aux_hidden_state_layer_ids: list[Count] | None = None


@dataclass(kw_only=True)
class _ConfigFile(DrafterFile):
    architectures: Annotated[
        list[Literal["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Qwen3Eagle3Model"]],
        Limit(min_length=1),
    ]
    num_hidden_layers: Annotated[int, Limit(ge=1, le=1)] = 1
    draft_vocab_size: Positive | None = None
    target_hidden_size: Positive | None = None
    norm_before_residual: Literal[False] | None = None
    tie_word_embeddings: Literal[False] = False
    mlp_bias: Literal[False] | None = None
    eagle_config: _EagleConfig | None = None
    eagle_aux_hidden_state_layer_ids: list[Positive] | None = None
    target_layer_ids: list[Count] | None = None
    num_target_layers: Positive | None = None

    @property
    def deepspec(self) -> bool:
        return self.architectures[0] == "Qwen3Eagle3Model"


def read_config(folder: Path, target_layers: Callable[[], int]) -> ChainConfig:
    """Read and validate `config.json`.

    Raises ModelError if this is not an EAGLE-3 head, or if its format is not supported; the message
    lists every fault.
    """
    path = folder / CONFIG
    file = validated(_ConfigFile, read_json(path), str(path), error=ModelError)
    if faults := _contradictions(file):
        raise ModelError(list_faults(str(path), faults))
    settings = file.settings()
    return with_fields_of(
        ChainConfig,
        file,
        rotary_dims=settings["head_dim"],
        taps=_taps(file) or _default_taps(target_layers(), path),
        num_target_layers=file.num_target_layers if file.deepspec else None,
        head_norms=file.deepspec,
        **settings,
    )


def _default_taps(layers: int, path: Path) -> tuple[int, ...]:
    """Return the taps of a checkpoint without layer ids; see the top of this file."""
    taps = (1, layers // 2 - 1, layers - 4)
    if not 0 <= min(taps) <= max(taps) < layers or len(set(taps)) < len(taps):
        raise ModelError(
            f"{path} has no {_IDS}, and a target with {layers} layers is too small for the default "
            f"ones; add {_IDS} to the file"
        )
    return taps


def _taps(file: _ConfigFile) -> tuple[int, ...]:
    if file.deepspec:
        return tuple(file.target_layer_ids or ())
    if file.eagle_aux_hidden_state_layer_ids:
        return tuple(layer - 1 for layer in file.eagle_aux_hidden_state_layer_ids)
    nested = file.eagle_config and file.eagle_config.eagle_aux_hidden_state_layer_ids
    return tuple(nested or ())


def _contradictions(file: _ConfigFile) -> list[str]:
    faults = file.head_faults()
    if file.draft_vocab_size and file.draft_vocab_size > file.vocab_size:
        faults.append(
            f"draft_vocab_size {file.draft_vocab_size} is above vocab_size {file.vocab_size}"
        )
    if (file.target_hidden_size or file.hidden_size) != file.hidden_size:
        faults.append(
            f"target_hidden_size {file.target_hidden_size} differs from hidden_size "
            f"{file.hidden_size}; they must be equal, because the head uses the target's embeddings"
        )
    if file.deepspec and not file.target_layer_ids:
        faults.append("target_layer_ids is missing")
    if file.deepspec and file.draft_vocab_size:
        faults.append("draft_vocab_size is set; expected a head over the whole vocabulary")
    return faults


def read_weights(folder: Path, config: ChainConfig, dtype: Any, bits: int | None) -> HeadWeights:
    tensors = {
        name.removeprefix("model.").replace("layers.0.", _LAYER): tensor
        for name, tensor in stored_tensors(folder).items()
    }
    shapes, drafted = _shapes(config), config.draft_vocab_size
    if config.head_norms or (drafted is None and "lm_head.weight" not in tensors):
        del shapes["lm_head.weight"]
    check_tensors(folder, shapes, tensors)
    draft_vocab = None
    if drafted is not None and ("d2t" in tensors or drafted != config.vocab_size):
        draft_vocab = _draft_vocab(folder, config, tensors)

    weights = Weights({name: tensors[name] for name in shapes}, dtype, bits)
    layer = weights.layer(_LAYER)
    return HeadWeights(
        fuse=weights.matrix("fc"),
        embedding_norm=layer.input_norm,
        hidden_norm=weights.vector(f"{_LAYER}hidden_norm"),
        layer=layer,
        norm=weights.vector("norm"),
        head=weights.matrix("lm_head") if "lm_head.weight" in shapes else None,
        draft_vocab=draft_vocab,
    )


def _shapes(config: ChainConfig) -> dict[str, tuple[int, ...]]:
    d = config.hidden_size
    layer = config.layer_shapes(2 * d, head_norms=config.head_norms)
    layer["hidden_norm.weight"] = (d,)
    return {
        "fc.weight": (d, config.tapped_size),
        "norm.weight": (d,),
        "lm_head.weight": (config.draft_vocab_size or config.vocab_size, d),
        **{f"{_LAYER}{name}": shape for name, shape in layer.items()},
    }


def _draft_vocab(
    folder: Path, config: ChainConfig, tensors: Mapping[str, Array]
) -> npt.NDArray[np.int64]:
    """Return the token of each `lm_head` row, [draft vocabulary] ascending."""
    count = config.draft_vocab_size or 0
    if "d2t" not in tensors or tensors["d2t"].shape != (count,):
        shape = list(tensors["d2t"].shape) if "d2t" in tensors else "missing"
        raise ModelError(f"the weights in {folder} cannot be used: d2t is {shape}, not [{count}]")
    tokens = np.array(tensors["d2t"]).astype(np.int64) + np.arange(count)
    if np.any(np.diff(tokens) <= 0) or tokens[0] < 0 or tokens[-1] >= config.vocab_size:
        raise ModelError(
            f"{folder} has an invalid d2t; expected token ids k + d2t[k] that ascend and are below "
            f"{config.vocab_size}"
        )
    return tokens
