"""DFlash: a block-diffusion drafter that fills a block of draft tokens in one forward pass.

The architecture is the public one (arXiv 2602.06036; z-lab's checkpoints): a few Qwen3-style layers
without a causal mask. Queries come from the block, `[last token, mask, mask, ...]`; keys and values
from the block and from hidden states tapped from the target for all tokens so far. Embeddings and
head are the target's. `checkpoint` reads the files, `graph` builds the OpenVINO graphs,
`openvino_network` and `mlx_network` run the network, `drafter` drafts with either.
"""

from paceline.drafters.dflash.checkpoint import Config
from paceline.drafters.dflash.config_file import read_config
from paceline.drafters.dflash.drafter import DFlashDrafter
from paceline.drafters.dflash.mlx_network import MlxNetwork
from paceline.drafters.dflash.network import Network
from paceline.drafters.dflash.openvino_network import HostKV, OpenVinoNetwork

__all__ = [
    "Config",
    "DFlashDrafter",
    "HostKV",
    "MlxNetwork",
    "Network",
    "OpenVinoNetwork",
    "read_config",
]
