"""Phrases that read as translated, in docs, docstrings, messages and comments.

`python tests/test_prose.py PATH...` prints those of files and folders. Counts may only fall.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PLACES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "src")

RULES = {
    "here": (
        r"\b(that|which|what|it|models?|drafters?|files?|one|none) (is|are|was|were) (not )?here\b"
        r"|\bhere (is|are) (?!a |an )|\b(runs?|costs?|calls?|pays?|exact) here\b",
        "installed, cached, on this machine",
    ),
    "so many": (r"\b(so|as) (many|much|few)\b(?![^.;]{0,40}\bas\b)", "that many, at most N"),
    "is no X": (
        r"\b(is|are|was|were) no (?!(longer|more|different|such|one|room|need|way|known|limit|"
        r"[a-z]+ (to|for|in|here|left))\b)[a-z]+",
        "is not an X",
    ),
    "has not X": (r"\b(has|have) not (?!(been|yet|\w+ed|begun)\b)\w+", "does not have X"),
    "leave away": (r"\bleaves? [^.;:,]{1,40} away\b", "remove, omit"),
    ", too": (r", too\b(?=[.,;:)\"]|$)", "also"),
    "go on": (r"\b(go|goes|going|went) on\b", "continue, resume"),
    "of which": (
        r"\b(from|of|with|to|by|in|on|at|after|before|beside) which\b",
        "whose, where, when, or two sentences",
    ),
    "what is": (
        r"\bwhat (is|are|was|were|has|it|they|a|an|the|others?|of|would|later|nothing|runs|comes|"
        r"came|calls)\b(?![^.;]{0,60}\?)",
        "a noun: the cost of a pass",
    ),
    "anew": (r"\b(anew|meanwhile|thereof|by itself|by themselves|beside)\b", "again, next to"),
    "person": (
        r"\b(it|that|which|server|model|engine|library|file|command|result|line|template|hub|page|"
        r"system|drafter|machine|processor|auto|manifest) (says?|said|tells?|told|knows?|knew|"
        r"asks?|asked|wants?|thinks|gives? up)\b",
        "prints, reports, detects, supports",
    ),
    "from X on": (
        r"\bfrom [^ .,;]+ on\b(?! (the|a|an|this|disk|their|its)\b)",
        "starting at X, X and later",
    ),
    "spelling": (r"\b(learnt|licen[c]e|normaliser|behaviour|favour)\b", "US: learned, license"),
    "others": (
        r"\b(is|are|has|have|gives?) (another|others?|other ones)\b(?=[.,;:)])",
        "differs, is different",
    ),
    "one a X": (
        r"\b(one|keys?|model|object|value|file|process|tokens?|milliseconds) an? "
        r"(line|call|token|model|step|row|request|second|actor)\b(?! that)",
        "one per X",
    ),
    "fragment": (
        r"^(Of|By|Its?|Their|As|With|Without|Where|From|In|To|None:|Nothing|That|Those|What|Why|"
        r"How|Which|Whose)\b",
        "a verb first for functions, an article and a noun for classes and properties",
    ),
    "whether": (r"^Whether\b", "Return whether ..."),
}
"""Name -> expression, and what to write instead."""

FIRST_LINES = ("fragment", "whether")
"""Rules for the first line of a docstring alone."""

MAX_PLACES = 1
"""Number of places; lower it when it falls."""

NAMES = {
    "bound": (r"(^|_)(least|most)(_|$)(?!common)", "min_ and max_"),
    "vague": (
        r"^_?(of|at|said|held|listed|called|inside|whole|real|settle|lent|parked|rests|beside|told|"
        r"shown|fresh|keeps\w*)$",
        "a noun for classes, a verb for functions",
    ),
}
"""The same for names of functions, classes, arguments and variables."""

MAX_SENTENCE, MAX_DOCS = 30, 15_000
"""Maximum words of a sentence in docs/*.md, and of these pages except the generated one."""

NO_SENTENCES = r"^```.*?^```$|<pre>.*?</pre>|^(?:\||#|    ).*?$"
"""Code, terminal output, tables and headings."""


def texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text, and whether it begins a docstring, of the prose of a file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        fenced = False
        for number, line in enumerate(source.splitlines(), 1):
            fenced ^= line.startswith(("```", "<pre"))
            if not fenced and not line.startswith("    "):
                yield number, re.sub(r"`[^`]*`|\(http[^)]*\)", "X", line), False
        return
    tree, docstrings = ast.parse(source), set[int]()
    for node in ast.walk(tree):
        has_docstring = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, has_docstring) and (text := ast.get_docstring(node)):
            docstrings.add(id(node.body[0].value))  # type: ignore[attr-defined]
            for offset, line in enumerate(text.splitlines()):
                yield node.body[0].lineno + offset, line.strip(), not offset
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and text.count(" ") > 1 and id(node) not in docstrings:
            yield node.lineno, text, False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# "), False


def hits(*places: Path) -> Iterator[tuple[Path, int, str, str]]:
    """Yield file, line, rule and the words that it found."""
    for place in places:
        inside = [*place.rglob("*.md"), *place.rglob("*.py")]
        for path in sorted(inside) if place.is_dir() else [place]:
            for line, text, first in texts(path):
                for name, (rule, _) in RULES.items():
                    if (first or name not in FIRST_LINES) and (found := re.search(rule, text)):
                        yield path, line, name, found[0]


def names(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield line, name, and whether it is that of a function or a class."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name, True
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg, False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id, False


def test_names_in_the_source_follow_the_conventions():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}; use {better}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for line, name, defined in names(path)
        for kind, (rule, better) in NAMES.items()
        if (defined or kind == "bound") and name != "at_least" and re.search(rule, name.lower())
    ]
    assert found == [], "\n".join(found)


def test_the_number_of_translated_phrases_does_not_grow():
    found = [*hits(*(ROOT / place for place in PLACES))]
    assert len(found) <= MAX_PLACES, Counter(name for _, _, name, _ in found)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page; code counts as a word, a link as its text."""
    text = re.sub(NO_SENTENCES, "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ *(-|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "X", re.sub(r"\]\([^)]*\)", "]", text))
    for paragraph in re.split(r"\n\s*\n", text):
        yield from re.split(r"(?<=[.!?])[*)]*\s+", " ".join(paragraph.split()))


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/*.md")), ids=lambda page: page.name)
def test_a_docs_page_starts_with_a_command_and_has_short_sentences(page: Path):
    text = page.read_text(encoding="utf-8")
    assert re.match(r"# .+\n\n(```|`python|## )", text)
    assert [one for one in sentences(text) if len(one.split()) > MAX_SENTENCE] == []


def test_the_docs_stay_short():
    pages = {*ROOT.glob("docs/*.md")} - {ROOT / "docs/reference.md"}
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= MAX_DOCS


if __name__ == "__main__":
    for path, line, name, words in hits(*map(Path, sys.argv[1:] or PLACES)):
        sys.stdout.write(f"{path}:{line}: {name}: {words!r}; write: {RULES[name][1]}\n")
