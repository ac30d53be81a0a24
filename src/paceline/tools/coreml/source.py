"""What a Core ML model is made from: an origin, as the Hugging Face checkpoint that families read.

Knows transformers' reader of GGUF files, which is the authority on how their tensors are named and
ordered. The tokenizer is not its: the one it makes cuts some texts elsewhere.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paceline.errors import ModelError
from paceline.models import Origin, Progress, open_origin
from paceline.models.manifest import Facts
from paceline.storage.files import digest_of


class Source(NamedTuple):
    """What a model is made from."""

    name: str
    about: dict[str, str]
    """Where it is from, for the manifest."""
    identity: str
    """The same only for the same weights and config."""
    checkpoint: Path
    """Config and weights, as Hugging Face has them."""
    tokenizer: Path
    template: str | None
    facts: Facts


@contextlib.contextmanager
def open_source(name: str, temporary: Path | None, progress: Progress) -> Iterator[Source]:
    """The source that `name` means, until the end of the block.

    Args:
        name: see `open_origin`.
        temporary: where what has to be fetched or written is put; None: the system's folder.
        progress: told about long work.

    Raises:
        ModelNotFound: the name means nothing.
        ModelError: it cannot be fetched or read.
    """
    with tempfile.TemporaryDirectory(dir=temporary, prefix="paceline-coreml-") as made:
        origin = open_origin(name, Path(made), progress)
        checkpoint = origin.weights
        if origin.weights.is_file():
            checkpoint = Path(made) / "checkpoint"
            with progress.task(f"reading the weights of {origin.weights.name}"):
                _as_checkpoint(origin.weights, checkpoint)
        yield source_of(origin, checkpoint)


def source_of(origin: Origin, checkpoint: Path) -> Source:
    """An origin whose weights are in the folder `checkpoint`."""
    return Source(
        name=origin.name,
        about={"kind": origin.kind, "from": origin.name},
        identity=digest_of(origin.checksums()),
        checkpoint=checkpoint,
        tokenizer=origin.tokenizer,
        template=origin.template,
        facts=origin.facts,
    )


def _as_checkpoint(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as transformers does."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    except (ValueError, KeyError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{gguf} cannot be read by transformers: {reason}; give the model's Hugging Face form"
        ) from error
    # What save_pretrained refuses: it takes the model to be quantized still.
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")
