"""The chain of one layer; see `paceline_mlx.heads`. Each form of head has a file of its own."""

from collections.abc import Callable
from pathlib import Path

from paceline.storage.files import read_json
from paceline_mlx.heads.config import CONFIG
from paceline_mlx.heads.mtp import eagle3, qwen3_5
from paceline_mlx.heads.mtp.head import ChainConfig


def read_config(folder: Path, target_layers: Callable[[], int]) -> ChainConfig:
    """The shape of the EAGLE-3 head in a folder, or of the head of a Qwen3.5 checkpoint.

    `target_layers` counts the target's layers, if the checkpoint leaves its taps out. Raises
    ModelError if the folder has neither, or an unsupported form.
    """
    if qwen3_5.is_checkpoint(folder):
        return qwen3_5.read_config(folder)
    return eagle3.read_config(folder, target_layers)


def layers_of(target: Path) -> int:
    """Number of a checkpoint's layers. Raises ModelError if its config cannot be read."""
    config = read_json(target / CONFIG)
    return int(config.get("text_config", config).get("num_hidden_layers", 0))
