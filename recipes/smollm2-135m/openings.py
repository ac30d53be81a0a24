"""Openings: how conversations begin that the model has with itself, as token ids.

Left to itself at an empty user's message, a small model asks a few kinds of questions again and
again. The first words of a message lead it elsewhere, and words of dictionaries lead it to as many
subjects as there are words. Independent of the network; the same seed gives the same openings.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidRequest, ModelError
from paceline.models import ModelFiles
from paceline_lab.learn.openings import openings as general_openings
from paceline_lab.train.prompts import user_opening

TEXTS = Path(__file__).with_name("openings.txt")
DICTIONARIES = Path("/usr/share/dict")
LONGEST = 56
"""Tokens of an opening."""
GENERAL, EMPTY = 15, 2500
"""How often each of `paceline learn`'s openings is taken, and an empty user's message."""
KNOWN = 2
"""Tokens of an English word at most: words that the model has seen often are short."""
SYSTEM = "system"
"""The kind whose text is a system message, not the first words of the user's."""

_NUMBERS = ((2, 12), (5, 60), (50, 999))
_SLOT = re.compile(r"\{([^{}]*)\}")
_MARKS = "\u2063user\u2063", "\u2063answer\u2063", "\u2063again\u2063"


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """What conversations have in common."""

    openings: npt.NDArray[np.int32]
    """[count, longest]: tokens up to where the model goes on; -1 after the end."""
    end: int
    """The token that ends a message."""
    to_answer: Sequence[int]
    """The template's tokens between the `end` of a user's message and the answer."""
    to_user: Sequence[int]
    """Those between the `end` of an answer and the user's next message."""


def write_script(files: ModelFiles, dictionaries: Path, seed: int) -> Script:
    """The script of a chat model.

    Raises ModelError for a chat template without a text between messages that begins with a token
    which ends them, and InvalidRequest if a dictionary is missing.
    """
    encode = files.tokenizer().encode
    messages = [
        {"role": role, "content": mark}
        for role, mark in zip(("user", "assistant", "user"), _MARKS, strict=True)
    ]
    parts = re.split("|".join(_MARKS), files.template().render(messages))
    if len(parts) != len(_MARKS) + 1:
        raise ModelError(f"the chat template of {files.name} leaves messages out")
    (end, *to_answer), (other_end, *to_user) = (encode(part, special=True) for part in parts[1:3])
    if end != other_end or end not in files.stop_token_ids:
        raise ModelError(f"messages of {files.name} end with no token that ends answers")
    rng = Random(seed)
    texts = [*_texts(files, dictionaries, rng)]
    rng.shuffle(texts)
    rows = [row for row in (encode(text, special=True) for text in texts) if len(row) <= LONGEST]
    columns = np.full((len(rows), max(map(len, rows))), -1, np.int32)
    for column, row in zip(columns, rows, strict=True):
        column[: len(row)] = row
    return Script(columns, end, to_answer, to_user)


def _texts(files: ModelFiles, dictionaries: Path, rng: Random) -> Iterator[str]:
    empty = user_opening(files)
    yield from [empty] * EMPTY
    yield from [opening.text for opening in general_openings(files)] * GENERAL
    counts, lists = read_sections(TEXTS)
    lists |= read_dictionaries(dictionaries, files.tokenizer().encode)
    for kind, count in counts.items():
        for _ in range(count):
            text = drawn(rng.choice(lists[kind]), lists, rng)
            if kind == SYSTEM:
                yield user_opening(files, [{"role": "system", "content": text}])
            else:
                yield empty + text


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
    """Lists of words. Raises InvalidRequest if a file is missing."""

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
