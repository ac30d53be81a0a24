"""Which prompts are new, what they are about, and figures of how varied they are.

From words alone: no model, no network. A word is a run of letters or digits, or one letter of a
script that is written without spaces.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from statistics import median
from typing import Any

_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
)

_GRAM = 4
"""Words in a row of which figures and near duplicates are counted."""

_MOST_SEEN = 0.5
"""A prompt of which more of its runs of `_GRAM` words occurred before is a near duplicate."""

_EXCLUDED = 8
"""A prompt that has this many words in a row of an excluded one is dropped."""

_CODE = re.compile(
    r"```|\bdef \w+\(|\bfunction\b.*[({]|#include|\bSELECT\b.+\bFROM\b|</\w+>|[;{]\s*\n|=> |\(\);"
    r"|\b(python|javascript|html|css|sql|java|c\+\+|bash|regex)\b",
    re.IGNORECASE | re.DOTALL,
)

_TOPICS = {
    "cooking": "recipe|cook|bak(e|ing)|ingredient|dish|meal|kitchen|dinner|soup|cake",
    "health": "health|doctor|medic|disease|symptom|exercise|diet|sleep|vitamin|patient",
    "programming": "python|javascript|code|function|program|sql|html|algorithm|software|api",
    "mathematics": r"equation|sum of|calculate|triangle|probabil|how many|percent|\d ?[+*/=x] ?\d",
    "science": "physic|chemi|biolog|planet|atom|energy|cell|species|experiment|climate",
    "history": "history|war|century|king|empire|president|revolution|ancient",
    "places": "capital|country|city|travel|trip|island|river|mountain|map",
    "business": "business|company|market|customer|sales|e-?mail|meeting|product|invest|budget",
    "writing": "story|poem|write a|novel|character|dialogue|song|essay|letter",
    "language": "translate|grammar|sentence|word|spelling|language|rewrite|summari[sz]e",
    "school": "student|school|teach|learn|study|book|exam|university",
    "people": "friend|family|child|parent|love|feel|relationship|birthday",
}
_PATTERNS = {topic: re.compile(rf"\b({words})", re.IGNORECASE) for topic, words in _TOPICS.items()}

UNSEEN = ("cooking", "health")
"""Topics that nothing is learnt from: how a drafter does on them is how it does on new ones."""

_HELD_OUT = 20
"""One prompt in this many of the other topics is held out."""

TRAINING, HELD_OUT = "training", "held out"


class Variety:
    """The prompts so far, and what was dropped."""

    def __init__(self, excluded: Iterable[str] = ()) -> None:
        """Begin without prompts; those too much like one of `excluded` will be dropped."""
        self._excluded: set[int] = set()
        self._prompts: list[tuple[str, str, bool]] = []
        """Text, kind, and whether it is a second turn."""
        self._grams: set[int] = set()
        self._all_grams = 0
        self.dropped = Counter[str]()
        for text in excluded:
            self._excluded.update(_grams(_words(text), _EXCLUDED))

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, texts: Sequence[str], kind: str = "") -> None:
        """Count a prompt of an earlier run, which is the last of the user's texts."""
        self._prompts.append((texts[-1], kind, len(texts) > 1))
        grams = [*_grams(_words(texts[-1]), _GRAM)]
        self._grams.update(grams)
        self._all_grams += len(grams)

    def accepts(self, texts: Sequence[str], kind: str = "") -> bool:
        """Whether a prompt is new enough; if so, it is counted."""
        words = _words(texts[-1])
        grams = set(_grams(words, _GRAM))
        if not self._excluded.isdisjoint(_grams(words, _EXCLUDED)):
            self.dropped["excluded"] += 1
        elif sum(gram in self._grams for gram in grams) > _MOST_SEEN * len(grams):
            self.dropped["near duplicate"] += 1
        else:
            self.add(texts, kind)
            return True
        return False

    def figures(self) -> dict[str, Any]:
        """What the prompts are, for the report."""
        count = len(self._prompts)
        if not count:
            return {"prompts": 0, "dropped": dict(self.dropped)}
        texts, kinds, seconds = zip(*self._prompts, strict=True)
        return {
            "prompts": count,
            "distinct_4_grams": len(self._grams) / self._all_grams,
            "words": median(len(_words(text)) for text in texts),
            "topics": _shares(topic_of([text]) for text in texts),
            "openings": _shares(kinds),
            "code": sum(_CODE.search(text) is not None for text in texts) / count,
            "second_turns": sum(seconds) / count,
            "dropped": dict(self.dropped),
        }


def topic_of(texts: Sequence[str]) -> str:
    """What the messages of a user are about: a topic that nothing is learnt from goes first."""
    topics = (topic for topic, words in _PATTERNS.items() if any(map(words.search, texts)))
    return next(topics, "other")


def part_of(texts: Sequence[str]) -> str:
    """`TRAINING`, `HELD_OUT`, or a topic of `UNSEEN`: what the answer to the last message is for.

    It depends on the messages alone, so that a later run divides them in the same way.
    """
    topic = topic_of(texts)
    if topic in UNSEEN:
        return topic
    digest = int(sha256(texts[0].encode("utf-8", "replace")).hexdigest()[:8], 16)
    return TRAINING if digest % _HELD_OUT else HELD_OUT


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _grams(words: Sequence[str], length: int) -> Iterator[int]:
    """Hashes of `length` words in a row, the same in every process; of all if there are fewer."""
    for at in range(max(len(words) - length, 0) + 1):
        run = "\0".join(words[at : at + length])
        yield int.from_bytes(sha256(run.encode("utf-8", "replace")).digest()[:8])


def _shares(values: Iterable[str]) -> dict[str, float]:
    counts = Counter(values)
    return {value: count / counts.total() for value, count in counts.most_common()}
