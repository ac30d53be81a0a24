"""Heads for MLX targets, as the core's `HeadKind`: `dflash` fills a block, `mtp` drafts a chain.

DFlash is a block-diffusion drafter (arXiv 2602.06036; z-lab's checkpoints): a few Qwen3-style
layers without a causal mask. Queries come from the block, `[last token, mask, mask, ...]`; keys and
values from the block and from hidden states tapped from the target for all tokens so far. One layer
drafts a chain token by token: the target's own MTP head, or an EAGLE-3 head. Both kinds use the
target's embeddings and head.

MLX is imported only when a head is opened.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from paceline.drafters.heads import HeadFacts, OpenHead
from paceline.storage.files import read_text_config
from paceline_mlx.heads import mtp
from paceline_mlx.heads.config import architecture
from paceline_mlx.heads.dflash import checkpoint

_BITS: Final = (4, 8)
_USUAL_LAYERS = 32
"""Assumed layers of the target when describing an EAGLE-3 head without layer ids. Only its taps
depend on this number."""


class _DFlash:
    options: Mapping[str, Sequence[int]] = {"bits": _BITS, "window": ()}

    def is_inside(self, target: Path) -> bool:
        return False

    def read(self, folder: Path) -> Any:
        """Return the config of a checkpoint; does not import MLX."""
        return checkpoint.read_config(folder)

    def taps(self, folder: Path, target: Path) -> tuple[int, ...]:
        return checkpoint.read_config(folder).taps

    def open(self, folder: Path, engine: Any, options: Mapping[str, int]) -> OpenHead:
        from paceline_mlx.heads.dflash.network import Network

        return Network(folder, engine.model, **options)

    def facts(self, folder: Path) -> HeadFacts | None:
        form = checkpoint.FORMS.get(architecture(folder) or "")
        return checkpoint.read_config(folder).facts("dflash", form) if form else None


class _Mtp:
    options: Mapping[str, Sequence[int]] = {"bits": _BITS, "length": (), "vocab": ()}

    def is_inside(self, target: Path) -> bool:
        return mtp.qwen3_5.has_head(target)

    def taps(self, folder: Path, target: Path) -> tuple[int, ...]:
        config = mtp.read_config(
            folder, lambda: int(read_text_config(target).get("num_hidden_layers", 0))
        )
        return config.taps

    def open(self, folder: Path, engine: Any, options: Mapping[str, int]) -> OpenHead:
        from paceline_mlx.heads.mtp.network import ChainNetwork

        return ChainNetwork(folder, engine.model, **options)

    def facts(self, folder: Path) -> HeadFacts | None:
        if architecture(folder) not in mtp.eagle3.ARCHITECTURES:
            return None
        return mtp.eagle3.read_config(folder, lambda: _USUAL_LAYERS).facts("mtp", "EAGLE-3")


DFLASH, MTP = _DFlash(), _Mtp()
