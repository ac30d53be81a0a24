"""The DFlash drafter of one request."""

from collections.abc import Sequence

from paceline_mlx.heads.drafter import HeadDrafter


class DFlashDrafter(HeadDrafter):
    """Drafts a block in one pass."""

    name = "dflash"

    def drafts(self, context: Sequence[int], limit: int) -> tuple[Sequence[int], Sequence[float]]:
        """A block after the last token, of any length."""
        cache = self._cache
        if not (cache.pending or len(cache)):
            return (), ()
        rows = cache.take_pending()
        sampler = self._sampler.following(context)
        drafted: tuple[Sequence[int], Sequence[float]] = self._network.draft(
            cache, context[-1], len(context) - 1, rows, sampler=sampler
        )
        return drafted
