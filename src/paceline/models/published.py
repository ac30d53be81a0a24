"""Published drafters: which exist for a model, which are installed, and how to get one.

`published.json` lists them with their sources. A model is recognized by its architecture, layers,
width and vocabulary, and so are its fine-tunes; among models that agree in all four, the name or
the file's own metadata decides. Invariant: errors in this module cost speed, and change no token.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from paceline import drafters
from paceline.drafters import DrafterResources, HeadFacts, Sizes
from paceline.errors import ModelError, ModelNotFound, PacelineError
from paceline.models.files import ModelFiles
from paceline.models.installed import list_drafters
from paceline.models.resolver import cached_drafter, drafter_bytes, resolve_drafter
from paceline.storage.files import megabytes, read_json
from paceline.storage.progress import Progress
from paceline.storage.validation import Positive, validated

_DATA = Path(__file__).with_suffix(".json")
_ENGINES = {"gguf": "llamacpp", "safetensors": "mlx"}
"""Format -> the engine that runs it."""


@dataclass(frozen=True, slots=True)
class Gain:
    times: str
    """Speedup over plain decoding."""
    where: str
    source: str


@dataclass(frozen=True, slots=True)
class Published:
    """A drafter on the Hugging Face Hub."""

    target: str
    """Name of the model that it was trained for."""
    form: Literal["DFlash", "DFlash 2", "DSpark", "EAGLE-3"]
    format: Literal["gguf", "safetensors"]
    name: str
    """owner/name, or owner/name:TAG."""
    source: str
    bytes: Positive | None = None
    gain: Gain | None = None

    @property
    def kind(self) -> str:
        """The drafter kind that runs it, as in `--drafter KIND:NAME`."""
        return "mtp" if self.form == "EAGLE-3" else "dflash"

    @property
    def engine(self) -> str:
        return _ENGINES[self.format]

    def size(self) -> int | None:
        """Return the download size in bytes, from the registry or the Hub. None: unknown."""
        return self.bytes or (drafter_bytes(self.name) if self.find() is None else None)

    def line(self, model: str, bytes_: int | None) -> str:
        """Describe the drafter, its size and gains, and how a user of `model` gets it."""
        size = f", {megabytes(bytes_)}" if bytes_ else ""
        gain = f", {self.gain.times} times as fast on {self.gain.where}" if self.gain else ""
        way = f"is published: `paceline pull {model} --drafter` downloads it"
        if self.find() is not None:
            way = "is installed: --drafter auto uses it where it is faster"
        return f"a drafter for {self.target} ({self.form}{size}{gain}) {way}"

    def find(self) -> Path | None:
        return cached_drafter(self.name, gguf=self.format == "gguf")


@dataclass(frozen=True, slots=True)
class _Registry:
    targets: dict[str, Sizes]
    drafters: list[Published]
    """The best of a target first."""


@cache
def registry() -> _Registry:
    return validated(_Registry, read_json(_DATA), str(_DATA), error=ModelError)


def published_for(files: ModelFiles) -> list[Published]:
    """Return drafters for a model in the format of its engine; the first is the one to get."""
    try:
        sizes, said = drafters.sizes_of(files.path)
    except ModelError:  # errors of a model are reported when it is opened
        return []
    same = [name for name, target in registry().targets.items() if _plain(target) == _plain(sizes)]
    called = _letters(f"{files.name} {said}")
    named = [name for name in same if _letters(name) in called]
    return [
        drafter
        for drafter in registry().drafters
        if drafter.target in (named or same) and drafter.engine == files.engine
    ]


def fetch(files: ModelFiles, progress: Progress) -> None:
    """Download the best drafter for a model and check it.

    Raises:
        ModelNotFound: none is published.
        ModelError: it cannot be downloaded, or does not fit this model.
    """
    drafter = next(iter(published_for(files)), None)
    if drafter is None:
        known = ", ".join(
            dict.fromkeys(d.target for d in registry().drafters if d.engine == files.engine)
        )
        raise ModelNotFound(
            f"no published drafter for {files.name} is known for the engine {files.engine}; known "
            f"targets: {known or 'none'}; --drafter dflash:owner/name uses another drafter"
        )
    path = resolve_drafter(drafter.name, progress, gguf=drafter.format == "gguf")
    try:
        _check(drafter, files)
    except ModelError as error:
        name = next(one.name for one in list_drafters() if path in (one.file, one.folder))
        raise ModelError(f"{error}; `paceline rm {name}` removes it") from error


class Installed:
    """The installed published drafters for one model, as `auto` uses them."""

    def __init__(self, files: ModelFiles, progress: Progress) -> None:
        self._files, self._progress = files, progress
        self._specs: list[str] | None = None
        self._opened: object = None

    def specs(self, resources: DrafterResources) -> Sequence[str]:
        """Return a drafter of each kind that the model lacks; opened if its engine is.

        Drafters that do not fit, or cannot be opened, are reported once.
        """
        if self._specs is None:
            self._specs = [*self._fitting()]
        if resources.opened is not self._opened:
            self._opened = resources.opened
            for spec in [*self._specs]:
                try:
                    for drafter in drafters.create(spec, resources):
                        drafter.close()
                except PacelineError as error:
                    self._leave_out(error)
                    self._specs.remove(spec)
        return [spec for spec in self._specs if spec.partition(":")[0] not in resources.shipped]

    def _fitting(self) -> Iterator[str]:
        files = self._files
        here = [one for one in registry().drafters if one.engine == files.engine and one.find()]
        kinds = set[str]()
        for drafter in published_for(files) if here else ():  # else its file need not be read
            if drafter in here and drafter.kind not in kinds:
                try:
                    _check(drafter, files)
                except PacelineError as error:
                    self._leave_out(error)
                else:
                    kinds.add(drafter.kind)
                    yield f"{drafter.kind}:{drafter.name}"

    def _leave_out(self, error: PacelineError) -> None:
        self._progress.note(f"{' '.join(str(error).split())}; auto continues without it")


def _check(drafter: Published, files: ModelFiles) -> None:
    """Raise ModelError if an installed drafter does not fit a model."""
    path, kind = drafter.find(), drafters.load_kind(files.engine, drafter.kind)
    assert path is not None
    kind.taps(path, files.path)
    facts = kind.facts(path)
    if facts is None or not fits(facts, files.path):
        raise ModelError(
            f"{drafter.name} does not draft for {files.name}: expected a drafter for its width and "
            "vocabulary; use another drafter"
        )


def fits(facts: HeadFacts, path: Path) -> bool:
    """Return whether a drafter has the sizes of the model at a path."""
    try:
        sizes, _ = drafters.sizes_of(path)
    except ModelError:
        return False
    # Not all drafters specify the number of their target's layers.
    layers = facts.kind == "mtp" or facts.layers in (None, sizes.layers)
    return layers and (facts.hidden_size, facts.vocab_size) == (sizes.width, sizes.vocabulary)


def _plain(sizes: Sizes) -> Sizes:
    """Return sizes with the architecture's shared spelling: qwen3_5_text is qwen35 in GGUF."""
    return sizes._replace(architecture=_letters(sizes.architecture.removesuffix("_text")))


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
