r"""Word lists from the folder `words`, and templates whose slots are filled from them.

A `.txt` file has sections: `[name]`, then an entry per line, in which `\n` is a line break. A slot
in braces is drawn at random: `{name}` from the section `name` of slots.txt, `{n:3-20}` a number,
`{n:20-90/10}` one in steps of 10, `{p:$2.50-9.00}` an amount of money, `{t:07:00-11:30}` a time of
day, `{x:red|blue}` one of the choices. A slot that was drawn comes back as `{n}`. Code has slots as
`%name%`. No list has a subject of benchmarks/suite.jsonl: those are for measuring only.
"""

import json
import re
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

WORDS = Path(__file__).with_name("words")
MONEY = ("${}", "${}", "£{}", "€{}", "{} euros", "{} dollars", "{} pounds")

Memory = dict[str, str]
"""Name of a slot -> its value in this text."""

_SLOT = re.compile(r"\{([a-z]*\d?)(?::([^{}]*))?\}")
_CODE_SLOT = re.compile(r"%(\w+)%")
_NUMBERS = re.compile(r"(\$?)(-?\d+)(?:\.(\d+))?-(\d+(?:\.\d+)?)(?:/(\d+))?")
_TIMES = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)")
_AN = re.compile(r"\b([Aa]) (?=[\"'`]?(?:[aeio]|u(?!ni|se|su|to)|8|11\b|18\b))", re.IGNORECASE)


@cache
def sections(name: str) -> dict[str, list[str]]:
    """Section -> entries of `words/NAME.txt`."""
    found: dict[str, list[str]] = {}
    for line in (WORDS / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = found.setdefault(line.strip("[]"), [])
        elif line:
            section.append(line.replace("\\n", "\n"))
    return found


@cache
def rows(name: str) -> list[dict[str, Any]]:
    """The objects of `words/NAME.jsonl`."""
    return list(map(json.loads, (WORDS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()))


def fill(template: str, rng: Random, memory: Memory | None = None) -> str:
    """Return `template` with its slots drawn; texts filled with one `memory` share its values."""
    known: Memory = {} if memory is None else memory

    def value(slot: re.Match[str]) -> str:
        name, spec = slot[1], slot[2]
        if spec is not None:
            known[name] = _drawn(spec, rng, known)
        elif name not in known:
            base = name.rstrip("0123456789")
            taken = {known[other] for other in known if other.rstrip("0123456789") == base}
            # The slots of an entry are drawn without `known`: they are about another person.
            drawn = fill(rng.choice(sections("slots")[base]), rng)
            while drawn in taken:
                drawn = fill(rng.choice(sections("slots")[base]), rng)
            known[name] = drawn
        return known[name]

    return _SLOT.sub(value, template)


def substituted(template: str, values: dict[str, str]) -> str:
    """Return `template` with its slots replaced by `values`."""
    return _SLOT.sub(lambda slot: values[slot[1]], template)


def substituted_code(template: str, values: dict[str, str]) -> str:
    """Return `template` with `%name%` replaced where `values` has the name."""
    return _CODE_SLOT.sub(lambda slot: values.get(slot[1], slot[0]), template)


def with_an(text: str) -> str:
    """Return `text` with "an" before vowels, because templates have "a" before every slot."""
    return _AN.sub(lambda article: f"{article[1]}n ", text)


def _drawn(spec: str, rng: Random, known: Memory) -> str:
    if "|" in spec:
        return rng.choice(spec.split("|"))
    if times := _TIMES.fullmatch(spec):
        hour, minute, last_hour, last_minute = map(int, times.groups())
        at = rng.randrange(hour * 60 + minute, last_hour * 60 + last_minute + 1, 5)
        return f"{at // 60:02}:{at % 60:02}"
    numbers = _NUMBERS.fullmatch(spec)
    if numbers is None:
        raise ValueError(f"unknown slot: {spec}")
    money, low, decimals, high, step = numbers.groups()
    if decimals is None:
        text = str(rng.randrange(int(low), int(high) + 1, int(step or 1)))
    else:
        places = len(decimals)
        # Prices end in 0 or 5, as they do in shops.
        grid = 5 if places == 2 else 1
        number = rng.randrange(int(low + decimals), round(float(high) * 10**places) + 1, grid)
        text = f"{number / 10**places:.{places}f}"
    if money:
        text = known.setdefault("$", rng.choice(MONEY)).format(text)
    return text
