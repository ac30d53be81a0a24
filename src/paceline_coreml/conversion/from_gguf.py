"""A GGUF file as a Hugging Face checkpoint, for runtimes that read only those.

transformers converts, because it is the authority on the names and order of tensors.
"""

from pathlib import Path

from paceline.errors import ModelError


def checkpoint_from_gguf(gguf: Path, folder: Path) -> None:
    """Make `folder`, a float32 checkpoint without tokenizer, of the GGUF file of a model.

    Needs torch and transformers. Raises ModelError if transformers does not read the file.
    """
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
    # save_pretrained refuses, because the config still says that the model is quantized.
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")
