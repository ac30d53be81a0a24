"""The one-layer chain drafter; see `paceline_mlx.heads`. Each head format has its own file."""

from collections.abc import Callable
from pathlib import Path

from paceline_mlx.heads.mtp import eagle3, qwen3_5
from paceline_mlx.heads.mtp.head import ChainConfig


def read_config(folder: Path, target_layers: Callable[[], int]) -> ChainConfig:
    """Return the config of an EAGLE-3 head in a folder, or of a Qwen3.5 checkpoint's MTP head.

    `target_layers` returns the target's number of layers; it is called if the checkpoint does not
    name its taps. Raises ModelError if the folder has no head in a supported format.
    """
    if qwen3_5.is_checkpoint(folder):
        return qwen3_5.read_config(folder)
    return eagle3.read_config(folder, target_layers)
