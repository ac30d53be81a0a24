"""Reads a Hugging Face checkpoint: config.json with transformers, tensors lazily, as float32.

Matrices that mlx-lm quantized are dequantized on access.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ModelError, PacelineError
from paceline.storage.files import read_json
from paceline_coreml.conversion.mlx_format import FLOATS, Packing, Stored, dequantize, packing_of

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
_ONE_FILE = "model.safetensors"


class MissingTensor(ModelError, KeyError):
    __str__ = Exception.__str__


class FolderTensors(Mapping[str, Tensor]):
    """The tensors of a folder by name, read on access."""

    def __init__(self, folder: Path) -> None:
        """Open the files. Raises ModelError if tensors are missing, or a file cannot be read."""
        from safetensors import safe_open

        self._files: dict[str, Any] = {}
        for path in _files(folder):
            with damage_reported(f"{path} as safetensors"):
                file: Any = safe_open(path, framework="pt")
                self._files |= dict.fromkeys(file.keys(), file)
        self._folder = folder
        self._shapes: Mapping[str, tuple[int, ...]] = {}

    @property
    def quantized(self) -> bool:
        """True if mlx-lm quantized some matrices."""
        return any(name.endswith(".scales") for name in self)

    @property
    def in_mlx_format(self) -> bool:
        """True if transformers cannot load it: quantized, or with other shapes of convolutions."""
        shapes = ((self._header(name), shape) for name, shape in self._shapes.items())
        return self.quantized or any(found and found.shape != shape for found, shape in shapes)

    @property
    def weights(self) -> int:
        """The number of weights that `expect` was called for."""
        return sum(map(math.prod, self._shapes.values()))

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check the stored tensors against their shapes by name. Raises ModelError.

        Quantized tensors cannot be read before, because their format follows from their shape.
        """
        self._shapes = shapes
        for name in self._files:
            if name in shapes:
                self._packing(name)

    def expect_model(self, config: Any) -> None:
        """Check the stored tensors against transformers' model of a config. Raises ModelError."""
        from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        count = config.num_hidden_layers
        if not any(name.startswith(f"model.layers.{count - 1}.") for name in self):
            raise MissingTensor(
                f"{self._folder} has no tensors of layer {count - 1}; its {CONFIG} has "
                f"num_hidden_layers {count}"
            )
        is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        auto: Any = AutoModelForCausalLM if is_causal else AutoModelForTokenClassification
        with torch.device("meta"):  # shapes without memory
            model = auto.from_config(config)
        self.expect({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._files:
            raise MissingTensor(
                f"{self._folder} has no tensor {name}; expected a complete checkpoint for its "
                f"{CONFIG}{self._advice()}"
            )
        packing, tensor = self._packing(name), self._stored(name)
        if packing is not None:
            _, scales, biases, _ = _parts(name)
            added = self._stored(biases) if biases in self._files else None
            tensor = dequantize(tensor, self._stored(scales), added, packing)
        elif tensor.shape != self._shapes.get(name, tensor.shape):
            tensor = tensor.mT
        return tensor.to(torch.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def _packing(self, name: str) -> Packing | None:
        """Return how a tensor is quantized, or None. Raises ModelError for other types and shapes.

        Reads only the files' headers.
        """
        words, scales, biases, factor = (self._header(part) for part in _parts(name))
        assert words is not None
        shape = self._shapes.get(name)
        if words.kind in FLOATS:
            # MLX stores the taps of a convolution before its input channels.
            for_mlx = shape and len(shape) == 3 and (shape[0], shape[2], shape[1])
            if shape is None or words.shape in (shape, for_mlx):
                return None
        elif shape is not None and scales is not None and factor is None:
            packing = packing_of(shape, words, scales, biases)
            if packing is not None:
                return packing
        found = f"{list(words.shape)} {words.kind}"
        found += f" with scales {list(scales.shape)} {scales.kind}" if scales is not None else ""
        found += " and a global_scale" if factor is not None else ""
        expected = f"{list(shape)} floats" if shape is not None else "floats"
        raise ModelError(
            f"{self._folder} has {name} as {found}; expected {expected} for its {CONFIG}, or a "
            f"format of mlx-lm{self._advice()}"
        )

    def _header(self, name: str) -> Stored | None:
        if name not in self._files:
            return None
        part = self._files[name].get_slice(name)
        return Stored(part.get_dtype(), tuple(part.get_shape()))

    def _stored(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def _advice(self) -> str:
        """Name a format of quantized weights that only other libraries read, for a message."""
        found = read_json(self._folder / CONFIG).get("quantization_config")
        method = found.get("quant_method") if isinstance(found, dict) else None
        return f", not weights quantized with {method!r}" if method else ""


def _parts(name: str) -> tuple[str, str, str, str]:
    """Return the names of a tensor, its scales, its biases and its factor, if mlx-lm quantized it.

    Only experts in nvfp4 may have a factor, which conversion does not read.
    """
    stem = name.removesuffix("weight")
    return name, f"{stem}scales", f"{stem}biases", f"{stem}global_scale"


def read_checkpoint(folder: Path) -> tuple[Any, FolderTensors]:
    """Return transformers' config of a checkpoint folder, and its tensors.

    Raises ModelError if it has no config.json that transformers accepts, or no tensors.
    """
    from transformers import AutoConfig

    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder} has no {CONFIG}; expected a Hugging Face checkpoint")
    with damage_reported(str(folder / CONFIG)):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    found = getattr(config, "quantization_config", None)
    if isinstance(found, dict) and "quant_method" not in found:  # mlx-lm's; transformers rejects it
        del config.quantization_config
    return config, FolderTensors(folder)


@contextlib.contextmanager
def damage_reported(what: str) -> Iterator[None]:
    """Raise ModelError, in one line, for errors of other libraries, which damaged files cause."""
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        reason = shorten(str(error), 200) or type(error).__name__
        raise ModelError(f"cannot read {what}: {reason}") from error


class Prefixed(Mapping[str, Tensor]):
    """The tensors whose names begin with `prefix`, by the rest of their names; still lazy."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str) -> None:
        self._weights, self._prefix = weights, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        begin = len(self._prefix)
        return (name[begin:] for name in self._weights if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        try:
            names = read_json(folder / INDEX)["weight_map"]
            paths = [folder / name for name in sorted(set(names.values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{folder / INDEX} is not a safetensors index: {error}") from error
    else:
        paths = [folder / _ONE_FILE]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ModelError(
            f"{folder} has no {', '.join(missing)}; expected a checkpoint's safetensors files"
        )
    return paths
