"""Synthetic user prompts, to train a small drafter on a model's answers to them.

    python make_prompts.py --count 6000 --seed 0 --out prompts.jsonl

All text is drawn from the word lists in `words` and, with `--material`, from answers of the model
itself (`paceline train answers`). The output depends on the options alone. A prompt that shares
eight words in a row with the evaluation suite is dropped, so that the suite stays unseen.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

from slots import MONEY, Memory, fill, rows, sections, substituted, substituted_code, with_an

SUITE = Path(__file__).resolve().parents[2] / "benchmarks" / "suite.jsonl"
UNSEEN = 8
"""Words in a row that a prompt must not share with the suite."""

MAX_REPEATED = 3000
"""Duplicate prompts in a row after which the word lists count as exhausted."""

INFORMAL = {"arithmetic": 0.05, "chat": 0.08, "story": 0.04}
"""Share of prompts in lower case without a full stop."""

_CHAT_WEIGHTS = {
    "how": 19,
    "explain": 12,
    "difference": 6,
    "plan": 9,
    "pros": 8,
    "letter": 13,
    "ideas": 10,
    "question": 9,
    "situation": 20,
    "rewrite": 11,
}
_FENCE = re.compile(r"```\w*\n.*?\n```", re.DOTALL)
_CAMEL = re.compile(r"_([a-z])")


@dataclass
class Material:
    """Text that the model wrote."""

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
    """`count` different prompts in a random order, and how many more were dropped for the suite."""
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
                raise SystemExit(f"the word lists make only {number} prompts of the kind {kind}")
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
    while repeated < MAX_REPEATED:
        prompt = maker().strip()
        # Prompts that differ only in case or punctuation teach nothing new.
        key = " ".join(_words(prompt))
        repeated += 1
        if key not in seen:
            seen.add(key)
            repeated = 0
            yield prompt


def shares_words(prompt: str, suite: set[tuple[str, ...]], length: int) -> bool:
    """True if `length` words in a row of the prompt are in `suite` (see read_suite)."""
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
    # Without --material the script needs only the standard library.
    from paceline.models import resolve

    tokenizer = resolve(model).tokenizer()
    material = Material()
    for line in (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines():
        text = tokenizer.decode(json.loads(line)["answer"]).strip()
        material.code += [code for code in _FENCE.findall(text) if 4 <= code.count("\n") <= 40]
        if 60 <= len(text.split()) <= 250 and "```" not in text:
            material.passages.append(text)
    return material


def arithmetic(rng: Random) -> str:
    """A word problem or a plain calculation."""
    words = sections("arithmetic")
    text = fill(rng.choice(words["problem"]), rng)
    if rng.random() < 0.25:
        text = rng.choice(words["opening"]) + rng.choice([" ", "\n\n"]) + text
    if rng.random() < 0.65:
        text += rng.choice([" ", " ", "\n"]) + rng.choice(words["ask"])
    return _informal(with_an(text), rng, "arithmetic")


def chat(rng: Random) -> str:
    """A question of everyday life."""
    words = sections("chat")
    [topic] = rng.choices(list(_CHAT_WEIGHTS), list(_CHAT_WEIGHTS.values()))
    form = rng.choice(words[f"{topic} form"])
    text = fill(form.replace("{it}", rng.choice(words[f"{topic} topic"])), rng)
    if topic not in ("letter", "rewrite") and rng.random() < 0.2:
        text = text if text[-1] in ".?!" else text + "."
        text += " " + rng.choice(words["tail"])
    if rng.random() < 0.1:
        text = rng.choice(words["opening"]) + " " + text
    return _informal(with_an(text), rng, "chat")


def story(rng: Random) -> str:
    """A story, scene or poem to write."""
    words = sections("story")
    memory: Memory = {}
    text = fill(rng.choice(words["form"]), rng, memory)
    if rng.random() < 0.35:
        text += " " + fill(rng.choice(words["tail"]), rng, memory)
    return _informal(with_an(text), rng, "story")


def _informal(text: str, rng: Random, kind: str) -> str:
    return text.lower().rstrip(".?") if rng.random() < INFORMAL[kind] else text


def code_completion(rng: Random) -> str:
    """Code to complete, or a function to write."""
    words = sections("code")
    form = rng.random()
    name, arguments, does = rng.choice(words["function"]).split("|")
    if form < 0.3:
        task = rng.choice(words["function task"])
        language = rng.choice(
            ["Python", "Python", "JavaScript", "Java", "Go", "C", "Rust", "TypeScript", "Ruby"]
        )
        names = {"lang": language, "fn": name, "args": arguments, "does": does}
        return substituted_code(task, names)
    if form < 0.55:
        row = rng.choice([row for row in rows("languages") if "stub" in row])
        language, camel = row["language"], _camel(name)
        names = {"name": name, "camel": camel, "args": arguments, "Does": _capital(does)}
        stub = substituted_code(row["stub"], names).rstrip("\n")
        names |= {"code": _fenced(stub, language), "lang": row["name"], "does": does}
        names |= {"fn": name if language == "python" else camel}
        return substituted_code(rng.choice(words["stub task"]), names)
    code, names, last = _code(rng, unfinished=True)
    tasks = words["completion task"]
    if names["lang"] == "SQL":
        tasks = [task for task in tasks if "%wanted%" not in task]
    elif rng.random() < 0.6:
        # As an editor would send it: with the first line of the wanted part.
        code = code + "\n\n" + last
    return _around(
        rng, _fenced(code, names["language"]), substituted_code(rng.choice(tasks), names)
    )


def code_edit(rng: Random, material: Material) -> str:
    """Code to change and print again."""
    words = sections("code")
    if material.code and rng.random() < 0.4:
        tasks = [task for task in words["any edit"] if "%" not in task]
        return _around(rng, rng.choice(material.code), rng.choice(tasks))
    if rng.random() < 0.35:
        snippets: dict[str, list[str]] = {}
        for row in rows("snippets"):
            snippets.setdefault(row["language"], []).append(row["code"])
        language = rng.choice(["python", "python", "js", *snippets])
        names = _names(rng)
        code = substituted_code(rng.choice(snippets[language]), names).rstrip("\n")
        task = rng.choice(_fitting(words["snippet task"], names, code))
        return _around(rng, _fenced(code, language), task)
    code, names, _ = _code(rng, unfinished=False)
    language = names["language"]
    groups = ["any", language, *(["class", "class"] if names["what"] == "class" else [])]
    task = rng.choice(_fitting(words[f"{rng.choice(groups)} edit"], names, code))
    fence = "" if rng.random() < 0.2 else language
    return _around(rng, _fenced(code, fence), task)


def _fitting(tasks: list[str], names: dict[str, str], code: str) -> list[str]:
    """The tasks whose names and numbers occur in this code."""
    about = ("num", "text", "item", "items", "word1", "limit")
    lacking = [f"%{name}%" for name in about if names[name] not in code]
    return [substituted_code(task, names) for task in tasks if not any(x in task for x in lacking)]


def _code(rng: Random, *, unfinished: bool) -> tuple[str, dict[str, str], str]:
    """Code, the names in it and in a method that it lacks, and the first line of that method."""
    languages = {row["language"]: row for row in rows("languages")}
    methods = {row["method"]: row for row in rows("methods")}
    language = rng.choice(["python", "python", "python", *languages])
    frame = languages[language]
    names = _names(rng) | {"language": language, "lang": frame["name"], "what": frame["unit"]}
    known = [name for name, row in methods.items() if language in row["code"]]
    wanted, *others = rng.sample(known, rng.randint(3, min(5, len(known))))
    names["does"] = substituted_code(methods[wanted]["does"], names)
    names["wanted"] = substituted_code(wanted, names)
    if language in ("js", "java", "go"):
        names["wanted"] = _camel(names["wanted"])
    if language == "go":
        names["wanted"] = _capital(names["wanted"])
    parts = [frame["opening"], *(methods[name]["code"][language] for name in others)]
    code = "\n".join(substituted_code(part, names) for part in parts)
    if not unfinished:
        code += frame["closing"]
    head = 2 if language == "c" else 1
    method = substituted_code(methods[wanted]["code"][language], names)
    return code.rstrip("\n"), names, "\n".join(method.split("\n")[:head])


def _names(rng: Random) -> dict[str, str]:
    """The names and numbers of one domain, for code."""
    kind, item, items, number, text = rng.choice(sections("code")["domain"]).split()
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


def _capital(name: str) -> str:
    return name[:1].upper() + name[1:]


def _camel(name: str) -> str:
    return _CAMEL.sub(lambda part: part[1].upper(), name)


def extraction(rng: Random) -> str:
    """Records to write in another form."""
    words = sections("extraction")
    kind = rng.choice(rows("records"))
    style: Memory = {"$": rng.choice(MONEY)}
    template = json.dumps(kind["fields"])
    records = []
    for _ in range(rng.randint(2, 6)):
        record: dict[str, str] = json.loads(fill(template, rng, dict(style)))
        if record not in records:
            records.append(record)
    sentence = rng.choice(kind["sentences"])
    written = [with_an(sentence.format(**record)) for record in records]
    if rng.random() < 0.3:
        example = json.dumps(records[0], ensure_ascii=False)
        names = {"line": written[0], "example": example, "data": "\n".join(written[1:])}
        return substituted(rng.choice(words["example task"]), names)
    some = [name for name in kind["fields"] if rng.random() < 0.7] or list(kind["fields"])
    names = {
        "record": kind["record"],
        "format": rng.choice(words["format"]),
        "data": _data(rng, records, written),
        "fields": " and ".join(filter(None, [", ".join(some[:-1]), some[-1]])),
        "first": some[0],
        "last": some[-1],
    }
    return substituted(rng.choice(words["task"]), names)


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


def quoting(rng: Random, material: Material) -> str:
    """A text to repeat, wholly or in part."""
    words = sections("quoting")
    if material.passages and rng.random() < 0.5:
        text = rng.choice(material.passages)
    else:
        text = _passage(rng)
    here = set(_words(text))
    swaps = [swap.split(":") for swap in words["swap"] if swap.split(":")[0] in here]
    tasks = [task for task in words["task"] if swaps or "{old}" not in task]
    old, new = rng.choice(swaps) if swaps else ("", "")
    return substituted(rng.choice(tasks), {"text": text, "old": old, "new": new})


def _passage(rng: Random) -> str:
    """First and last sentence of a passage and some of the others; `¶` begins a paragraph."""
    first, *middle, last = rng.choice(sections("quoting")["passage"]).split(" / ")
    some: list[str] = []
    while sum(len(sentence.split()) for sentence in [first, *some, last]) < 60:
        some = [sentence for sentence in middle if rng.random() < 0.85]
    text = with_an(fill(" ".join([first, *some, last]), rng))
    return re.sub(r"( ¶)+ ", "\n\n", text)


def translation(rng: Random) -> str:
    """A few sentences to translate."""
    words = sections("translation")
    other = rng.choice([name for name in words if name not in ("English", "task")])
    source, to = rng.choice([("English", other), (other, "English")])
    length = rng.choice([1, 2, 2, 3, 3, 4])
    text = fill(" ".join(rng.sample(words[source], length)), rng)
    if source == "English":
        text = with_an(text)
    names = {"text": text, "source": source, "to": to, "foreign": other}
    return substituted(rng.choice(words["task"]), names)


if __name__ == "__main__":
    main()
