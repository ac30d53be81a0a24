"""`mtp`: a head of one layer that drafts a chain of tokens from the target's hidden states.

Two forms of heads: EAGLE-3 (`eagle3`), a checkpoint that is trained for a target, and the MTP head
that comes inside Qwen3.5 (`qwen3_5`). `checkpoint` has what both compute, and `read` reads any.
`graph` and `openvino_head` run it in OpenVINO, `mlx_head` in MLX; `cache` keeps its keys and values
in step with acceptance, and `drafter` drafts for one request.
"""

from paceline.drafters.mtp.cache import HeadCache
from paceline.drafters.mtp.checkpoint import Head, HeadConfig, HeadWeights
from paceline.drafters.mtp.drafter import MtpDrafter
from paceline.drafters.mtp.head import ChainCost, DraftHead, Rows
from paceline.drafters.mtp.mlx_head import MlxHead
from paceline.drafters.mtp.openvino_head import OpenVinoHead
from paceline.drafters.mtp.qwen3_5 import has_head, names_head
from paceline.drafters.mtp.read import read_config, read_head

__all__ = [
    "ChainCost",
    "DraftHead",
    "Head",
    "HeadCache",
    "HeadConfig",
    "HeadWeights",
    "MlxHead",
    "MtpDrafter",
    "OpenVinoHead",
    "Rows",
    "has_head",
    "names_head",
    "read_config",
    "read_head",
]
