"""Reads the safetensors files of a head, for checkpoints of every form.

A file is untrusted: the safetensors library compares its header with its size, and any fault is a
ModelError. Values are read when they are asked for, so a head may be inside a large model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import ModelError
from paceline_mlx.hooks import Array

FLOATS = ("BF16", "F16", "F32")


class StoredTensor(NamedTuple):
    """A tensor of a file."""

    path: Path
    name: str
    dtype: str
    """As safetensors names it: `BF16`, `F32`, `I64`."""
    shape: tuple[int, ...]

    def load(self, *kinds: str) -> Array:
        """Its values, read when they are computed with; `kinds`: its dtype, one of these.

        Raises ModelError for another dtype.
        """
        import mlx.core as mx

        if self.dtype not in (kinds or FLOATS):
            raise ModelError(
                f"{self.path}: {self.name} is {self.dtype}, expected {', '.join(kinds or FLOATS)}"
            )
        try:
            tensors: Any = mx.load(str(self.path))
            return tensors[self.name]
        except RuntimeError as error:  # another tensor of the file is of a type that MLX lacks
            raise ModelError(f"{self.path} cannot be read by MLX: {error}") from error


Tensors = Mapping[str, StoredTensor]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of all safetensors files of a folder, by name.

    Raises ModelError if there is no such file, or one is not whole.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder} has no .safetensors file; expected a checkpoint")
    return {tensor.name: tensor for path in paths for tensor in _tensors_of(path)}


def _tensors_of(path: Path) -> list[StoredTensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            slices: dict[str, Any] = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return [
                StoredTensor(path, name, entry.get_dtype(), tuple(entry.get_shape()))
                for name, entry in slices.items()
            ]
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from error


def check_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Tensors, *, finite: bool = True
) -> None:
    """Check names and shapes of tensors, and if `finite` is set their values.

    Raises ModelError: the message names the first five faults and counts the others.
    """
    faults = []
    for name, shape in shapes.items():
        if name not in tensors:
            faults.append(f"{name} is missing")
        elif tensors[name].shape != shape:
            faults.append(f"{name} is {list(tensors[name].shape)}, expected {list(shape)}")
        elif finite and not _is_finite(tensors[name]):
            faults.append(f"{name} has values that are not finite")
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ModelError(f"the weights in {path} cannot be used: {'; '.join(faults[:5])}{more}")


def _is_finite(tensor: StoredTensor) -> bool:
    import mlx.core as mx

    return bool(mx.isfinite(tensor.load()).all())
