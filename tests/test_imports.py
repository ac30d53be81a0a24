"""Import rules: which subpackage may import which, compared with the source."""

import ast
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from inspect import ismodule
from pathlib import Path
from typing import NamedTuple

import paceline
import paceline.models

SOURCE = Path(paceline.__file__).parents[1]

# Packages of this distribution. The others import paceline, which imports none of them.
CORE, CORE_ML, LAB, MLX = "paceline", "paceline_coreml", "paceline_lab", "paceline_mlx"

# The subpackages of a package, and those that each one imports, no more and no fewer. "" is the
# package itself: its version. All may import errors and versions.
FOR_ALL = {"errors", ""}
NOTHING_ELSE = {"decoding", "errors"}
"""Subpackages that do not import those either."""
ALLOWED = {
    CORE: {
        "errors": set[str](),
        "system": set[str](),
        "storage": {"system"},
        "decoding": set[str](),
        "plugins": set[str](),
        "options": {"decoding"},
        "drafters": {"decoding", "plugins", "storage"},
        "engines": {"decoding", "plugins", "storage", "system"},
        "models": {"drafters", "storage", "system"},
        "tools": {"decoding"},
        "constraints": {"decoding", "models", "system", "tools"},
        "runtime": {
            *("constraints", "decoding", "drafters", "engines", "models", "options", "storage"),
            *("system", "tools"),
        },
        "server": {
            *("constraints", "decoding", "drafters", "models", "options", "runtime", "storage"),
            *("system", "tools"),
        },
        "verify": {"drafters", "engines", "models", "options", "runtime", "storage"},
        "cli": {
            *("decoding", "drafters", "engines", "models", "options", "plugins"),
            *("runtime", "server", "storage", "system", "verify"),
        },
        "": {"options", "runtime"},
        "__main__": {"cli"},
    },
    CORE_ML: {
        "rehearsal": set[str](),
        "engine": {"rehearsal"},
        "options": {"engine"},
        "conversion": {"engine", "options"},
        "lint": {"engine", "rehearsal"},
        "compute_plan": {"engine", "rehearsal"},
        "residency": {"compute_plan", "engine"},
        "golden": {"conversion", "engine", "options", "rehearsal"},
        "probe": {
            *("compute_plan", "conversion", "engine", "golden", "lint", "options", "residency"),
        },
        "cli": {"conversion", "engine", "golden", "lint", "options", "probe", "residency"},
        "": set[str](),
    },
    LAB: {
        "agent": {"bench", "client"},
        "bench": set[str](),
        "client": set[str](),
        "peers": {"bench", "client"},
        "report": {"bench"},
        "simulate": {"bench"},
        "learn": {"simulate"},
        "sweep": {"bench"},
        "cli": {
            *("agent", "bench", "client", "learn", "peers", "report", "simulate"),
            "sweep",
        },
        "": set[str](),
    },
    MLX: {
        "": set[str](),
        "caches": {"hooks", "thresholds"},
        "engine": {"caches", "hooks", "kv_sequence", "model", "probe", "rows", "step"},
        "entry": {"engine"},
        "heads": {"caches", "hooks", "model"},
        "hooks": set[str](),
        "kv_sequence": {"model"},
        "model": {"caches", "hooks", "rollback", "states", "thresholds", "together"},
        "probe": {"caches", "hooks", "model", "rows", "states", "thresholds"},
        "rollback": {"hooks"},
        "rows": {"thresholds"},
        "states": {"caches", "hooks", "rollback"},
        "step": {"hooks", "model", "states"},
        "thresholds": set[str](),
        "together": {"caches", "hooks"},
    },
}

# The parts of `models`, lowest first, and those that each one may import. Other subpackages import
# the names that `paceline.models` exports, and nothing from its parts.
PARTS = {
    "manifest": set[str](),
    "names": {"manifest"},
    "templates": set[str](),
    "gguf": {"manifest", "names"},
    "hub": {"gguf", "manifest", "names"},
    "checkpoints": {"gguf", "hub", "manifest", "templates"},
    "files": {"checkpoints", "hub", "manifest", "templates"},
    "prepare": {"files", "gguf", "hub", "manifest", "names"},
    "installed": {"checkpoints", "gguf", "hub", "manifest", "names", "prepare"},
    "resolver": {
        *("checkpoints", "files", "gguf", "hub", "installed", "manifest", "names", "prepare"),
    },
    "published": {"files", "installed", "resolver"},
}
PARTS["__init__"] = {*PARTS}

# Subpackages that are fast to import. The others are imported inside functions, or by each other.
FAST = {
    CORE: ALLOWED[CORE].keys() - {"server", "verify"},
    CORE_ML: {"cli", "engine", "options", "rehearsal", ""},
    LAB: {"cli", "client", ""},
    MLX: {*ALLOWED[MLX]},
}

# Options of a command, in a slow package.
FAST_MODULE = "paceline.server.settings"

# These may import third-party packages at the top of a file.
WITH_PACKAGES = {
    *((CORE_ML, name) for name in ("conversion", "golden", "options", "probe")),
    (CORE, "server"),
    *((MLX, name) for name in ALLOWED[MLX]),
}

# The one third-party package that may be imported before it is needed.
LIGHT = {"numpy"}

# Third-party packages that every module of a subpackage may import at the top of the file.
PACKAGES_OF = {"cli": {"typer"}}

# Run by path in a separate process: its imports are for that process, and none of them is ours.
SCRIPTS = {
    "paceline.constraints.matcher_worker",
    "paceline.models.templates.worker",
    "paceline.system.guarded",
}


class Import(NamedTuple):
    name: str
    """All that was named, with dots: `from a.b import c` is `a.b.c`."""
    line: int
    executed: bool
    """Whether importing the module runs it: not in a function, not for the type checker."""


def imports(tree: ast.AST, module: str, *, executed: bool = True) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
                yield from (Import(name, node.lineno, executed) for name in names)
            case ast.ImportFrom():
                # `module` names a file; one level up are its siblings.
                above = ".".join(module.split(".")[: -node.level]) if node.level else ""
                base = ".".join(filter(None, [above, node.module]))
                for alias in node.names:
                    yield Import(f"{base}.{alias.name}", node.lineno, executed)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from imports(node, module, executed=False)
            case ast.If() if "TYPE_CHECKING" in ast.unparse(node.test):
                yield from imports(node, module, executed=False)
            case _:
                yield from imports(node, module, executed=executed)


def imports_of(module: str, source: str) -> list[Import]:
    return [*imports(ast.parse(source), module)]


def package(name: str) -> str:
    """`paceline_lab.learn.table` is in `paceline_lab`."""
    return name.partition(".")[0]


def subpackage(name: str) -> str:
    """`paceline.engines.kv_blocks` is in `engines`, `paceline.load` in the package itself."""
    first = ".".join(name.split(".")[1:2])
    if first in ("__init__", "__version__"):
        return ""
    return "runtime" if package(name) == CORE and first in paceline.__all__ else first


def part(name: str) -> str:
    """`paceline.models.hub.wheel` is in the part `hub` of `models`."""
    return ".".join(name.split(".")[2:3])


def heavy(name: str) -> bool:
    """Return True if a name is slow to import."""
    is_fast = subpackage(name) in FAST[package(name)]
    return not (is_fast or name.startswith(FAST_MODULE))


def parts(module: str) -> Container[str]:
    """Return the names in `models` that a module may import."""
    if (package(module), subpackage(module)) != (CORE, "models"):
        exported = vars(paceline.models).items()
        return {"", "published", *(name for name, value in exported if not ismodule(value))}
    return PARTS[part(module)] | {part(module)} if part(module) in PARTS else PARTS


def is_forbidden(module: str, name: str) -> bool:
    """Return True if the subpackage of a module may not import that of a name."""
    if package(name) != package(module):
        return package(name) != CORE
    here = subpackage(module)
    others = ALLOWED[package(module)][here] | (set() if here in NOTHING_ELSE else FOR_ALL)
    return subpackage(name) not in {here, *others}


def faults(module: str, names: Iterable[Import]) -> list[str]:
    """Return the rules that the imports of a module break, one line per import."""
    here = subpackage(module)
    lines = []
    for one in names:
        top = package(one.name)
        if one.name in SCRIPTS or (top in ALLOWED and module in SCRIPTS):
            lines.append(f"{module}:{one.line}: {one.name} in another process's script")
        elif top in ALLOWED:
            if is_forbidden(module, one.name):
                lines.append(f"{module}:{one.line}: {here} imports {one.name}")
            elif subpackage(one.name) == "models" and part(one.name) not in parts(module):
                lines.append(f"{module}:{one.line}: {one.name} past the exports of models")
            elif heavy(one.name) and not heavy(module) and one.executed:
                lines.append(f"{module}:{one.line}: {one.name} outside a function")
        elif top not in {*sys.stdlib_module_names, *LIGHT, *PACKAGES_OF.get(here, ())}:
            with_packages = (package(module), here) in WITH_PACKAGES or module in SCRIPTS
            if here == "decoding":
                lines.append(f"{module}:{one.line}: decoding imports {one.name}")
            elif one.executed and not with_packages:
                lines.append(f"{module}:{one.line}: {one.name} outside a function")
    return lines


SOURCES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts): path.read_text(encoding="utf-8")
    for name in ALLOWED
    for path in sorted((SOURCE / name).rglob("*.py"))
}
"""Module -> its source."""
IMPORTS = {module: imports_of(module, source) for module, source in SOURCES.items()}
"""Module -> its imports."""


def test_a_module_imports_only_allowed_subpackages():
    lines = [line for module, names in IMPORTS.items() for line in faults(module, names)]
    assert lines == [], "\n".join(lines)


def test_the_import_rules_list_every_subpackage_and_import():
    found: dict[str, dict[str, set[str]]] = {name: {} for name in ALLOWED}
    for module, imported_names in IMPORTS.items():
        names = [one.name for one in imported_names]
        ours = {subpackage(name) for name in names if package(name) == package(module)}
        of_one = found[package(module)].setdefault(subpackage(module), set())
        of_one.update(ours - {subpackage(module), *FOR_ALL})
    assert found == ALLOWED


def imported(name: str, files: Container[str]) -> str:
    """The file that `from a.b import c` runs: c where it is a module, otherwise a.b."""
    above = name.rpartition(".")[0]
    names = (name, f"{name}.__init__", above, f"{above}.__init__")
    result = next((item for item in names if item in files), "")
    return "" if result == "paceline.__init__" else result  # its names are imported when asked for


def graph(names: Mapping[str, Iterable[Import]]) -> dict[str, set[str]]:
    """A module -> those that it imports, for the type checker or in a function included."""
    return {
        module: {file for one in those if (file := imported(one.name, names)) != module}
        for module, those in names.items()
    }


def cycle(names: Mapping[str, Iterable[Import]]) -> list[str]:
    """Return a cycle of imports, those for the type checker included; empty if there is none."""
    try:
        TopologicalSorter(graph(names)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_imports_including_typing_have_no_cycles():
    assert cycle(IMPORTS) == []


def test_the_service_imports_no_api_module():
    edges = graph(IMPORTS)
    below, new = set[str](), {"paceline.server.service"}
    while new:
        below |= new
        new = set().union(*(edges.get(module, set()) for module in new)) - below
    assert [module for module in below if module.startswith("paceline.server.api.")] == []


# A module and one of its lines, which breaks a rule. What breaks none is in the source.
WRONG = [
    ("paceline.decoding.x", "from paceline.errors import PacelineError"),
    ("paceline.decoding.x", "from ..engines import base"),
    ("paceline.decoding.x", "def f():\n    import tokenizers"),
    ("paceline.drafters.x", "if TYPE_CHECKING:\n    from paceline.engines.base import Engine"),
    ("paceline.engines.llamacpp.x", "from ...models import files"),
    ("paceline.engines.x", "from llama_cpp import Llama"),
    ("paceline.models.x", "from paceline import load"),
    ("paceline.models.x", "class C:\n    import paceline.engines"),
    ("paceline.models.x", "try:\n    import torch\nexcept ImportError:\n    torch = None"),
    ("paceline.models.x", "from typer import Option"),
    ("paceline.models.x", "def f():\n    from paceline.models.templates import worker"),
    ("paceline.models.templates.worker", "from paceline import errors"),
    ("paceline.models.names.x", "from paceline.models.hub import Repository"),
    ("paceline.runtime.x", "from paceline.models.files import ModelFiles"),
    ("paceline.cli.x", "def f():\n    from paceline.models import hub"),
    ("paceline.cli.app", "def f():\n    import paceline_lab.learn"),
    ("paceline.cli.app", "import paceline.verify.checks"),
    ("paceline_lab.x", "def f():\n    from paceline_coreml.conversion import convert"),
    ("paceline_coreml.engine.x", "from paceline_coreml.conversion import convert"),
    ("paceline_coreml.engine.x", "import coremltools"),
]


def test_each_forbidden_import_is_detected():
    assert [pair for pair in WRONG if len(faults(pair[0], imports_of(*pair))) != 1] == []
    sources = {
        "paceline.a": "from paceline.b import B",
        "paceline.b": "if TYPE_CHECKING:\n    from paceline.c import C",
        "paceline.c": "def f():\n    from paceline.a import A",
    }
    names = {module: imports_of(module, source) for module, source in sources.items()}
    assert set(cycle(names)) == set(sources)
    assert cycle({**names, "paceline.c": []}) == []
