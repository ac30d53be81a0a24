"""Write reference.md in this folder, from the declarations of options, classes and errors."""

import ast
import inspect
import re
import runpy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import paceline
from paceline import errors
from paceline.decoding.types import Step
from paceline.models.published import Published, registry
from paceline.options import OPTIONS, Options
from paceline.runtime.load import load
from paceline.storage.files import megabytes

PAGE = Path(__file__).with_name("reference.md")
MAN_PAGE = PAGE.parents[1] / "deploy/man_page.py"
BEGINNING = """# Reference

`python docs/reference.py` writes this page from the source, for [the Python API](api.md). Not in it
are the options of commands (`paceline COMMAND --help-all`) and the fields of requests
(`/openapi.json` of a running server).
"""

Rows = Iterable[tuple[str, ...]]
HEAD = ("name", "meaning")
DRAFTERS = ("model", "format", "engine", "name", "size", "speedup")


def page() -> str:
    """Return the page, in Markdown."""
    meanings = (inspect.getdoc(load) or "").partition("Raises:")[0]
    settings = inspect.signature(load).parameters
    notes = {name.partition(":")[0]: text for name, text in members(Options)}
    man = runpy.run_path(str(MAN_PAGE))
    tables: dict[str, Rows] = {
        "`load`": [
            (str(settings[name]).partition(" = <")[0], text)  # an object's repr has its address
            for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", meanings, re.MULTILINE)
        ],
        "`Options`": [
            (name, ". ".join(filter(None, (f"{each.about.help}; {each.expected}", notes[name]))))
            for name, each in OPTIONS.items()
        ],
    }
    public: list[Any] = [getattr(paceline, name) for name in paceline.__all__ if name != "Options"]
    classes: list[type] = [Step, *(each for each in public if isinstance(each, type))]
    tables |= {f"`{each.__name__}`": members(each) for each in classes}
    tables["`paceline.errors`"] = [
        (name, f"{paragraph(error.__doc__)} Exit status {error.exit_code}.")
        for name, error in vars(errors).items()
        if inspect.isclass(error) and issubclass(error, errors.PacelineError)
    ]
    tables |= {"Exit status": man["_EXIT"], "Environment": man["_ENVIRONMENT"]}
    sections = {title: table(HEAD, map(coded, rows)) for title, rows in tables.items()}
    sections["Published drafters"] = table(DRAFTERS, map(published, registry().drafters))
    return BEGINNING + "".join(f"\n## {title}\n\n{text}" for title, text in sections.items())


def coded(row: tuple[str, ...]) -> tuple[str, ...]:
    """Return a row with its name as code."""
    return (f"`{row[0]}`", *row[1:])


def published(drafter: Published) -> tuple[str, ...]:
    """Return the row of a published drafter."""
    address = f"https://huggingface.co/{drafter.name.partition(':')[0]}"
    size = megabytes(drafter.bytes) if drafter.bytes else ""
    gain = drafter.gain
    times = f"{gain.times}x ([{gain.where}]({gain.source}))" if gain else ""
    form = f"[{drafter.form}]({drafter.source})"
    return drafter.target, form, f"`{drafter.engine}`", f"[{drafter.name}]({address})", size, times


def table(head: tuple[str, ...], rows: Rows) -> str:
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    lines = [" | ".join(row) for row in (head, ["---"] * len(head), *cells)]
    return "".join(f"| {line} |\n" for line in lines)


def members(kind: type) -> Iterator[tuple[str, str]]:
    """Yield name and first paragraph of a class's public fields, properties and methods."""
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("paceline"):
            yield from (row for row in of_body(base) if not row[0].startswith("_"))


def of_body(kind: type) -> Iterator[tuple[str, str]]:
    source = inspect.getsource(kind)
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    for node, after in zip(tree.body, [*tree.body[1:], tree], strict=True):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)):
                comment = source.splitlines()[node.lineno - 1].partition("  # ")[2]
                match after:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        comment = text
                yield f"{name}: {ast.unparse(node.annotation)}", paragraph(comment)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                if "overload" not in decorators:
                    call = "" if "property" in decorators else f"({parameters(node.args)})"
                    yield f"{name}{call}", paragraph(ast.get_docstring(node))


def parameters(given: ast.arguments) -> str:
    """Return the names of a method's parameters."""
    names = [each.arg for each in (*given.args[1:], *given.kwonlyargs)]
    names += [f"*{each.arg}" for each in (given.vararg,) if each]
    return ", ".join([*names, *(f"**{each.arg}" for each in (given.kwarg,) if each)])


def paragraph(text: str | None) -> str:
    """Return the first paragraph of a docstring."""
    return (text or "").partition("\n\n")[0]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
