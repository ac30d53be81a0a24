"""The command lines that the docs show."""

import re
import shlex
from itertools import dropwhile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").rglob("*.md")),
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHELL = {"sh", "bash", "console"}


def commands() -> list[tuple[str, str]]:
    """The page and the words of every command line, continued lines joined."""
    results = []
    for page in PAGES:
        for language, code in BLOCK.findall(page.read_text(encoding="utf-8")):
            if language in SHELL:
                lines = code.replace("\\\n", " ").splitlines()
                results += [(page.name, line) for line in lines if line.strip()]
    return results


def words_of(line: str) -> list[str]:
    """The words of the last command of a line, without settings, redirections and comments.

    Of a pipe into paceline: the words of paceline.
    """
    command = re.split(r"\| (?=paceline )", line.rpartition("&&")[2])[-1]
    words = shlex.split(command, comments=True)
    words = list(dropwhile(re.compile(r"[A-Z_]+=").match, words))
    return words[: words.index("<")] if "<" in words else words
