"""Openings: how prompts begin that the model writes.

Left to itself at an empty user's message, a small model asks a few kinds of questions again and
again. The first words of a message lead it elsewhere, and words of dictionaries lead it to as many
subjects as there are words. The same seed gives the same openings.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

from paceline.errors import InvalidRequest
from paceline.models import ModelFiles
from paceline_lab.learn.openings import Opening, user_opening
from paceline_lab.learn.openings import openings as general_openings

TEXTS = Path(__file__).with_name("openings.txt")
DICTIONARIES = Path("/usr/share/dict")
GENERAL, EMPTY = 15, 2500
"""How often each of `paceline learn`'s openings is taken, and an empty user's message."""
KNOWN = 2
"""Tokens of an English word at most: words that the model has seen often are short."""
SYSTEM = "system"
"""The kind whose text is a system message, not the first words of the user's."""

_NUMBERS = ((2, 12), (5, 60), (50, 999))
_SLOT = re.compile(r"\{([^{}]*)\}")


def write_openings(files: ModelFiles, dictionaries: Path, seed: int) -> list[Opening]:
    """Return openings of a chat model, shuffled.

    Raises ModelError for a model without a chat template, and InvalidRequest if a dictionary is
    missing.
    """
    rng = Random(seed)
    empty = user_opening(files)
    openings = [Opening(empty)] * EMPTY + general_openings(files) * GENERAL
    counts, lists = read_sections(TEXTS)
    lists |= read_dictionaries(dictionaries, files.tokenizer.encode)
    for kind, count in counts.items():
        for _ in range(count):
            text = drawn(rng.choice(lists[kind]), lists, rng)
            if kind == SYSTEM:
                system = user_opening(files, [{"role": "system", "content": text}])
                openings.append(Opening(system, kind))
            else:
                openings.append(Opening(empty + text, kind, text))
    rng.shuffle(openings)
    return openings


def read_sections(path: Path) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Kind -> how many to draw; name of a kind or list -> its entries."""
    counts: dict[str, int] = {}
    lists: dict[str, list[str]] = {}
    entries: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            name, _, count = line.strip("[]").partition(" ")
            entries = lists[name] = []
            if count:
                counts[name] = int(count)
        elif line and not line.startswith("#"):
            entries.append(line)
    return counts, lists


def read_dictionaries(folder: Path, encode: Callable[[str], Sequence[int]]) -> dict[str, list[str]]:
    """Return lists of words. Raises InvalidRequest if a file is missing."""

    def words(name: str, package: str) -> list[str]:
        try:
            lines = (folder / name).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise InvalidRequest(
                f"cannot read {folder / name} ({error.strerror}); expected a list of words, such "
                f"as Debian's package {package} has; install it, or name another folder with "
                "--dictionaries"
            ) from error
        return [line for line in lines if line.isalpha()]

    english = words("american-english", "wamerican")
    plain = [word for word in english if word.islower() and 4 <= len(word) <= 12]
    names = [word for word in english if word.istitle() and 3 <= len(word) <= 10]
    return {
        "word": [word for word in plain if len(encode(f" {word}")) <= KNOWN],
        "name": [name for name in names if len(encode(f" {name}")) <= KNOWN],
        "german": words("ngerman", "wngerman"),
        "french": words("french", "wfrench"),
    }


def drawn(entry: str, lists: Mapping[str, Sequence[str]], rng: Random) -> str:
    """Return `entry` with its slots drawn, innermost first."""

    def value(slot: re.Match[str]) -> str:
        if slot[1] == "number":
            return str(rng.randint(*rng.choice(_NUMBERS)))
        choices: Sequence[str] = slot[1].split("|") if "|" in slot[1] else lists[slot[1]]
        return rng.choice(choices)

    while _SLOT.search(entry):
        entry = _SLOT.sub(value, entry)
    return entry
