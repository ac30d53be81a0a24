"""Slots with the beginnings of prompts, for prompts that begin the same.

Requests that have ended leave theirs behind; the least recently used goes first when its slots are
needed. Those that are being read or written show theirs: others may share what is there so far.

Knows sequences and tokens; knows nothing of requests. Entries are compared one by one: there are as
many as the engine has slots for, some hundreds at most.
"""

import logging
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.drafters import Memory
from paceline.engines.base import Engine, KVSequence

log = logging.getLogger(__name__)

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Begun:
    """A sequence that holds the beginning of a prompt, perhaps none of it."""

    slots: KVSequence
    memory: Memory = field(default_factory=Memory)
    """What drafters know of those tokens."""
    found: int = 0
    """Tokens that were in the cache."""
    taken: bool = False
    """Whether it is an entry of the cache itself, which could not be shared."""


_MOST_ENTRIES = 512
"""Entries that are kept at most, whatever room there is: each is compared with every prompt."""


@dataclass(slots=True, eq=False)
class _Entry:
    tokens: Tokens
    slots: KVSequence
    memory: Memory
    salt: str
    kept: bool = True
    """Whether it is the cache's own, and not shown by a sequence that goes on."""

    def same(self, prompt: Tokens) -> int:
        """How many of a prompt's first tokens its slots hold."""
        return _same(self.tokens[: self.slots.shareable_length], prompt)


class PromptCache:
    """The cache of one engine. Not for several threads."""

    def __init__(self, engine: Engine) -> None:
        """An empty cache; it may take all slots that nobody else needs."""
        self._engine = engine
        self._entries: list[_Entry] = []  # the least recently used first
        self.asked = 0
        """Tokens of prompts that were looked up."""
        self.found = 0
        """Of these, those that were there."""

    def __len__(self) -> int:
        return sum(entry.kept for entry in self._entries)

    @property
    def tokens(self) -> int:
        """Tokens that are kept; what several entries share counts for each."""
        return sum(len(entry.tokens) for entry in self._entries if entry.kept)

    def begin(self, prompt: Tokens, salt: str = "") -> Begun:
        """A sequence for a prompt, with as much of its beginning as is here.

        Args:
            prompt: [n] token ids.
            salt: only what was kept under the same is found.
        """
        self.asked += len(prompt)
        most = self.find(prompt, salt)
        if not most:
            return Begun(self._engine.open())
        begun = self._take_over(self._entries[-1], most)
        self.found += begun.found
        return begun

    def put_back(self, prompt: Tokens, begun: Begun, salt: str = "") -> None:
        """Undo a `begin` whose request is not admitted yet; the cache is as it was."""
        self.asked -= len(prompt)
        self.found -= begun.found
        if begun.taken:
            self.keep(prompt, begun, salt)
        else:
            release(begun.slots)

    def find(self, prompt: Tokens, salt: str = "") -> int:
        """How many of a prompt's first tokens are here; who has them will be the last to go."""
        best, most = None, 0
        for entry in self._entries:
            # The last token of a prompt is always run: its row picks the first of the answer.
            same = entry.same(prompt[:-1]) if entry.salt == salt else 0
            if same > most:
                best, most = entry, same
        if best is not None:
            self._entries.remove(best)
            self._entries.append(best)
        return most

    def show(self, prompt: Tokens, begun: Begun, salt: str = "") -> None:
        """Let others share what a sequence holds of its prompt, now and later, until `hide`."""
        self._entries.append(_Entry(prompt, begun.slots, begun.memory, salt, kept=False))

    def hide(self, begun: Begun) -> None:
        """A sequence is shown no more."""
        self._entries = [e for e in self._entries if e.kept or e.slots is not begun.slots]

    def awaited(self, prompt: Tokens, salt: str = "") -> int:
        """How many more of a prompt's tokens will be here when those are read that are shown."""
        own = [entry for entry in self._entries if entry.salt == salt]
        here = max((entry.same(prompt[:-1]) for entry in own), default=0)
        return max((_same(entry.tokens, prompt[:-1]) for entry in own), default=0) - here

    def keep(self, tokens: Tokens, begun: Begun, salt: str = "") -> None:
        """Take over a sequence that has ended; `tokens` [n] are those whose slots it holds."""
        if begun.slots.shareable_length < begun.slots.length:
            begun.slots.rewind(begun.slots.shareable_length)
            begun.memory.cut(begun.slots.length)
        held = begun.slots.length
        tokens = tokens[:held]
        if not held:
            release(begun.slots)
            return
        for entry in [each for each in self._entries if each.kept and each.salt == salt]:
            if _same(entry.tokens, tokens) == len(entry.tokens):  # the new one has all of it
                self._remove(entry)
        self._entries.append(_Entry(tokens, begun.slots, begun.memory, salt))
        if len(kept := self._kept()) > _MOST_ENTRIES:
            self._remove(kept[0])

    def make_room(self, slots: int) -> bool:
        """Evict the least recently used entries until `slots` slots are free; whether they are.

        Nothing is evicted where evicting all of them would not do.
        """
        if self._engine.free_slots >= slots:
            return True
        kept = [entry.slots for entry in self._kept()]
        if self._engine.free_slots + self._engine.freed_by(kept) < slots:
            return False
        while self._engine.free_slots < slots and self.evict():
            pass
        return self._engine.free_slots >= slots

    def evict(self) -> bool:
        """Evict the least recently used entry; False where there is none.

        Slots that other sequences hold too are not free after it.
        """
        kept = self._kept()
        if kept:
            self._remove(kept[0])
        return bool(kept)

    def clear(self) -> None:
        """Let everything go."""
        for entry in self._kept():
            self._remove(entry)

    def _kept(self) -> list[_Entry]:
        return [entry for entry in self._entries if entry.kept]

    def _take_over(self, entry: _Entry, most: int) -> Begun:
        slots = entry.slots.fork(most)
        try:
            length = slots.length
            if length or not entry.kept or 2 * most < len(entry.tokens):
                return Begun(slots, entry.memory.beginning(length), length)
        except Exception:
            release(slots)
            raise
        # There was nothing to share, as in an engine whose sequences share nothing. Most of the
        # entry is wanted, so it goes on itself.
        release(slots)
        entry.slots.rewind(most)
        length = entry.slots.length
        entry.memory.cut(length)
        self._entries.remove(entry)
        return Begun(entry.slots, entry.memory, length, taken=True)

    def _remove(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        release(entry.slots)


def release(slots: KVSequence) -> None:
    """Close a sequence; an engine that fails at it is asked once more, so that no slot is lost."""
    for _ in range(2):
        try:
            slots.close()
        except Exception:
            log.exception("the slots of a sequence cannot be given back")
        else:
            return


def _same(one: Tokens, other: Tokens) -> int:
    """How many tokens two texts begin with alike."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length
