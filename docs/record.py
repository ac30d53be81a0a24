"""Run the commands of docs/recordings.md, and write the page with their output, and a picture.

`python docs/record.py`, with paceline and the default model installed. Read the answers before
you commit the page.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from html import escape
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

import paceline

PAGE = Path(__file__).parent / "recordings.md"
PICTURE = Path(__file__).parent / "answer.svg"
PICTURED = (
    'paceline generate "Rewrite in the past tense: I get up at seven, make a pot of tea, walk to '
    'the shop, buy some bread and come home again." --tint --stats'
)
"""The README's first command, with its answer tinted."""
WIDTH = 100  # columns
SUITE = Path(__file__).parents[1] / "benchmarks/suite.jsonl"
PROMPT = "extraction-1"  # of the suite
RECORDINGS = (
    (
        "Tinted: prose",
        "Accepted draft tokens are underlined; a terminal also shows them in green.",
        'paceline generate "Why do cats purr, in two sentences?" --temperature 0 --tint --stats',
    ),
    (
        "Tinted: an extraction",
        "The response repeats its prompt, so most of it is drafted. The model is very small: it "
        "gives the first order twice, and in a form of its own, not the other three. "
        "`orders.txt`:",
        "paceline generate --file orders.txt --temperature 0 --tint --stats",
    ),
)


def prompt() -> str:
    """The prompt of the suite that is tinted."""
    rows = map(json.loads, SUITE.read_text(encoding="utf-8").splitlines())
    (text,) = [row["messages"][0]["content"] for row in rows if row["id"] == PROMPT]
    return str(text)


def run(command: str, folder: Path) -> str:
    """Standard output and standard error of a command, with the terminal's colours.

    Raises RuntimeError if it fails.
    """
    line = command.replace("paceline", f"{shlex.quote(sys.executable)} -m paceline", 1)
    settings = {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    done = subprocess.run(
        line,
        shell=True,
        cwd=folder,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stdout}")
    return done.stdout


def as_html(printed: str) -> str:
    """Return a terminal's text as preformatted HTML; accepted draft tokens are `<ins>`.

    Elements in place of styles, which GitHub removes.
    """
    console = Console(record=True, width=WIDTH, file=StringIO())
    console.print(Text.from_ansi(printed.rstrip()), soft_wrap=True)
    html = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    return re.sub(r"<span[^>]*>", "<ins>", html).replace("</span>", "</ins>")


def picture() -> str:
    """A terminal with the README's command and its answer, as SVG that loads nothing."""
    console = Console(record=True, width=WIDTH, file=StringIO())
    with tempfile.TemporaryDirectory() as folder:
        printed = run(PICTURED, Path(folder)).strip()
    console.print(Text(f"$ {PICTURED}\n\n"), Text.from_ansi(printed), sep="")
    svg = console.export_svg(title="paceline: accepted draft tokens are green")
    return re.sub(r"@font-face\s*{[^}]*}\s*", "", svg)


def page() -> str:
    """The text of the page. Raises RuntimeError where a command fails."""
    files = {"orders.txt": prompt()}
    parts = ["# Recordings of the terminal"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in files.items():
            (folder / file).write_text(content, encoding="utf-8")
        for title, text, command in RECORDINGS:
            parts += [f"## {title}", text]
            inputs = [content for file, content in files.items() if file in command]
            parts += [f"<pre>{escape(content)}</pre>" for content in inputs]
            parts += [f"```sh\n{command}\n```", as_html(run(command, folder))]
    parts += [
        "The output is word for word, recorded by `docs/record.py` with paceline "
        f"{paceline.__version__} and the default model (SmolLM2 135M) on "
        f"{datetime.now(UTC):%Y-%m-%d}. Times are of one run on a machine that had other work; "
        "measurements are in [benchmarks](../benchmarks/README.md).",
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
