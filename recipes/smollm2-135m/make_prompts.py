"""Self-made prompts of the kinds that users send, to train a small drafter on a model's answers.

    python make_prompts.py --count 6000 --seed 0 --out prompts.jsonl

Nothing in them is from elsewhere: they are put together from the words in words.py and, with
`--material`, from answers that the model itself gave (`paceline train answers`). Prompts that share
eight words in a row with the evaluation suite are left out, so that the suite stays unseen.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from random import Random

import words

SUITE = Path(__file__).resolve().parents[2] / "benchmarks" / "suite.jsonl"
UNSEEN = 8
"""A prompt with this many words in a row from the suite is not written."""

GIVING_UP = 3000
"""Prompts in a row that were there already: the words do not make as many as were asked for."""

INFORMAL = {"arithmetic": 0.05, "chat": 0.08, "story": 0.04}
"""How often a prompt is all in lower case and ends without a full stop."""

Memory = dict[str, str]

_SLOT = re.compile(r"\{([a-z]*\d?)(?::([^{}]*))?\}")
_NUMBERS = re.compile(r"(\$?)(-?\d+)(?:\.(\d+))?-(\d+(?:\.\d+)?)(?:/(\d+))?")
_TIMES = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)")
_NAME = re.compile(r"%(\w+)%")
_AN = re.compile(r"\b([Aa]) (?=[\"'`]?(?:[aeio]|u(?!ni|se|su|to)|8|11\b|18\b))", re.IGNORECASE)
_FENCE = re.compile(r"```\w*\n.*?\n```", re.DOTALL)
_CAMEL = re.compile(r"_([a-z])")
_MONEY = ("${}", "${}", "£{}", "€{}", "{} euros", "{} dollars", "{} pounds")


@dataclass
class Material:
    """What the model wrote itself."""

    passages: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)


def main() -> None:
    """Make the prompts and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--suite", type=Path, default=SUITE, help="prompts that must stay unseen")
    parser.add_argument("--material", type=Path, help="a folder of `paceline train answers`")
    parser.add_argument("--model", default="smollm2-135m", help="whose answers --material has")
    options = parser.parse_args()
    material = read_material(options.material, options.model) if options.material else Material()
    suite = read_suite(options.suite, UNSEEN)
    prompts, dropped = make_prompts(options.count, options.seed, suite, material)
    beside = options.out.with_name(f".{options.out.name}")
    with beside.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts)
    beside.replace(options.out)
    sys.stderr.write(f"{len(prompts)} prompts, {dropped} dropped for words of the suite\n")


def make_prompts(
    count: int, seed: int, suite: set[tuple[str, ...]], material: Material
) -> tuple[list[dict[str, str]], int]:
    """`count` different prompts in a random order, and how many the suite's words cost."""
    makers: dict[str, tuple[int, Callable[[Random], str]]] = {
        "arithmetic": (22, arithmetic),
        "chat": (25, chat),
        "story": (18, story),
        "code-completion": (8, code_completion),
        "code-edit": (7, partial(code_edit, material=material)),
        "extraction": (8, extraction),
        "quoting": (7, partial(quoting, material=material)),
        "translation": (5, translation),
    }
    made: list[dict[str, str]] = []
    dropped = 0
    share = 0
    for kind, (percent, maker) in makers.items():
        share += percent
        fresh = _different(partial(maker, Random(f"{seed} {kind}")))
        number = 0
        while len(made) < round(count * share / 100):
            prompt = next(fresh, None)
            if prompt is None:
                raise SystemExit(f"the words make only {number} prompts of the kind {kind}")
            if shares_words(prompt, suite, UNSEEN):
                dropped += 1
                continue
            number += 1
            made.append({"id": f"{kind}-{number:05}", "kind": kind, "prompt": prompt})
    Random(f"{seed} order").shuffle(made)
    return made, dropped


def _different(maker: Callable[[], str]) -> Iterator[str]:
    seen: set[str] = set()
    repeated = 0
    while repeated < GIVING_UP:
        prompt = maker().strip()
        # Prompts that differ only in case or punctuation teach nothing new.
        key = " ".join(_words(prompt))
        repeated += 1
        if key not in seen:
            seen.add(key)
            repeated = 0
            yield prompt


# ---------------------------------------------------------------------------- the unseen suite


def shares_words(prompt: str, suite: set[tuple[str, ...]], length: int) -> bool:
    """Whether `length` words in a row of the prompt are in `suite` (see read_suite)."""
    return not suite.isdisjoint(_runs(prompt, length))


def read_suite(path: Path, length: int) -> set[tuple[str, ...]]:
    """Every run of `length` words in the messages of a suite."""
    runs: set[tuple[str, ...]] = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        for message in json.loads(line)["messages"] if line.strip() else []:
            runs.update(_runs(message["content"], length))
    return runs


def _runs(text: str, length: int) -> Iterator[tuple[str, ...]]:
    found = _words(text)
    return (tuple(found[at : at + length]) for at in range(len(found) - length + 1))


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.casefold())


def read_material(folder: Path, model: str) -> Material:
    """Passages and code from the answers in a folder of `paceline train answers`."""
    # Only here: without --material the script needs no more than Python.
    from paceline.models import resolve

    tokenizer = resolve(model).tokenizer()
    material = Material()
    for line in (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines():
        text = tokenizer.decode(json.loads(line)["answer"]).strip()
        material.code += [code for code in _FENCE.findall(text) if 4 <= code.count("\n") <= 40]
        if 60 <= len(text.split()) <= 250 and "```" not in text:
            material.passages.append(text)
    return material


# ------------------------------------------------------------------------------- filling slots


@cache
def entries(text: str) -> list[str]:
    """The entries of a word list: its lines, or what stands between `|`, or its words."""
    if "\n" in text:
        return [line.replace("\\n", "\n") for line in text.strip().split("\n")]
    return text.split("|") if "|" in text else text.split()


LISTS: dict[str, str] = {
    **words.LISTS,
    **words.STORY_LISTS,
    "audience": words.AUDIENCES,
    "tone": words.TONES,
    "asking": words.SITUATION_ASKS,
    "who": words.CHARACTERS,
    "where": words.SETTINGS,
    "thing": words.THINGS,
    "twist": words.TWISTS,
}


def fill(template: str, rng: Random, memory: Memory | None = None) -> str:
    """The template with its slots filled (words.py says how they look).

    `memory` has what named slots were filled with; pass one to fill several texts alike.
    """
    known: Memory = {} if memory is None else memory

    def value(slot: re.Match[str]) -> str:
        name, spec = slot[1], slot[2]
        if spec is not None:
            known[name] = _drawn(spec, rng, known)
        elif name not in known:
            base = name.rstrip("0123456789")
            taken = {known[other] for other in known if other.rstrip("0123456789") == base}
            # An entry with slots of its own is somebody else: it shares no names with this text.
            drawn = fill(rng.choice(entries(LISTS[base])), rng)
            while drawn in taken:
                drawn = fill(rng.choice(entries(LISTS[base])), rng)
            known[name] = drawn
        return known[name]

    return _SLOT.sub(value, template)


def _drawn(spec: str, rng: Random, known: Memory) -> str:
    if "|" in spec:
        return rng.choice(spec.split("|"))
    if times := _TIMES.fullmatch(spec):
        hour, minute, last_hour, last_minute = map(int, times.groups())
        at = rng.randrange(hour * 60 + minute, last_hour * 60 + last_minute + 1, 5)
        return f"{at // 60:02}:{at % 60:02}"
    numbers = _NUMBERS.fullmatch(spec)
    if numbers is None:
        raise ValueError(f"no such slot: {spec}")
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
        text = known.setdefault("$", rng.choice(_MONEY)).format(text)
    return text


def _an(text: str) -> str:
    # Slots come after "a", whatever they begin with.
    return _AN.sub(lambda article: f"{article[1]}n ", text)


def _informal(text: str, rng: Random, kind: str) -> str:
    return text.lower().rstrip(".?") if rng.random() < INFORMAL[kind] else text


# ----------------------------------------------------------------------- one prompt of each kind


def arithmetic(rng: Random) -> str:
    """A word problem or a plain calculation."""
    text = fill(rng.choice(entries(words.ARITHMETIC)), rng)
    if rng.random() < 0.25:
        text = rng.choice(entries(words.ARITHMETIC_OPENINGS)) + rng.choice([" ", "\n\n"]) + text
    if rng.random() < 0.65:
        text += rng.choice([" ", " ", "\n"]) + rng.choice(entries(words.ARITHMETIC_ASKS))
    return _informal(_an(text), rng, "arithmetic")


_CHATS = {
    "how": (19, words.HOW_TO),
    "explain": (12, words.SUBJECTS),
    "difference": (6, words.PAIRS),
    "plan": (9, words.PLANS),
    "pros": (8, words.CHOICES),
    "letter": (13, words.LETTERS),
    "ideas": (10, words.IDEAS),
    "question": (9, words.QUESTIONS),
    "situation": (20, words.SITUATIONS),
    "rewrite": (11, words.REWRITES),
}


def chat(rng: Random) -> str:
    """A question of everyday life."""
    [topic] = rng.choices(list(_CHATS), [weight for weight, _ in _CHATS.values()])
    form = rng.choice(entries(words.CHAT_FORMS[topic]))
    text = fill(form.replace("{it}", rng.choice(entries(_CHATS[topic][1]))), rng)
    if topic not in ("letter", "rewrite") and rng.random() < 0.2:
        text = text if text[-1] in ".?!" else text + "."
        text += " " + rng.choice(entries(words.CHAT_TAILS))
    if rng.random() < 0.1:
        text = rng.choice(entries(words.CHAT_OPENINGS)) + " " + text
    return _informal(_an(text), rng, "chat")


def story(rng: Random) -> str:
    """A story, scene or poem to write."""
    memory: Memory = {}
    text = fill(rng.choice(entries(words.STORY_FORMS)), rng, memory)
    if rng.random() < 0.35:
        text += " " + fill(rng.choice(entries(words.STORY_TAILS)), rng, memory)
    return _informal(_an(text), rng, "story")


def code_completion(rng: Random) -> str:
    """Code to go on with, or a function to write."""
    form = rng.random()
    name, arguments, does = rng.choice(entries(words.FUNCTIONS)).split("|")
    if form < 0.3:
        task = rng.choice(entries(words.FUNCTION_TASKS))
        language = rng.choice(
            ["Python", "Python", "JavaScript", "Java", "Go", "C", "Rust", "TypeScript", "Ruby"]
        )
        names = {"lang": language, "fn": name, "args": arguments, "does": does}
        return _named(task, names)
    if form < 0.55:
        language = rng.choice(list(words.STUBS))
        camel = _camel(name)
        names = {"name": name, "camel": camel, "args": arguments, "Does": _capital(does)}
        names |= {"code": _fenced(_named(words.STUBS[language], names).rstrip("\n"), language)}
        names |= {"lang": words.LANGUAGES[language][0], "does": does}
        names |= {"fn": name if language == "python" else camel}
        return _named(rng.choice(entries(words.STUB_TASKS)), names)
    code, names, last = _code(rng, unfinished=True)
    tasks = entries(words.COMPLETION_TASKS)
    if names["lang"] == "SQL":
        tasks = [task for task in tasks if "%wanted%" not in task]
    elif rng.random() < 0.6:
        # The beginning of the wanted part is there, as an editor would send it.
        code = code + "\n\n" + last
    return _around(rng, _fenced(code, names["language"]), _named(rng.choice(tasks), names))


def code_edit(rng: Random, material: Material) -> str:
    """Code to change and print again."""
    if material.code and rng.random() < 0.4:
        tasks = [task for task in entries(words.EDIT_TASKS["any"]) if "%" not in task]
        return _around(rng, rng.choice(material.code), rng.choice(tasks))
    if rng.random() < 0.35:
        language = rng.choice(["python", "python", "js", *words.SNIPPETS])
        names = _names(rng)
        code = _named(rng.choice(words.SNIPPETS[language]), names).rstrip("\n")
        task = rng.choice(_fitting(words.SNIPPET_TASKS, names, code))
        return _around(rng, _fenced(code, language), task)
    code, names, _ = _code(rng, unfinished=False)
    language = names["language"]
    groups = ["any", language, *(["class", "class"] if names["what"] == "class" else [])]
    task = rng.choice(_fitting(words.EDIT_TASKS[rng.choice(groups)], names, code))
    fence = "" if rng.random() < 0.2 else language
    return _around(rng, _fenced(code, fence), task)


def _fitting(tasks: str, names: dict[str, str], code: str) -> list[str]:
    """The tasks that are not about a name or number that this code happens to lack."""
    about = ("num", "text", "item", "items", "word1", "limit")
    lacking = [f"%{name}%" for name in about if names[name] not in code]
    return [_named(task, names) for task in entries(tasks) if not any(x in task for x in lacking)]


def _code(rng: Random, *, unfinished: bool) -> tuple[str, dict[str, str], str]:
    """Code, the names in it and of a part that it lacks, and how that part begins."""
    language = rng.choice(["python", "python", "python", *words.CLASS_FRAMES])
    names = _names(rng) | {"language": language}
    names |= {"lang": words.LANGUAGES[language][0], "what": words.LANGUAGES[language][1]}
    known = [name for name, (_, code) in words.METHODS.items() if language in code]
    wanted, *others = rng.sample(known, rng.randint(3, min(5, len(known))))
    does, fragments = words.METHODS[wanted]
    names["does"] = _named(does, names)
    names["wanted"] = _named(wanted, names)
    if language in ("js", "java", "go"):
        names["wanted"] = _camel(names["wanted"])
    if language == "go":
        names["wanted"] = _capital(names["wanted"])
    opening, closing = words.CLASS_FRAMES[language]
    parts = [opening, *(words.METHODS[name][1][language] for name in others)]
    code = "\n".join(_named(part, names) for part in parts)
    if not unfinished:
        code += closing
    head = 2 if language == "c" else 1
    first = "\n".join(_named(fragments[language], names).split("\n")[:head])
    return code.rstrip("\n"), names, first


def _names(rng: Random) -> dict[str, str]:
    """The names and numbers of one domain, for code."""
    kind, item, items, number, text = rng.choice(entries(words.DOMAINS)).split()
    names = {"item": item, "items": items, "num": number, "text": text, "class": kind.lower()}
    names |= {name.upper(): word.upper() for name, word in names.items()} | {
        name.capitalize(): _capital(word) for name, word in names.items()
    }
    names |= {"limit": str(rng.randrange(10, 400, 10))}
    names |= {"number1": str(rng.randint(2, 900)), "number2": str(rng.randint(2, 900))}
    return names | {"word1": fill("{city}", rng), "word2": fill("{town}", rng)}


def _around(rng: Random, code: str, task: str) -> str:
    """A task before or after the code it is about."""
    return f"{task}\n\n{code}" if rng.random() < 0.35 else f"{code}\n\n{task}"


def _fenced(code: str, language: str) -> str:
    return f"```{language}\n{code}\n```"


def _named(template: str, names: dict[str, str]) -> str:
    # Code is full of braces, so its slots are %name%; other % signs stay.
    return _NAME.sub(lambda slot: names.get(slot[1], slot[0]), template)


def _capital(name: str) -> str:
    return name[:1].upper() + name[1:]


def _camel(name: str) -> str:
    return _CAMEL.sub(lambda part: part[1].upper(), name)


def extraction(rng: Random) -> str:
    """Records to write in another form."""
    kind = rng.choice(list(words.RECORDS))
    slots, sentences = words.RECORDS[kind]
    style: Memory = {"$": rng.choice(_MONEY)}
    template = json.dumps(slots)
    records = []
    for _ in range(rng.randint(2, 6)):
        record: dict[str, str] = json.loads(fill(template, rng, dict(style)))
        if record not in records:
            records.append(record)
    sentence = rng.choice(sentences)
    written = [_an(sentence.format(**record)) for record in records]
    if rng.random() < 0.3:
        example = json.dumps(records[0], ensure_ascii=False)
        names = {"line": written[0], "example": example, "data": "\n".join(written[1:])}
        return _slotted(rng.choice(entries(words.EXAMPLE_TASKS)), names)
    some = [name for name in slots if rng.random() < 0.7] or list(slots)
    names = {
        "record": kind,
        "format": rng.choice(entries(words.FORMATS)),
        "data": _data(rng, records, written),
        "fields": _listed(some),
        "first": some[0],
        "last": some[-1],
    }
    return _slotted(rng.choice(entries(words.EXTRACTION_TASKS)), names)


def _data(rng: Random, records: list[dict[str, str]], written: list[str]) -> str:
    form = rng.choice(["lines", "lines", "text", "blocks", "table"])
    if form == "lines":
        return "\n".join(written)
    if form == "text":
        return " ".join(line if line.endswith(".") else f"{line};" for line in written).rstrip(";")
    if form == "blocks":
        return "\n\n".join(
            "\n".join(f"{_capital(name)}: {value}" for name, value in record.items())
            for record in records
        )
    mark = rng.choice([" | ", "; ", "\t"])
    return "\n".join(mark.join(row) for row in (records[0], *(each.values() for each in records)))


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _slotted(template: str, values: dict[str, str]) -> str:
    return _SLOT.sub(lambda slot: values[slot[1]], template)


def quoting(rng: Random, material: Material) -> str:
    """A text to repeat, wholly or in part."""
    if material.passages and rng.random() < 0.5:
        text = rng.choice(material.passages)
    else:
        text = _passage(rng)
    here = set(_words(text))
    swaps = [swap.split(":") for swap in entries(words.SWAPS) if swap.split(":")[0] in here]
    tasks = [task for task in entries(words.QUOTING_TASKS) if swaps or "{old}" not in task]
    old, new = rng.choice(swaps) if swaps else ("", "")
    return _slotted(rng.choice(tasks), {"text": text, "old": old, "new": new})


def _passage(rng: Random) -> str:
    first, *middle, last = rng.choice(entries(words.PASSAGES)).split(" / ")
    some: list[str] = []
    while sum(len(sentence.split()) for sentence in [first, *some, last]) < 60:
        some = [sentence for sentence in middle if rng.random() < 0.85]
    text = _an(fill(" ".join([first, *some, last]), rng))
    return re.sub(r"( ¶)+ ", "\n\n", text)


def translation(rng: Random) -> str:
    """A few sentences to translate."""
    foreign = [language for language in words.TRANSLATIONS if language != "English"]
    other = rng.choice(foreign)
    source, to = rng.choice([("English", other), (other, "English")])
    length = rng.choice([1, 2, 2, 3, 3, 4])
    text = fill(" ".join(rng.sample(entries(words.TRANSLATIONS[source]), length)), rng)
    if source == "English":
        text = _an(text)
    names = {"text": text, "source": source, "to": to, "foreign": other}
    return _slotted(rng.choice(entries(words.TRANSLATION_TASKS)), names)


if __name__ == "__main__":
    main()
