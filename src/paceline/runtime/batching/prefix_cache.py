"""Prefix cache: KV of earlier prompts, shared with prompts that begin with the same tokens.

A request that ends leaves its KV as an entry; the least recently used entry is evicted first. A
running request registers its KV too, so that others share the part computed so far. Prompts share
only under the same salt. Independent of requests and of the scheduler.
"""

import logging
from dataclasses import dataclass, field, replace

from paceline.decoding.types import common_prefix_length
from paceline.drafters import DraftKV
from paceline.engines.base import Engine, KVSequence
from paceline.runtime.batching.prompt_store import PromptStore, Tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """A sequence that holds the KV of a prompt's first tokens, possibly of none."""

    sequence: KVSequence
    memory: DraftKV = field(default_factory=DraftKV)
    """The drafters' state of those tokens."""
    hit_tokens: int = 0  # found in the cache
    moved: bool = False
    """True if the entry itself was taken out of the cache, because its KV could not be shared."""


_MAX_ENTRIES = 512
"""Limit on entries, even with free slots: each is compared with every prompt."""


@dataclass(slots=True, eq=False)
class _Entry:
    tokens: Tokens
    sequence: KVSequence
    memory: DraftKV
    salt: str
    owned: bool = True
    """True if the cache owns the sequence; False: a running request does."""

    def match(self, prompt: Tokens) -> int:
        """Return the length of the prompt's prefix whose KV this entry can share."""
        return common_prefix_length(self.tokens[: self.sequence.shareable_length], prompt)


class PrefixCache:
    """The prefix cache of one engine. Not thread-safe."""

    def __init__(self, engine: Engine, store: PromptStore | None = None) -> None:
        """Start empty; `store` also saves prompts without a salt on disk."""
        self._engine, self._store = engine, store
        self._entries: list[_Entry] = []  # least recently used first
        self.queried_tokens = self.hit_tokens = 0  # of prompts: looked up, found

    def __len__(self) -> int:
        return len(self._owned())

    @property
    def tokens(self) -> int:
        """The tokens of all entries; KV that several entries share counts for each."""
        return sum(len(entry.tokens) for entry in self._owned())

    def open(self, prompt: Tokens, salt: str = "") -> CachedPrefix:
        """Open a sequence with the longest cached prefix of a prompt, [n] token ids."""
        self.queried_tokens += len(prompt)
        length = self.find(prompt, salt)
        if not length:
            return CachedPrefix(self._engine.open())
        prefix = self._share(self._entries[-1], length)
        self.hit_tokens += prefix.hit_tokens
        return prefix

    def extend(self, prefix: CachedPrefix, prompt: Tokens, salt: str = "") -> CachedPrefix:
        """Add the part of an admitted prompt that is on disk."""
        if self._store is None or salt:
            return prefix
        added = self._store.extend(prefix.sequence, prompt)
        prefix.memory.truncate(prefix.sequence.length)
        self.hit_tokens += added
        return replace(prefix, hit_tokens=prefix.hit_tokens + added)

    def undo_open(self, prompt: Tokens, prefix: CachedPrefix, salt: str = "") -> None:
        """Revert `open` for a request that was not admitted, the counters included."""
        self.queried_tokens -= len(prompt)
        self.hit_tokens -= prefix.hit_tokens
        if prefix.moved:
            self.insert(prompt, prefix, salt)
        else:
            close_sequence(prefix.sequence)

    def find(self, prompt: Tokens, salt: str = "") -> int:
        """Return the length of the longest cached prefix; its entry becomes the most recently used.

        Selects the entry that can share most: hybrids share up to a checkpoint.
        """
        best, best_shared = None, (0, 0)
        for entry in self._entries:
            # The last prompt token is always computed: its row picks the answer's first token.
            match = entry.match(prompt[:-1]) if entry.salt == salt else 0
            shared = entry.sequence.fork_length(match), match
            if shared > best_shared:
                best, best_shared = entry, shared
        if best is not None:
            self._entries.remove(best)
            self._entries.append(best)
        return best_shared[1]

    def register(self, prompt: Tokens, prefix: CachedPrefix, salt: str = "") -> None:
        """Share the KV of a running request while its prefill continues, until `unregister`."""
        self._entries.append(_Entry(prompt, prefix.sequence, prefix.memory, salt, owned=False))

    def unregister(self, prefix: CachedPrefix) -> None:
        """Stop sharing the KV of a running request; current users of that KV are not affected."""
        self._entries = [e for e in self._entries if e.owned or e.sequence is not prefix.sequence]

    def pending_prefix(self, prompt: Tokens, salt: str = "") -> int:
        """Return the number of tokens of `prompt` that current prefills will add to the cache."""
        prompt = prompt[:-1]
        entries = [entry for entry in self._entries if entry.salt == salt]
        ready = max((entry.match(prompt) for entry in entries), default=0)
        later = max((common_prefix_length(entry.tokens, prompt) for entry in entries), default=0)
        return later - ready

    def insert(self, tokens: Tokens, prefix: CachedPrefix, salt: str = "") -> None:
        """Store a finished sequence, truncated to its shareable prefix.

        `tokens`: [n] ids of at least the tokens whose KV it holds.
        """
        sequence = prefix.sequence
        if sequence.shareable_length < sequence.length:
            sequence.rewind(sequence.shareable_length)
            prefix.memory.truncate(sequence.length)
        tokens = tokens[: sequence.length]
        if not len(tokens):
            close_sequence(sequence)
            return
        for entry in self._owned():
            shared = common_prefix_length(entry.tokens, tokens) if entry.salt == salt else -1
            if shared == len(entry.tokens):  # the new one has all of it
                self._remove(entry)
        if self._store is not None and not salt:
            self._store.save(sequence, tokens)
        self._entries.append(_Entry(tokens, sequence, prefix.memory, salt))
        if len(owned := self._owned()) > _MAX_ENTRIES:
            self._remove(owned[0])

    def evict_for(self, slots: int) -> bool:
        """Evict least recently used entries until `slots` slots are free; return whether they are.

        Nothing is evicted if evicting every entry would not free enough.
        """
        if self._engine.free_slots >= slots:
            return True
        sequences = [entry.sequence for entry in self._owned()]
        if self._engine.free_slots + self._engine.freed_by(sequences) < slots:
            return False
        while self._engine.free_slots < slots and self.evict():
            pass
        return self._engine.free_slots >= slots

    def evict(self) -> bool:
        """Evict the least recently used entry; return False if there is none."""
        owned = self._owned()
        if owned:
            self._remove(owned[0])
        return bool(owned)

    def clear(self) -> None:
        """Evict every entry. Files on disk stay."""
        while self.evict():
            pass

    def close(self) -> None:
        self.clear()
        if self._store is not None:
            self._store.close()

    def _owned(self) -> list[_Entry]:
        return [entry for entry in self._entries if entry.owned]

    def _share(self, entry: _Entry, length: int) -> CachedPrefix:
        fork = entry.sequence.fork(length)
        try:
            shared = fork.length
            if shared or not entry.owned or 2 * length < len(entry.tokens):
                return CachedPrefix(fork, entry.memory.copy_prefix(shared), shared)
        except Exception:
            close_sequence(fork)
            raise
        # The fork shares nothing (too short, or an engine that cannot share), and the prompt
        # matches most of the entry: move the entry itself.
        close_sequence(fork)
        entry.sequence.rewind(length)
        length = entry.sequence.length
        entry.memory.truncate(length)
        self._entries.remove(entry)
        return CachedPrefix(entry.sequence, entry.memory, length, moved=True)

    def _remove(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        close_sequence(entry.sequence)


def close_sequence(sequence: KVSequence) -> None:
    """Close a sequence, with one retry if the engine fails, so that no slot is lost."""
    for _ in range(2):
        try:
            sequence.close()
        except Exception:
            log.exception("cannot free the KV slots of a sequence")
        else:
            return
