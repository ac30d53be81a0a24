import ast
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import Stopping
from paceline.decoding.types import Drafter
from support import driver
from support.docs import PAGES, ROOT
from support.scripts import script
from support.toy import ToyEngine
from test_imports import ALLOWED, CORE, CORE_ML, FOR_ALL, LAB, MLX


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_ci_runs_the_test_command_of_the_readme():
    tests = [line for line in blocks(ROOT / "README.md", "sh") if "pytest" in line]
    assert len(tests) == 1
    assert tests[0] in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_the_guides_drafter_implements_the_protocol():
    (code,) = [block for block in blocks(ROOT / "docs/guide.md", "python") if "class Echo" in block]
    names: dict[str, Any] = {}
    exec(code, names)
    drafter: Drafter = names["Echo"]()
    assert list(drafter.propose([5, 7], 3).tokens) == [7, 7, 7]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)])
def test_the_architecture_pages_loop_matches_plain_decoding(sampling: Sampling):
    (code,) = [
        block for block in blocks(ROOT / "docs/architecture.md", "python") if "def answer" in block
    ]
    names: dict[str, Any] = {}
    exec(code, names)
    prompt = [1, 2, 3, 1, 2]
    plain, single_calls = names["answer"](ToyEngine(), prompt, 60, sampling, most_drafted=0)
    drafted, calls = names["answer"](ToyEngine(), prompt, 60, sampling)
    one = driver.answer(ToyEngine(), prompt, sampling=sampling, stopping=Stopping(max_tokens=60))
    assert drafted == plain == one.tokens
    assert calls < single_calls == 60


def test_the_reference_matches_the_source():
    page = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    assert script("reference", ROOT / "docs").page() == page, "run `python docs/reference.py`"


def test_the_api_page_lists_every_public_name():
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert {*paceline.__all__} - {*re.findall(r"[a-z_]\w*", page, re.IGNORECASE)} == set()
    assert {*paceline.__all__} == {name for name in dir(paceline) if name[0] != "_"}, "for TAB"


def test_the_architecture_diagram_matches_the_import_rules():
    (picture,) = blocks(ROOT / "docs/architecture.md", "mermaid")
    drawn: dict[str, set[str]] = {}
    below: dict[str, set[str]] = {}
    for line in reversed([line for line in picture.splitlines() if "-->" in line]):
        names, others = (side.replace("&", " ").split() for side in line.split("-->"))
        for name in names:
            drawn.setdefault(name, set()).update(others)
            below.setdefault(name, set()).update(
                others, *(below.get(other, set()) for other in others)
            )
    assert drawn.keys() - ALLOWED[CORE].keys() == {CORE_ML, LAB, MLX}
    for name in ALLOWED[CORE].keys() - {"", "__main__"}:
        assert drawn.get(name, set()) <= ALLOWED[CORE][name] | FOR_ALL
        assert ALLOWED[CORE][name] <= below.get(name, set())


def test_links_in_the_docs_resolve():
    links = [
        (page, link)
        for page in PAGES
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    ]
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []


def test_source_files_named_in_the_docs_exist():
    missing = []
    for page in (*PAGES, *ROOT.glob("deploy/*.sh")):
        folders = (ROOT, ROOT / "src", ROOT / "src/paceline", page.parent)
        text = page.read_text(encoding="utf-8")
        for name in {*re.findall(r"[\w./*-]*\w[\w*]*\.py\b", text)}:
            anywhere = "/" not in name and any(ROOT.glob(f"[!.]*/**/{name}"))
            if not anywhere and not any(any(folder.glob(name)) for folder in folders):
                missing.append((page.name, name))
    assert missing == []


def test_names_imported_by_python_in_the_docs_exist():
    code = "\n".join(block for page in PAGES for block in blocks(page, "python"))
    results = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in results if str(node.module).startswith("paceline")]
    assert ours
    for node in ours:
        module = import_module(str(node.module))
        assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def test_tests_named_in_the_docs_exist():
    tests = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py"))
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"`(test_\w+?)_?(?:\.\.\.)?`", pages))
    assert {name for name in named if f"def {name}" not in tests} == set()


def test_the_changelog_has_this_version():
    assert f"## {paceline.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
