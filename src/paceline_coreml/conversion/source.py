"""Opens the source of a conversion as a Hugging Face checkpoint, which families read.

The tokenizer of transformers is not used, because it splits some texts differently.
"""

import math
from pathlib import Path
from typing import NamedTuple

from paceline.drafters import read_facts
from paceline.errors import InvalidRequest, ModelError
from paceline.models import (
    TOKENIZER,
    Facts,
    ModelFiles,
    Progress,
    cached_drafter,
    open_origin,
    published,
    resolve_drafter,
)
from paceline.storage.files import digest_of, sha256_of
from paceline.storage.gguf_file import read_gguf
from paceline.storage.shards import shards_beside
from paceline_coreml.conversion.scratch import TEMPORARY, check_space


class Source(NamedTuple):
    name: str
    about: dict[str, str]
    """The provenance, for the manifest."""
    identity: str
    """A digest that is equal only for equal weights and config."""
    checkpoint: Path
    """A folder with config and weights in Hugging Face's format."""
    tokenizer: Path
    template: str | None
    facts: Facts
    target: Path | None = None
    """For a drafter: the folder with its target's weights. `tokenizer`, `template` and `facts` are
    then also the target's."""


def open_source(name: str, work: Path, progress: Progress, target: str | None = None) -> Source:
    """Open the source `name` (see `open_origin`); a drafter needs the name of its `target`.

    Keep the folder `work`, for downloads and converted weights, while the source is in use.

    Raises:
        InvalidRequest: it is a drafter, and `target` is missing.
        ModelNotFound: there is no such model.
        ModelError: it cannot be downloaded or read.
    """
    if target is None and (trained_for := _target_of_drafter(name)):
        raise InvalidRequest(
            f"{name} is a drafter for {trained_for}; give its target model with --target"
        )
    files = open_origin(name if target is None else target, work, progress)
    checkpoint = files.path
    if files.weights is not None:
        checkpoint = work / "checkpoint"
        with progress.task(f"reading the weights of {files.weights.name}"):
            checkpoint_from_gguf(files.weights, checkpoint)
    source = source_of(files, checkpoint)
    if target is None:
        return source
    folder = resolve_drafter(name, progress)
    own = {path.name: sha256_of(path) for path in _read_of(folder)}
    return source._replace(
        name=folder.name,
        about={"kind": "drafter", "from": name, "target": source.name},
        identity=digest_of({**own, "target": source.identity}),
        checkpoint=folder,
        target=checkpoint,
    )


def _target_of_drafter(name: str) -> str | None:
    """Return the model that a drafter was trained for, or None if it is not known as a drafter."""
    for drafter in published.registry().drafters:
        if drafter.name == name:
            return drafter.target
    folder = Path(name) if Path(name).is_dir() else cached_drafter(name, gguf=False)
    return "another model" if folder and read_facts(folder) else None


def source_of(files: ModelFiles, checkpoint: Path) -> Source:
    """Return the source for published files whose weights are in the folder `checkpoint`."""
    read = _read_of(files.folder) if files.weights is None else [files.weights]
    return Source(
        name=files.name,
        about={"kind": "checkpoint" if files.weights is None else "gguf", "from": files.name},
        identity=digest_of({path.name: sha256_of(path) for path in read}),
        checkpoint=checkpoint,
        tokenizer=files.folder / TOKENIZER,
        template=files.chat_template,
        facts=files.facts,
    )


def _read_of(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.safetensors"), folder / "config.json"])


def checkpoint_from_gguf(gguf: Path, folder: Path) -> None:
    """Convert a GGUF file to `folder`, a float32 checkpoint without tokenizer.

    transformers converts, because it is the authority on the names and order of tensors.

    Needs torch and transformers. Raises ModelError if transformers cannot read the file, or if it
    is a shard.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    if len(shards_beside(gguf)) > 1:
        raise ModelError(f"{gguf} is one of several files; use the Hugging Face checkpoint")
    weights = sum(math.prod(tensor.shape) for tensor in read_gguf(gguf).tensors)
    check_space(folder.parent, f"{gguf.name} in float32", 4 * weights, TEMPORARY)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    except (ValueError, KeyError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"transformers cannot read {gguf}: {reason}; use the Hugging Face checkpoint"
        ) from error
    # save_pretrained raises an error, because the config still has a quantization.
    tensors = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors")
