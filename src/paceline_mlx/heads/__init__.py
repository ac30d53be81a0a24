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
        from paceline_mlx.heads.dflash.checkpoint import read_config

        return read_config(folder)

    def taps(self, folder: Path, target: Path) -> tuple[int, ...]:
        taps: tuple[int, ...] = self.read(folder).taps
        return taps

    def open(self, folder: Path, engine: Any, options: Mapping[str, int]) -> OpenHead:
        from paceline_mlx.heads.dflash.network import Network

        return Network(folder, engine.model, **options)

    def facts(self, folder: Path) -> HeadFacts | None:
        from paceline_mlx.heads.config import architecture
        from paceline_mlx.heads.dflash.checkpoint import FORMS, read_config

        if (name := architecture(folder)) not in FORMS:
            return None
        return read_config(folder).facts("dflash", FORMS[name])


class _Mtp:
    options: Mapping[str, Sequence[int]] = {"bits": _BITS, "length": (), "vocab": ()}

    def is_inside(self, target: Path) -> bool:
        from paceline_mlx.heads.mtp.qwen3_5 import has_head

        return has_head(target)

    def taps(self, folder: Path, target: Path) -> tuple[int, ...]:
        from paceline_mlx.heads.mtp import layers_of, read_config

        return read_config(folder, lambda: layers_of(target)).taps

    def open(self, folder: Path, engine: Any, options: Mapping[str, int]) -> OpenHead:
        from paceline_mlx.heads.mtp.network import ChainNetwork

        return ChainNetwork(folder, engine.model, **options)

    def facts(self, folder: Path) -> HeadFacts | None:
        from paceline_mlx.heads.config import architecture
        from paceline_mlx.heads.mtp.eagle3 import ARCHITECTURES, read_config

        if architecture(folder) not in ARCHITECTURES:
            return None
        return read_config(folder, lambda: _USUAL_LAYERS).facts("mtp", "EAGLE-3")


DFLASH, MTP = _DFlash(), _Mtp()
