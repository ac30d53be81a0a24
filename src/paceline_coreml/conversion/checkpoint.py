"""Reads a Hugging Face checkpoint: config.json with transformers, tensors lazily, as float32."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.errors import ModelError
from paceline.storage.files import read_json

CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_ONE_FILE = "model.safetensors"


class CheckpointFolder(NamedTuple):
    """The config and tensors of a folder, for `Family`."""

    config: Any
    weights: Mapping[str, Tensor]


class MissingTensor(ModelError, KeyError):
    __str__ = Exception.__str__


class FolderTensors(Mapping[str, Tensor]):
    """The tensors of a folder by name, read on access."""

    def __init__(self, folder: Path) -> None:
        """Open the files. Raises ModelError if tensors are missing, or a file cannot be read."""
        from safetensors import safe_open

        self._files: dict[str, Any] = {}
        for path in _files(folder):
            try:
                file: Any = safe_open(path, framework="pt")
                self._files |= dict.fromkeys(file.keys(), file)
            except Exception as error:  # safetensors has its own error class, in Rust
                raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
        self._folder = folder

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._files:
            raise MissingTensor(
                f"{self._folder} has no tensor {name}; expected a complete checkpoint for its "
                f"{CONFIG}"
            )
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor.to(torch.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def read_checkpoint(folder: Path) -> CheckpointFolder:
    """Open a checkpoint folder.

    Raises ModelError if it has no config.json that transformers accepts, or no tensors.
    """
    from transformers import AutoConfig

    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder} has no {CONFIG}; expected a Hugging Face checkpoint")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"{folder / CONFIG} cannot be used: {error}") from error
    return CheckpointFolder(config, FolderTensors(folder))


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
    if (folder / _INDEX).is_file():
        try:
            names = read_json(folder / _INDEX)["weight_map"]
            paths = [folder / name for name in sorted(set(names.values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{folder / _INDEX} is not a safetensors index: {error}") from error
    else:
        paths = [folder / _ONE_FILE]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ModelError(
            f"{folder} has no {', '.join(missing)}; expected a checkpoint's safetensors files"
        )
    return paths
