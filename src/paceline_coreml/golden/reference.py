"""Runs a checkpoint with transformers, the reference for every architecture.

Hooks on the layers record hidden states. `output_hidden_states` is not used: in most models, its
last entry is after the final norm.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.errors import ModelError
from paceline_coreml.conversion.checkpoint import FolderTensors, damage_reported, read_checkpoint
from paceline_coreml.engine.artifact import CAUSAL_LM

Floats = npt.NDArray[np.float32]


class ReferenceOutput(NamedTuple):
    """The outputs for n rows of one text, or of several concatenated texts."""

    streams: Sequence[Floats]
    """[n, hidden_size]: before the first layer, then after every layer."""
    logits: Floats
    """[n, vocab], or [n, labels] for a classifier"""


class Reference:
    """A checkpoint's model in memory: a causal language model or a classifier."""

    def __init__(
        self,
        checkpoint: Path,
        task: str = CAUSAL_LM,
        *,
        layers: int | None = None,
        soft: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Load the first `layers` layers, or all; with `soft`, ZAYA's rows use all experts.

        Raises ModelError if transformers cannot load it, or a weight is missing.
        """
        from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

        model_class = AutoModelForCausalLM if task == CAUSAL_LM else AutoModelForTokenClassification
        with damage_reported(f"{checkpoint} with transformers"):
            config, stored = read_checkpoint(checkpoint)
            if layers is not None:
                config.num_hidden_layers = layers
                if getattr(config, "layer_types", None):
                    config.layer_types = config.layer_types[:layers]
            stored.expect_model(config)
            if stored.in_mlx_format:
                self._model, missing = _dequantized(model_class, config, stored, dtype), []
            else:
                self._model, loading_info = model_class.from_pretrained(
                    checkpoint,
                    config=config,
                    dtype=dtype,
                    experts_implementation="eager",  # others need aligned sizes in float16
                    local_files_only=True,
                    output_loading_info=True,
                )
                missing = sorted(map(str, loading_info["missing_keys"]))
        # transformers initializes missing weights at random, and only warns.
        if missing:
            raise ModelError(
                f"{checkpoint} has no {', '.join(missing[:3])}"
                f"{f' and {len(missing) - 3} more weights' if len(missing) > 3 else ''}; "
                "expected a complete checkpoint"
            )
        # transformers reads ZAYA's balancing biases, then initializes parts of them again.
        for name, buffer in self._model.named_buffers():
            if name in stored:
                buffer.copy_(stored[name])
        self._model.eval()
        self._layers = self._model.get_decoder().layers
        if soft:
            for layer in self._layers:
                layer.mlp.forward = partial(_soft, layer.mlp)

    @torch.no_grad()
    def run(self, tokens: Sequence[int], embedded: Floats | None = None) -> ReferenceOutput:
        """Run a whole text in one forward pass, without a KV cache.

        `embedded`, [n, hidden_size], replaces the embeddings, so that layers have the same rows as
        an artifact's: rounding to float16 is a small difference that grows in each router.
        """
        streams: list[Floats] = []

        def record(hidden: Any) -> None:
            streams.append(hidden[0].float().numpy().copy())  # [1, T, hidden_size]

        def before(_layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            record(args[0] if args else kwargs["hidden_states"])
            if embedded is None:
                return None
            rows = torch.from_numpy(embedded)[None].to(self._model.dtype)
            return ((rows, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": rows})

        def after(_layer: Any, _args: Any, out: Any) -> None:
            record(out[0] if isinstance(out, tuple) else out)  # some also return a router's state

        hooks = [self._layers[0].register_forward_pre_hook(before, with_kwargs=True)]
        hooks += [layer.register_forward_hook(after) for layer in self._layers]
        try:
            logits = self._model(torch.tensor([list(tokens)]), use_cache=False).logits
        finally:
            for hook in hooks:
                hook.remove()
        return ReferenceOutput(streams, logits[0].float().numpy())

    def run_all(
        self, texts: Sequence[Sequence[int]], embedded: Sequence[Floats] = ()
    ) -> ReferenceOutput:
        """Run texts one by one; `embedded`, if any, replaces each text's [T, hidden_size]."""
        replacements: Sequence[Floats | None] = embedded or [None] * len(texts)
        outputs = [self.run(*text) for text in zip(texts, replacements, strict=True)]
        streams = zip(*(output.streams for output in outputs), strict=True)
        return ReferenceOutput(
            [np.concatenate(stream) for stream in streams],
            np.concatenate([output.logits for output in outputs]),
        )


@torch.no_grad()
def _dequantized(model_class: Any, config: Any, stored: FolderTensors, dtype: Any) -> Any:
    """Return the model of weights in MLX's formats, which transformers cannot load."""
    model = model_class.from_config(config, dtype=dtype)
    for name, weight in model.named_parameters():
        weight.copy_(stored[name])
    return model


def _soft(mixture: Any, hidden: Tensor, states: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Run ZAYA's mixture on rows [1, T, d], with all experts weighted by probability."""
    logits, _, _, states = mixture.gate(hidden, router_states=states)
    shares = logits.softmax(-1)[:, :-1]  # the last class means "no expert"
    every = torch.arange(shares.shape[1]).expand_as(shares)
    return mixture.experts(hidden[0], every, shares)[None], states
