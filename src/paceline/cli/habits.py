"""Names in llama.cpp, ollama and mlx-lm: followed where ours means the same, otherwise answered.

A test compares `habits.json` with the tables of docs/coming-from.md.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path

_ABOVE_2 = re.compile(r"[3-9]|[1-9][0-9]+")


@cache
def habits(kind: str) -> Mapping[str, str]:
    """Return a table: names elsewhere, each with ours or an answer.

    `numbers` has options of ours whose value is a number in other programs alone.
    """
    table = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))[kind]
    return {theirs: ours for ours, names in table.items() for theirs in names}


def followed(word: str, names: Collection[str], fail: Callable[[str], object]) -> str:
    """Return a word with our option for another program's; `fail` gets an answer if none fits.

    `names` has the options of the command.
    """
    option, equals, value = word.partition("=")
    same = habits("options")
    for theirs, rest in ((word, ""), (option, equals + value)):
        if theirs not in names and same.get(theirs) in names:
            return f"{same[theirs]}{rest}"
    elsewhere = f"{same[option]} of other commands does the same" if option in same else ""
    if option not in names and (answer := habits("answers").get(option, elsewhere)):
        fail(f"no option is called {option}; {answer}")
    return word


def with_habits(
    words: Sequence[str], options: Mapping[str, bool], fail: Callable[[str], object]
) -> list[str]:
    """Return a command's words, with those before -- as `followed` returns them.

    `options` are those of the command, and whether a value follows. `fail` gets an answer for a
    value that is missing, or would be a number in another program alone.
    """
    end = words.index("--") if "--" in words else len(words)
    ours = [followed(word, options, fail) for word in words[:end]]
    for option, value in zip_longest(ours, ours[1:]):
        if options.get(option) and (value is None or value in options):
            fail(f"argument {option}: expected a value{f' before {value}' * bool(value)}")
        if (answer := habits("numbers").get(option)) and _ABOVE_2.fullmatch(value):
            fail(f"argument {option}: {answer}")
    return [*ours, *words[end:]]
