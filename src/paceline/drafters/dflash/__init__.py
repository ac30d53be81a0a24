"""DFlash: a small network that fills a whole block in one pass, from what the target has seen.

The public form (arXiv 2602.06036; z-lab's checkpoints): a few Qwen3-style layers whose keys and
values come from two places, hidden states tapped from the target for all tokens so far, and the
block itself, `[last token, mask, mask, ...]`, without a causal mask. Embeddings and head are the
target's. `checkpoint` reads the files, `graph` builds the OpenVINO graph, `openvino_network` and
`mlx_network` run the network, `drafter` drafts with either.
"""

from paceline.drafters.dflash.checkpoint import Config, read_config
from paceline.drafters.dflash.drafter import DFlashDrafter
from paceline.drafters.dflash.mlx_network import MlxDFlash, MlxTarget
from paceline.drafters.dflash.network import Context, Network
from paceline.drafters.dflash.openvino_network import DFlash, HostRows

__all__ = [
    "Config",
    "Context",
    "DFlash",
    "DFlashDrafter",
    "HostRows",
    "MlxDFlash",
    "MlxTarget",
    "Network",
    "read_config",
]
