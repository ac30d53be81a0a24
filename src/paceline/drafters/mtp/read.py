"""Reads a head of any form; every form has a file of its own."""

from collections.abc import Callable
from pathlib import Path

from paceline.drafters.mtp import eagle3, qwen3_5
from paceline.drafters.mtp.checkpoint import Head, HeadConfig


def read_config(path: Path, target_layers: Callable[[], int]) -> HeadConfig:
    """Read the shape of a head.

    Args:
        path: the folder of an EAGLE-3 head, or of a Qwen3.5 checkpoint, or a GGUF file.
        target_layers: counts the target's layers; called if the checkpoint leaves its taps out.

    Raises:
        ModelError: it is neither, or of an unsupported form.
    """
    if path.suffix == ".gguf":
        return qwen3_5.gguf_config(path)
    if qwen3_5.is_checkpoint(path):
        return qwen3_5.checkpoint_config(path)
    return eagle3.read_config(path, target_layers)


def read_head(path: Path, target_layers: Callable[[], int]) -> Head:
    """Read a head with its weights.

    Raises ModelError as `read_config` does, and for tensors that are missing, damaged, or of
    another shape.
    """
    config = read_config(path, target_layers)
    if not config.own:
        return eagle3.read_head(path, config)
    return qwen3_5.read_head(path, config)
