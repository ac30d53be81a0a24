"""Heads: drafters with a network that reads the target's hidden states.

A head runs where its target does, so the package of an engine has them: it names each as an entry
point `ENGINE.KIND` of the group `paceline.drafters`, and `--drafter KIND:FOLDER` names it here.
Independent of what a head computes; those of other engines are not imported.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from paceline import plugins
from paceline.decoding.sampling import Sampling
from paceline.decoding.types import Drafter
from paceline.drafters.sizes import Sizes
from paceline.errors import ModelError

_PRIOR = 1e-3
"""Seconds of a draft before one was timed: so few that a head is asked."""

_WEIGHT = 0.2
"""Weight of the newest draft in the mean of their seconds."""

_MOST_READ = 32
"""Rows of the text that a draft may read before it, and still cost what drafts do: a prompt's are
read once, and would make a head too dear to be asked again in its answer."""


class HeadCache(Protocol):
    """A head's own KV of one sequence."""

    def copy(self, position: int) -> Self:
        """An independent copy of what is before this position."""
        ...

    def truncate(self, position: int) -> None:
        """Drop what depends on the tokens from this position on."""
        ...


class OpenHead(Protocol):
    """A head opened for a target; all requests share it."""

    taps: tuple[int, ...]
    """Layers of the target whose hidden states it reads."""

    def new_cache(self) -> HeadCache:
        """An empty cache for a sequence."""
        ...

    def drafter(self, cache: Any, sampling: Sampling, prompt_length: int) -> Drafter:
        """The drafter of one request; `cache` may have earlier tokens of its sequence."""
        ...


class HeadFacts(NamedTuple):
    """What a head's files say of it."""

    kind: str
    """The drafter that runs it, as in `KIND:FOLDER`."""
    form: str
    """Name of its architecture."""
    hidden_size: int
    """Of its target, as what follows."""
    vocab_size: int
    layers: int | None
    """None: its files do not say."""


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
        raise ModelError(f"{folder} is a drafter for another target: {'; '.join(faults)}")


class HeadKind(Protocol):
    """What an entry point names: the heads of one kind, for the targets of one engine."""

    options: Mapping[str, Sequence[int]]
    """Option -> its values; empty: 1 or more."""

    def is_inside(self, target: Path) -> bool:
        """Whether a target's own files have such a head, which `auto` may take."""
        ...

    def taps(self, folder: Path, target: Path) -> tuple[int, ...]:
        """See `OpenHead.taps`; reads the config alone. Raises ModelError."""
        ...

    def open(self, folder: Path, engine: Any, options: Mapping[str, int]) -> OpenHead:
        """Open the head in `folder` for the target of `engine`. Raises ModelError."""
        ...

    def facts(self, folder: Path) -> HeadFacts | None:
        """None: it is no such head. Raises ModelError for one that is faulty."""
        ...


class DraftCost:
    """Seconds of a head's draft, a running mean."""

    def __init__(self) -> None:
        self.seconds = _PRIOR
        self._drafts = 0

    def observe(self, seconds: float, read: int) -> None:
        """Learn from a draft that read `read` rows; the first, which may compile, is left out."""
        if read > _MOST_READ:
            return
        if self._drafts == 1:
            self.seconds = seconds
        elif self._drafts > 1:
            self.seconds += _WEIGHT * (seconds - self.seconds)
        self._drafts += 1


class DraftKV(dict[str, HeadCache]):
    """Caches of one sequence's heads, by the text of their part of a spec.

    Kept with the sequence, and truncated with it.
    """

    def copy_prefix(self, length: int) -> "DraftKV":
        """A copy of the first `length` tokens."""
        return DraftKV({key: cache.copy(length) for key, cache in self.items()})

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        for cache in self.values():
            cache.truncate(length)


def engines_by_kind() -> dict[str, list[str]]:
    """Kind of head -> the engines whose targets it drafts for."""
    engines: dict[str, list[str]] = {}
    for name in plugins.names(plugins.DRAFTERS):
        engine, _, kind = name.partition(".")
        engines.setdefault(kind, []).append(engine)
    return engines


def load_kind(engine: str, kind: str) -> HeadKind:
    """Import a kind of heads. Raises PluginError if that fails."""
    head: HeadKind = plugins.load(plugins.DRAFTERS, f"{engine}.{kind}")
    return head


def inside(target: Path, engine: str) -> list[str]:
    """Kinds of the heads inside a target's own files."""
    kinds = [kind for kind, engines in engines_by_kind().items() if engine in engines]
    return [kind for kind in kinds if load_kind(engine, kind).is_inside(target)]


def read_facts(folder: Path) -> HeadFacts | None:
    """What the head in a folder is; None: it has none. Raises ModelError for a faulty one."""
    found = (
        load_kind(engine, kind).facts(folder)
        for kind, engines in engines_by_kind().items()
        for engine in engines
    )
    return next(filter(None, found), None)
