"""Selects new prompts, and divides them into training and evaluation data.

Uses words alone: no model, no network. A word is a run of letters or digits, or one letter of a
script that is written without spaces.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any

_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
)

_GRAM = 4
"""Consecutive words per n-gram, for the detection of near duplicates."""

_MAX_SEEN = 0.5
"""Maximum share of a prompt's n-grams that occurred before; above it is a near duplicate."""

_EXCLUDED = 8
"""Consecutive words that a dropped prompt shares with an excluded one."""

_TOPICS = {
    "cooking": "recipe|cook|bak(e|ing)|ingredient|dish|meal|kitchen|dinner|soup|cake",
    "health": "health|doctor|medic|disease|symptom|exercise|diet|sleep|vitamin|patient",
}
_PATTERNS = {topic: re.compile(rf"\b({words})", re.IGNORECASE) for topic, words in _TOPICS.items()}

UNSEEN = tuple(_TOPICS)
"""Topics excluded from learning: they show a drafter's speed on new topics."""

_HELD_OUT = 20
"""The reciprocal of the share of the other topics' prompts that is held out."""

TRAINING, HELD_OUT = "training", "held out"


class Variety:
    """The prompts so far, and counts of dropped ones."""

    def __init__(self, excluded: Iterable[str] = ()) -> None:
        """Begin without prompts; those too similar to one of `excluded` will be dropped."""
        self._excluded: set[int] = set()
        self._grams: set[int] = set()
        self._openings = Counter[str]()
        self.dropped = Counter[str]()
        for text in excluded:
            self._excluded.update(_grams(_words(text), _EXCLUDED))

    def __len__(self) -> int:
        return self._openings.total()

    def add(self, text: str, kind: str = "") -> None:
        """Count a prompt that was accepted in an earlier run."""
        self._grams.update(_grams(_words(text), _GRAM))
        self._openings[kind] += 1

    def accepts(self, text: str, kind: str = "") -> bool:
        """Return whether a prompt is new enough; if so, count it."""
        words = _words(text)
        grams = set(_grams(words, _GRAM))
        if not self._excluded.isdisjoint(_grams(words, _EXCLUDED)):
            self.dropped["excluded"] += 1
        elif sum(gram in self._grams for gram in grams) > _MAX_SEEN * len(grams):
            self.dropped["near duplicate"] += 1
        else:
            self.add(text, kind)
            return True
        return False

    def figures(self) -> dict[str, Any]:
        return {
            "prompts": len(self),
            "openings": dict(self._openings.most_common()),
            "dropped": dict(self.dropped),
        }


def part_of(texts: Sequence[str]) -> str:
    """Return the data set for the answer to the last message: `TRAINING`, `HELD_OUT`, or a topic.

    It depends on the messages alone, so that a later run divides them in the same way.
    """
    for topic, words in _PATTERNS.items():
        if any(map(words.search, texts)):
            return topic
    digest = int(sha256(texts[0].encode("utf-8", "replace")).hexdigest()[:8], 16)
    return TRAINING if digest % _HELD_OUT else HELD_OUT


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _grams(words: Sequence[str], length: int) -> Iterator[int]:
    """Yield hashes of `length` consecutive words, equal in every process; of all if fewer."""
    for at in range(max(len(words) - length, 0) + 1):
        run = "\0".join(words[at : at + length])
        yield int.from_bytes(sha256(run.encode("utf-8", "replace")).digest()[:8])
