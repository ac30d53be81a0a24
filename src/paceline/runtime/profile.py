"""The cost profile of a model, used as early as it can be and measured as late.

A small model is measured before its first answer with drafts: one of 135 M weights takes ten
seconds. A large one is measured in parts after its answers (`engines/profile_parts.py`), so that no
first token waits. Until then a policy gets costs that are too high for drafts rather than too low.
A profile that is outdated is used for one more answer: if its calls agree with it, it stays; else
it is measured again. Calls of answers correct the costs of longer blocks
(`engines/profile_watch.py`). Invariant: nothing here changes a token, only how many are drafted.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from paceline.decoding.costs import CostTable
from paceline.engines.base import Engine
from paceline.engines.invariance import (
    BATCH,
    BLOCK_LENGTH,
    CHUNKED_PREFILL,
    PREFIX_CACHE,
    Compared,
)
from paceline.engines.profile import (
    CostProfile,
    is_whole,
    known_profile,
    load_profile,
    mark_outdated,
    store_profile,
    stored_profiles,
    unmark,
)
from paceline.engines.profile_parts import PRIOR, measure_part, without_times
from paceline.engines.profile_watch import CostsInUse, ProfileWatch
from paceline.errors import CacheFull
from paceline.models import Progress, cache_dir
from paceline.runtime.stream import Stream

MEASUREMENTS = "measurements"
"""Folder in the cache of what was measured of models here."""
_LARGE_BYTES = 200_000_000
"""Of the weights of a model that is measured in parts."""
_SHARE = 0.1
"""Share of the time of answers that further parts may take."""


def stored_exactness(fingerprint: str) -> list[dict[str, Any]]:
    """What was compared of a model's rows here, as JSON: an entry for each way to run it."""
    return [
        {
            "engine": engine,
            "conditions": {name: compared.as_dict() for name, compared in profile.compared.items()},
        }
        for engine, profile in stored_profiles(fingerprint, cache_dir() / MEASUREMENTS)
    ]


class ModelProfile:
    """What calls of an engine cost on this machine, and what was compared of its rows."""

    def __init__(
        self,
        engine: Engine,
        fingerprint: str,
        folder: Path,
        progress: Progress,
        *,
        weights_bytes: int,
    ) -> None:
        """Measures and reads nothing yet.

        Args:
            engine: the engine with its model.
            fingerprint: identity of the model's weights.
            folder: folder of stored profiles.
            progress: shows a measurement.
            weights_bytes: size of the model's files.
        """
        self._engine, self._fingerprint, self._folder = engine, fingerprint, folder
        self._progress = progress
        self.in_parts = weights_bytes > _LARGE_BYTES
        """Whether it is measured in parts."""
        self._profile: CostProfile | None = None
        self._whole = False
        self._outdated = ""
        self._watch: ProfileWatch | None = None
        self._in_use: CostsInUse | None = None
        self.fixed = False
        """Whether answers leave the costs as they are."""
        self._seconds = 0.0  # that further parts may take now

    def whole(self, *, again: bool = False) -> CostProfile:
        """The whole profile, measured now if there is none, if it is outdated, or if `again`."""
        if again or not self._whole or self._profile is None:
            profile = load_profile(
                self._engine, self._fingerprint, self._folder, again=again, progress=self._progress
            )
            self._outdated, self._whole = "", True
            self._use(profile)
            return profile
        return self._profile

    def costs(self) -> CostTable:
        """Costs for a policy: those that are known; of a small model, measured now."""
        profile = self._known()
        if profile is not None:
            return profile.cost
        return PRIOR if self.in_parts else self.whole().cost

    def known_costs(self) -> CostTable | None:
        """Costs that are known; nothing is measured for them."""
        profile = self._known()
        return None if profile is None else profile.cost

    def compared(self, names: Collection[str]) -> Mapping[str, Compared] | None:
        """Conditions `names` -> comparison, measured now where one is missing.

        None: there were no slots to measure.
        """
        try:
            profile = self._known()
            if not self.in_parts and profile is None:
                profile = self.whole()
            while self.in_parts and (profile is None or not profile.compared.keys() >= {*names}):
                before, profile = profile, self._measure(names)
                if profile is before:  # it does not fit
                    break
        except CacheFull:
            return None
        assert profile is not None
        return {name: compared for name, compared in profile.compared.items() if name in names}

    def exactness(
        self, *, blocks: bool, cached: bool, shared: bool
    ) -> Mapping[str, Compared] | None:
        """What was compared of the conditions that an answer depends on; see `Model.exactness`.

        `blocks`: whether a block may have several rows.
        """
        conditions = {
            BLOCK_LENGTH: blocks,
            CHUNKED_PREFILL: cached or shared,
            PREFIX_CACHE: cached or shared,
            BATCH: shared,
        }
        names = [name for name, applies in conditions.items() if applies]
        return self.compared(names) if names else {}

    def learn(self, stream: Stream, *, shared: bool = False) -> None:
        """Compare an answer's calls with the profile, and measure a part if it is time.

        In calls that others share, nothing is measured.
        """
        if self._watch is None or stream.failed:
            return
        deviation = self._watch.add(stream.calls)
        self._correct(stream)
        with suppress(CacheFull):
            if self._outdated and self._watch.fits:
                self._outdated = ""
                unmark(self._engine, self._fingerprint, self._folder)
            elif (self._outdated or (deviation and self.in_parts)) and not shared:
                self._renew()
            elif deviation and self._mark(deviation):
                self._progress.say(f"{deviation}: it is measured again when the model is used next")
            if not shared:
                stats = stream.stats
                self._seconds += _SHARE * (stats.prefill_seconds + stats.decode_seconds)
                self._measure_further()

    def _known(self) -> CostProfile | None:
        """What was measured so far, here or in an earlier process."""
        if self._profile is None:
            profile, outdated = known_profile(self._engine, self._fingerprint, self._folder)
            if profile is not None and (self.in_parts or is_whole(profile, self._engine)):
                self._outdated = outdated
                self._use(profile)
        return self._profile

    def _use(self, profile: CostProfile) -> None:
        self._profile, self._watch, self._in_use = (
            profile,
            ProfileWatch(profile),
            CostsInUse(profile),
        )

    def _correct(self, stream: Stream) -> None:
        """Correct the costs by an answer's calls, and store them if they changed."""
        if self.fixed or self._profile is None or self._in_use is None:
            return
        corrections = self._in_use.add(stream.calls)
        if corrections is not None:
            self._profile = profile = replace(self._profile, corrections=corrections)
            store_profile(self._engine, self._fingerprint, self._folder, profile, measured=False)

    def _measure(self, names: Collection[str] = ()) -> CostProfile:
        """Measure a part and store it; the same object if there is none that fits."""
        profile = measure_part(self._engine, self._profile, names)
        if profile is not self._profile:
            store_profile(self._engine, self._fingerprint, self._folder, profile)
            self._use(profile)
        return profile

    def _measure_further(self) -> None:
        """Measure parts for as long as answers have left time for them."""
        while self.in_parts and self._seconds > 0:
            started, before = perf_counter(), self._profile
            if self._measure() is before:
                return
            self._seconds -= perf_counter() - started

    def _renew(self) -> None:
        """Replace the times of an outdated profile."""
        if not self.in_parts:
            self.whole(again=True)
        elif self._profile is not None:
            profile = measure_part(self._engine, without_times(self._profile))
            self._outdated, self._whole = "", False
            store_profile(self._engine, self._fingerprint, self._folder, profile)
            self._use(profile)

    def _mark(self, deviation: str) -> bool:
        return mark_outdated(self._engine, self._fingerprint, self._folder, deviation)
