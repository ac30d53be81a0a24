"""Joins the shards of a split GGUF model, if they are all there and belong together."""

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import ModelError
from paceline.models.names.hub_names import shards_beside
from paceline.storage.gguf_file import GgufFile, read_gguf, short, write_gguf
from paceline.storage.progress import Progress

_NUMBER, _COUNT, _TENSORS = _FIELDS = ("split.no", "split.count", "split.tensors.count")


def first_shard(path: Path) -> Path:
    """The first shard of a model, of any of its shards. Raises ModelError if one is missing."""
    shards = shards_beside(path)
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing and len(shards) > 1:
        raise ModelError(
            f"{path.name} is one of {len(shards)} files of a model; missing in {path.parent}: "
            f"{', '.join(missing)}"
        )
    return shards[0]


def join(paths: Sequence[Path], target: Path, progress: Progress) -> GgufFile:
    """Write the model in the shards `paths` to `target`, and return its content.

    Raises ModelError unless each file is whole, and says that it is this part of one model; and
    OSError.
    """
    files = [read_gguf(path) for path in paths]
    for number, (path, file) in enumerate(zip(paths, files, strict=True)):
        for field, value in ((_NUMBER, number), (_COUNT, len(paths))):
            if file.fields.get(field) != value:
                raise ModelError(
                    f"{path} is not part {number + 1} of {len(paths)} of its model: its {field} is "
                    f"{short(file.fields.get(field))}, expected {value}; fetch it again"
                )
    tensors = [tensor for file in files for tensor in file.tensors]
    if (count := files[0].fields.get(_TENSORS, len(tensors))) != len(tensors):
        raise ModelError(
            f"{paths[0]} and its other parts have {len(tensors)} tensors, expected {short(count)}: "
            "they are not of the same model; fetch them again"
        )
    about = {name: value for name, value in files[0].fields.items() if name not in _FIELDS}
    raw = {name: files[0].raw[name] for name in about}
    forms = {tensor.name: (tensor.kind, tensor.data.nbytes) for tensor in tensors}
    total = sum(size for _, size in forms.values())
    with progress.task(f"joining {len(paths)} files of {paths[0].name}", total) as update:
        write_gguf(target, GgufFile(about, raw, tensors), forms, lambda tensor: tensor.data, update)
    return read_gguf(target)
