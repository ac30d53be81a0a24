"""Who may import what: the arrows of the architecture, read from the source."""

import ast
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import paceline
import paceline.models

SOURCE = Path(paceline.__file__).parents[1]

# Packages of this distribution. The others import paceline, which knows none of them.
CORE, CORE_ML, LAB, MLX = "paceline", "paceline_coreml", "paceline_lab", "paceline_mlx"

# The rooms of a package, and the rooms that each imports from besides itself, no more and no fewer.
# "" is the package: its version. Errors and versions are for all.
FOR_ALL = {"errors", ""}
NOTHING_ELSE = {"decoding", "errors"}
"""Rooms that do not import those either."""
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
        "conversion": {"engine"},
        "lint": {"engine", "rehearsal"},
        "compute_plan": {"engine", "rehearsal"},
        "residency": {"compute_plan", "engine"},
        "golden": {"conversion", "engine"},
        "probe": {"compute_plan", "conversion", "engine", "golden", "lint", "residency"},
        "cli": {"conversion", "engine", "golden", "lint", "probe", "residency"},
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

# The parts of `models`, lowest first, that a part may import from besides itself. Other rooms
# import what `paceline.models` exports, and nothing from its parts.
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

# Not slow to import. All else in the rooms of a command is, so only they import it outside of
# functions.
LIGHT_ROOMS = {
    CORE: ALLOWED[CORE].keys() - {"server", "verify"},
    CORE_ML: {"cli", "engine", "rehearsal", ""},
    LAB: {"cli", "client", ""},
    MLX: {*ALLOWED[MLX]},
}

# These may import third-party packages at the top of a file.
WITH_PACKAGES = {
    *((CORE_ML, room) for room in ("conversion", "golden", "probe")),
    (CORE, "server"),
    *((MLX, room) for room in ALLOWED[MLX]),
}

# The one third-party package that may be imported before it is needed.
LIGHT = {"numpy"}

# What every module of a room may import at the top of the file.
ROOM_PACKAGES = {"cli": {"typer"}}

# Run by path in a process of its own: what it imports is for that process, and none of it is ours.
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
                # `module` names a file; one level up is what stands beside it.
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


def house(name: str) -> str:
    """`paceline_lab.learn.table` is in `paceline_lab`."""
    return name.partition(".")[0]


def room(name: str) -> str:
    """`paceline.engines.kv_blocks` is in `engines`, `paceline.load` in the package itself."""
    first = ".".join(name.split(".")[1:2])
    if first in ("__init__", "__version__"):
        return ""
    return "runtime" if house(name) == CORE and first in paceline.__all__ else first


def part(name: str) -> str:
    """`paceline.models.hub.wheel` is in the part `hub` of `models`."""
    return ".".join(name.split(".")[2:3])


def heavy(name: str) -> bool:
    """Whether a name is slow to import."""
    return room(name) not in LIGHT_ROOMS[house(name)]


def parts(module: str) -> Container[str]:
    """What a module may import of `models`."""
    if (house(module), room(module)) != (CORE, "models"):
        return {"", *paceline.models.__all__}
    return PARTS[part(module)] | {part(module)} if part(module) in PARTS else PARTS


def wrong_room(module: str, name: str) -> bool:
    """Whether a module may not import a name of ours because of where both are."""
    if house(name) != house(module):
        return house(name) != CORE
    here = room(module)
    others = ALLOWED[house(module)][here] | (set() if here in NOTHING_ELSE else FOR_ALL)
    return room(name) not in {here, *others}


def faults(module: str, names: Iterable[Import]) -> list[str]:
    """What the imports of a module break, one line each."""
    here = room(module)
    lines = []
    for one in names:
        top = house(one.name)
        if one.name in SCRIPTS or (top in ALLOWED and module in SCRIPTS):
            lines.append(f"{module}:{one.line}: {one.name} in another process's script")
        elif top in ALLOWED:
            if wrong_room(module, one.name):
                lines.append(f"{module}:{one.line}: {here} imports {one.name}")
            elif room(one.name) == "models" and part(one.name) not in parts(module):
                lines.append(f"{module}:{one.line}: {one.name} past the door of models")
            elif heavy(one.name) and not heavy(module) and one.executed:
                lines.append(f"{module}:{one.line}: {one.name} outside a function")
        elif top not in {*sys.stdlib_module_names, *LIGHT, *ROOM_PACKAGES.get(here, ())}:
            with_packages = (house(module), here) in WITH_PACKAGES or module in SCRIPTS
            if here == "decoding":
                lines.append(f"{module}:{one.line}: decoding imports {one.name}")
            elif one.executed and not with_packages:
                lines.append(f"{module}:{one.line}: {one.name} outside a function")
    return lines


SOURCES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts): path.read_text(encoding="utf-8")
    for package in ALLOWED
    for path in sorted((SOURCE / package).rglob("*.py"))
}
"""Module -> its source."""
IMPORTS = {module: imports_of(module, source) for module, source in SOURCES.items()}
"""Module -> what it imports."""


def test_a_module_imports_only_what_its_room_may():
    lines = [line for module, names in IMPORTS.items() for line in faults(module, names)]
    assert lines == [], "\n".join(lines)


def test_the_rules_have_every_room_and_every_arrow():
    arrows: dict[str, dict[str, set[str]]] = {package: {} for package in ALLOWED}
    for module, imported_names in IMPORTS.items():
        names = [one.name for one in imported_names]
        ours = {room(name) for name in names if house(name) == house(module)}
        of_room = arrows[house(module)].setdefault(room(module), set())
        of_room.update(ours - {room(module), *FOR_ALL})
    assert arrows == ALLOWED


def imported(name: str, files: Container[str]) -> str:
    """The file that `from a.b import c` runs: c where it is a module, otherwise a.b."""
    above = name.rpartition(".")[0]
    names = (name, f"{name}.__init__", above, f"{above}.__init__")
    result = next((item for item in names if item in files), "")
    return "" if result == "paceline.__init__" else result  # its names are imported when asked for


def arrows(names: Mapping[str, Iterable[Import]]) -> dict[str, set[str]]:
    """A module -> those that it imports, for the type checker or in a function included."""
    return {
        module: {file for one in those if (file := imported(one.name, names)) != module}
        for module, those in names.items()
    }


def circle(names: Mapping[str, Iterable[Import]]) -> list[str]:
    """A circle of the imports of modules, those for the type checker included; empty: none."""
    try:
        TopologicalSorter(arrows(names)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_by_way_of_others_typing_included():
    assert circle(IMPORTS) == []


def test_the_service_imports_nothing_of_the_apis():
    graph = arrows(IMPORTS)
    below, new = set[str](), {"paceline.server.service"}
    while new:
        below |= new
        new = set().union(*(graph.get(module, set()) for module in new)) - below
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


def test_each_wrong_arrow_is_found():
    assert [pair for pair in WRONG if len(faults(pair[0], imports_of(*pair))) != 1] == []
    sources = {
        "paceline.a": "from paceline.b import B",
        "paceline.b": "if TYPE_CHECKING:\n    from paceline.c import C",
        "paceline.c": "def f():\n    from paceline.a import A",
    }
    names = {module: imports_of(module, source) for module, source in sources.items()}
    assert set(circle(names)) == set(sources)
    assert circle({**names, "paceline.c": []}) == []
