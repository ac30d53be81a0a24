"""Names in llama.cpp, Ollama and mlx-lm: translated if equivalent, otherwise explained.

`renamed` has earlier names of paceline's own options, which a notice reports.

A test compares `habits.json` with the tables of docs/coming-from.md.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path

from typer import echo

_ABOVE_2 = re.compile(r"[3-9]|[1-9][0-9]+")


@cache
def habits(kind: str) -> Mapping[str, str]:
    """Return a table: names elsewhere, each with paceline's name or an explanation.

    `numbers` has paceline's options whose value is a number only in other programs.
    """
    table = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))[kind]
    return {theirs: ours for ours, names in table.items() for theirs in names}


def followed(word: str, names: Collection[str], fail: Callable[[str], object]) -> str:
    """Translate a word's option to paceline's; `fail` gets an explanation if none fits.

    `names` has the options of the command. The new name of a renamed one is printed.
    """
    option, equals, value = word.partition("=")
    if option not in names and (new := habits("renamed").get(option)) in names:
        echo(f"paceline: {option} is now {new}", err=True)
        return f"{new}{equals}{value}"
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

    `options` are those of the command, each with True if a value follows. `fail` gets an
    explanation for a missing value, and for one that is a number only in another program.
    """
    end = words.index("--") if "--" in words else len(words)
    ours = [followed(word, options, fail) for word in words[:end]]
    for option, value in zip_longest(ours, ours[1:]):
        if options.get(option) and (value is None or value in options):
            fail(f"argument {option}: expected a value{f' before {value}' * bool(value)}")
        if (answer := habits("numbers").get(option)) and _ABOVE_2.fullmatch(value):
            fail(f"argument {option}: {answer}")
    return [*ours, *words[end:]]
