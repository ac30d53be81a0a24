"""Names in llama.cpp, ollama and mlx-lm: followed where ours means the same, otherwise answered.

A test compares `habits.json` with the tables of docs/coming-from.md.
"""

import json
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path


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
