"""Writes a checkpoint with the weights that an artifact has stored, for its reference.

INT8 and int4 lose precision, so an artifact's outputs differ from its checkpoint's without a fault
in the graph. With the stored weights in the checkpoint, any larger difference is a fault.

Layers only move the elements of checkpoint tensors: they reorder, split and join them. So a family
is also built from *tags*, tensors with the place of each element instead of its number. The tags of
a layer's parameter say where the program's weight of that name belongs in the checkpoint.

A stored row that is not near the checkpoint's row is a fault, and the checkpoint's row is written.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.storage.files import read_json, write_json
from paceline_coreml.conversion.checkpoint import CONFIG, INDEX, Prefixed, read_checkpoint
from paceline_coreml.conversion.family import Family
from paceline_coreml.conversion.scratch import TEMPORARY, check_space
from paceline_coreml.conversion.shards import Head
from paceline_coreml.engine.artifact import Artifact
from paceline_coreml.rehearsal.plan import constants_of
from paceline_coreml.rehearsal.program import read_package

_TENSOR = 1 << 40
"""Elements per tensor in tags: a tag is the number of its tensor times this, plus the index."""

_MAX_ERROR = 0.4
"""Maximum error of a stored row / the usual length of its tensor's rows; int4 has about 0.1."""

_MAX_FACTOR = 1.1
"""Maximum factor between the length of a stored tensor and the checkpoint's, or its inverse."""

_QUANTIZATION = ("quantization", "quantization_config")
"""Fields of an mlx-lm config that the copy does not have, as its weights are dequantized."""

_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"

_Constants = dict[str, npt.NDArray[np.float32]]


def write_stored(artifact: Artifact, checkpoint: Path, family: Family, out: Path) -> list[str]:
    """Write the checkpoint to `out`, with the artifact's weights and all others in float16.

    Returns a fault if stored rows are not near the checkpoint's: the first tensor, and the number
    of others. Raises ModelError, before writing, if the disk has no room for all in float32.
    """
    writer = _Writer(checkpoint, family, out)
    for shard in artifact.layer_shards:
        constants = constants_of(read_package(artifact.folder / shard.path).function())
        for index in range(shard.start, shard.end):
            writer.place(writer.tagged.layer(index), f"layers.{index}", constants)
            writer.save()
    for shard in artifact.head_shards:
        constants = constants_of(read_package(artifact.folder / shard.path).function())
        writer.place(Head(writer.tagged, shard.start, shard.end), "", constants)
    writer.finish()
    first, others = writer.faults[:1], len(writer.faults) - 1
    return [f"{fault} (and {others} more tensors)" if others else fault for fault in first]


class _Tags(Prefixed):
    """A checkpoint's tensors with tags, in float64, which has them exactly."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__(weights, "")
        self.names: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        shape = self._weights[name].shape
        first = len(self.names) * _TENSOR
        self.names.append(name)
        return torch.arange(first, first + shape.numel(), dtype=torch.float64).view(shape)


class _Writer:
    def __init__(self, checkpoint: Path, family: Family, out: Path) -> None:
        config, self._tensors = read_checkpoint(checkpoint)
        self._tensors.expect_model(config)
        needed = 4 * self._tensors.weights
        check_space(out.parent, "a float32 copy of the checkpoint", needed, TEMPORARY)
        self._out = out
        self._tags = _Tags(self._tensors)
        self.tagged = family.with_weights(self._tags)
        self.faults: list[str] = []
        self._files: dict[str, str] = {}
        self._changed: dict[str, Tensor] = {}
        # A tied head has the embeddings' numbers, but is compressed.
        self._tied = not family.shape.labels and _HEAD not in self._tensors
        for path in checkpoint.glob("*.json"):
            shutil.copyfile(path, out / path.name)
        config = read_json(out / CONFIG)
        for field in _QUANTIZATION:
            config.pop(field, None)
        write_json(out / CONFIG, config | ({"tie_word_embeddings": False} if self._tied else {}))

    def place(self, module: nn.Module, prefix: str, constants: _Constants) -> None:
        """Put the constants of a module's parameters into the checkpoint's tensors."""
        parameters = dict(module.named_parameters())
        for name, tags in parameters.items():
            if tags.dtype != torch.float64:
                continue  # not from the checkpoint
            mangled = f"{prefix}.{name}".lstrip(".").replace(".", "_")
            found = next((one for one in constants if one.startswith(f"{mangled}_to_")), None)
            scale = torch.ones(())
            if found is None and name in (merged := getattr(module, "merged", {})):
                # Constants without a parameter's name are in the order of the layers.
                found = next(
                    (one for one in constants if constants[one].shape == tuple(tags.shape)), None
                )
                # As the copy has it, so that its product is the stored weight.
                scale = self._numbers(parameters[merged[name]]).half().float().view(-1, 1, 1, 1)
            if found is not None and constants[found].size == tags.numel():
                stored = torch.from_numpy(np.array(constants.pop(found))).view(tags.shape)
                self._put(tags.detach().long(), stored / scale)

    def _put(self, tags: Tensor, numbers: Tensor) -> None:
        first, last = int(tags.min()) // _TENSOR, int(tags.max()) // _TENSOR
        for number in range(first, last + 1):
            start = number * _TENSOR
            chosen = ... if first == last else (tags >= start) & (tags < start + _TENSOR)
            places = tags[chosen] - start
            if len(places):
                self._target(self._tags.names[number]).view(-1)[places] = numbers[chosen]

    def _target(self, name: str) -> Tensor:
        written = _HEAD if self._tied and name == _EMBEDDINGS else name
        if written not in self._changed:
            self._changed[written] = self._tensors[name].clone()
        return self._changed[written]

    def _numbers(self, tags: Tensor) -> Tensor:
        """Return the checkpoint's numbers at the tags, which are of one tensor."""
        places = tags.detach().long()
        name = self._tags.names[int(places.flatten()[0]) // _TENSOR]
        return self._tensors[name].view(-1)[places % _TENSOR]

    def save(self) -> None:
        """Check the changed tensors, and write them."""
        for name, stored in self._changed.items():
            original = self._tensors[_EMBEDDINGS if name not in self._tensors else name]
            self._check(
                name, stored.view(-1, stored.shape[-1]), original.view(-1, stored.shape[-1])
            )
        self._write(self._changed)
        self._changed = {}

    def _check(self, name: str, stored: Tensor, original: Tensor) -> None:
        usual = float(original.norm()) / len(original) ** 0.5
        wrong = ~((stored - original).norm(dim=1) <= _MAX_ERROR * usual)
        factor = float(stored.norm() / original.norm()) if usual else 1.0
        if wrong.any():
            count = f"{int(wrong.sum())} of {len(wrong)} rows"
            self.faults.append(f"{name}: {count} of the stored weight are not the checkpoint's")
        elif not 1 / _MAX_FACTOR <= factor <= _MAX_FACTOR:
            wrong[:] = True
            self.faults.append(f"{name}: the stored weight is {factor:.3g} times the checkpoint's")
        stored[wrong] = original[wrong]

    def _write(self, tensors: Mapping[str, Tensor]) -> None:
        file = f"part-{len(self._files)}.safetensors"
        save_file({name: _packed(t) for name, t in tensors.items()}, self._out / file, _FORMAT)
        self._files.update(dict.fromkeys(tensors, file))

    def finish(self) -> None:
        """Write the remaining tensors and the index."""
        if self._tied:
            self._target(_EMBEDDINGS)
        self.save()
        for name in self._tensors:
            is_part = self._tensors.quantized and name.endswith((".scales", ".biases"))
            if name not in self._files and not is_part:
                self._write({name: self._tensors[name].half()})
        write_json(self._out / INDEX, {"metadata": {}, "weight_map": self._files})


def _packed(tensor: Tensor) -> Tensor:
    """Return float16 if it has all numbers, else float32, as for INT8's products with scales."""
    half = tensor.half()
    return (half if torch.equal(half.float(), tensor.float()) else tensor).contiguous()


_FORMAT = {"format": "pt"}
