"""Heads: drafters with a network that reads the target's hidden states.

A head runs where its target does, so each engine's package has its own: an entry point
`ENGINE.KIND` in the group `paceline.drafters`, selected with `--drafter KIND:FOLDER`. Independent
of a head's computation; heads of other engines are not imported.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol, Self

from paceline import plugins
from paceline.decoding.sampling import Sampling
from paceline.decoding.types import DeferredRows, Drafter, Proposal
from paceline.drafters.draft_sampling import DraftSampler
from paceline.errors import ModelError
from paceline.storage.files import read_text_config
from paceline.storage.gguf_file import read_gguf

_PRIOR = 1e-3
"""Seconds per draft before one was timed: short enough that a head is tried."""

_WEIGHT = 0.2
"""Weight of the newest draft in the mean of their seconds."""

MIN_CHANCE = 0.15
"""A chain ends when its estimated probability that all its drafts are right falls below this: one
more row of the target costs about a tenth of a forward pass."""

_MAX_READ = 32
"""Most rows of text that a draft may read and still be timed. A prompt is read only once, and would
make a head seem too slow to use in the response."""


class HeadCache(Protocol):
    """A head's own KV for one sequence."""

    def copy(self, position: int) -> Self:
        """Return an independent copy of the tokens before this position."""
        ...

    def truncate(self, position: int) -> None:
        """Drop everything that depends on tokens at or after this position."""
        ...


class OpenHead(Protocol):
    """A head opened for a target; all requests share it."""

    taps: tuple[int, ...]
    """Layers of the target whose hidden states it reads."""

    def new_cache(self) -> HeadCache:
        """Return an empty cache for a sequence."""
        ...

    def drafter(self, cache: Any, sampling: Sampling, prompt_length: int) -> Drafter:
        """Create the drafter of one request; `cache` may have earlier tokens of its sequence."""
        ...


class Sizes(NamedTuple):
    """A target's sizes, which identify the drafters that fit it."""

    architecture: str
    layers: int
    """Layers, without those that draft."""
    width: int
    vocabulary: int


class HeadFacts(NamedTuple):
    kind: str
    """The drafter that runs it, as in `KIND:FOLDER`."""
    form: str
    """Name of its architecture."""
    hidden_size: int
    """The target's hidden size; the fields below are also the target's."""
    vocab_size: int
    layers: int | None
    """None if the files do not specify it."""


def check_fits(folder: Path, head: HeadFacts, target: Sizes) -> None:
    """Raise ModelError, with every size that differs, if a head is for another target."""
    pairs = {
        "hidden size": (head.hidden_size, target.width),
        "number of target layers": (head.layers, target.layers),
        "vocabulary": (head.vocab_size, target.vocabulary),
    }
    faults = [
        f"its {name} is {its}, the target's {targets}"
        for name, (its, targets) in pairs.items()
        if its is not None and its != targets
    ]
    if faults:
        raise ModelError(
            f"{folder} is a drafter for another target: {'; '.join(faults)}; use one for this model"
        )


class HeadKind(Protocol):
    """An entry point's object: heads of one kind, for the targets of one engine."""

    options: Mapping[str, Sequence[int]]
    """Option -> its values; empty: 1 or more."""

    def is_inside(self, target: Path) -> bool:
        """Return whether a target's own files have such a head, which `auto` may use."""
        ...

    def taps(self, folder: Path, target: Path) -> tuple[int, ...]:
        """Return `OpenHead.taps`, read from the config alone. Raises ModelError."""
        ...

    def open(self, folder: Path, engine: Any, options: Mapping[str, int]) -> OpenHead:
        """Open the head in `folder` for the target of `engine`. Raises ModelError."""
        ...

    def facts(self, folder: Path) -> HeadFacts | None:
        """Return the head's facts, or None for other folders. Raises ModelError if it is faulty."""
        ...


class DraftCost:
    """The running mean of a head's seconds per draft."""

    seconds: float = _PRIOR
    _drafts: int = 0

    def observe(self, seconds: float, read: int) -> None:
        """Record a draft that read `read` rows; the first, which may compile, is left out."""
        if read > _MAX_READ:
            return
        if self._drafts == 1:
            self.seconds = seconds
        elif self._drafts > 1:
            self.seconds += _WEIGHT * (seconds - self.seconds)
        self._drafts += 1


class HeadDrafter(Drafter):
    """Drafts for one request. All requests to a target share the network."""

    def __init__(self, network: Any, cache: Any, sampling: Sampling, prompt_length: int) -> None:
        """Draft with `network`, and pick as `sampling` does after a prompt.

        `cache` may have earlier tokens of the sequence.
        """
        self.name: str = network.name
        self._network, self._cache = network, cache
        self._sampler = DraftSampler(sampling, prompt_length, network.vocab_size)
        self._drafted_at = -1
        """Length of the context that `_draft` was made for."""
        self._draft = Proposal((), self.name)

    @abstractmethod
    def drafts(self, context: Sequence[int], limit: int) -> tuple[Sequence[int], Sequence[float]]:
        """Return draft tokens and their probabilities; none without the context's hidden states."""

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        if self._drafted_at != len(context):
            self._drafted_at = len(context)
            started, read = perf_counter(), self._cache.pending_count
            tokens, chances = self.drafts(context, limit)
            if isinstance(chances, DeferredRows):
                chances = self._timed(chances, started, read)
            elif tokens:
                self._network.cost.observe(perf_counter() - started, read)
            self._draft = Proposal(tokens, self.name, 0, chances)
        return self._draft.cut(limit)

    def cost(self, limit: int) -> float:
        return float(self._network.cost.seconds)

    def _timed(
        self, chances: DeferredRows[float], started: float, rows: int
    ) -> DeferredRows[float]:
        """Time the first read of the probabilities, which `auto` makes before verification."""

        def read() -> Sequence[float]:
            values = list(chances)
            self._network.cost.observe(perf_counter() - started, rows)
            return values

        return DeferredRows(read, len(chances))


class DraftKV(dict[str, HeadCache]):
    """Caches of one sequence's heads, keyed by their spec.

    Kept with the sequence, and truncated with it.
    """

    def copy_prefix(self, length: int) -> "DraftKV":
        """Return a copy of the first `length` tokens."""
        return DraftKV({key: cache.copy(length) for key, cache in self.items()})

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        for cache in self.values():
            cache.truncate(length)


def engines_by_kind() -> dict[str, list[str]]:
    """Map each kind of head to the engines whose targets it drafts for."""
    engines: dict[str, list[str]] = {}
    for name in plugins.names(plugins.DRAFTERS):
        engine, _, kind = name.partition(".")
        engines.setdefault(kind, []).append(engine)
    return engines


def load_kind(engine: str, kind: str) -> HeadKind:
    """Import a kind of heads. Raises PluginError if that fails."""
    head: HeadKind = plugins.load(plugins.DRAFTERS, f"{engine}.{kind}")
    return head


def read_facts(folder: Path) -> HeadFacts | None:
    """Return the facts of the head in a folder, or None. Raises ModelError if it is faulty."""
    found = (
        load_kind(engine, kind).facts(folder)
        for kind, engines in engines_by_kind().items()
        for engine in engines
    )
    return next(filter(None, found), None)


def sizes_of(path: Path) -> tuple[Sizes, str]:
    """Return the sizes of a GGUF file or checkpoint folder, and the model's name in its files.

    Raises ModelError if the files lack a size.
    """
    if path.is_dir():
        config = read_text_config(path)
        keys = ("num_hidden_layers", "hidden_size", "vocab_size")
        return _sizes(path, config.get("model_type"), *map(config.get, keys)), path.name
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    return _of_gguf(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=16)
def _of_gguf(path: Path, _changed: int, _bytes: int) -> tuple[Sizes, str]:
    content = read_gguf(path)
    fields = content.fields
    tokens = fields.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) else 0
    width = content.family_value("embedding_length")
    sizes = _sizes(path, content.family, content.family_value("block_count"), width, count)
    drafting = content.family_value("nextn_predict_layers")
    layers = sizes.layers - drafting if isinstance(drafting, int) else sizes.layers
    names = ("general.name", "general.basename", "general.base_model.0.repo_url")
    return sizes._replace(layers=layers), " ".join(str(fields.get(name, "")) for name in names)


def _sizes(path: Path, family: object, *counts: object) -> Sizes:
    if not isinstance(family, str) or not all(isinstance(n, int) and n > 0 for n in counts):
        raise ModelError(
            f"{path} is {family!r} with {', '.join(map(str, counts))} layers, width and tokens; "
            "expected a name and numbers: download it again"
        )
    return Sizes(family, *counts)  # type: ignore[arg-type]
