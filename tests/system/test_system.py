"""No module needs features of a single operating system."""

import ast
from pathlib import Path

import pytest

import paceline
from paceline.models import templates
from paceline.system import processes
from paceline.system.processes import TimeLimit, WorkerProcess
from support.process import python

SOURCE = Path(paceline.__file__).parent
APART = {"system/machine.py", "system/guarded.py"}
POSIX_ONLY = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}

WITHOUT_POSIX = f"""
import importlib, os, pkgutil, signal, sys
for name in {sorted(POSIX_ONLY)}:
    sys.modules[name] = None
for name in [*vars(signal)]:
    if name in ("SIGALRM", "SIGPIPE", "SIGKILL", "SIGHUP", "setitimer", "pthread_sigmask"):
        delattr(signal, name)
for name in ("fork", "sysconf", "posix_fadvise", "geteuid"):
    delattr(os, name)
import paceline
skipped = []
for module in pkgutil.walk_packages(paceline.__path__, "paceline."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name in {sorted(POSIX_ONLY)}:
            raise
        skipped.append(error.name)  # an extra that is not installed
    print(module.name)
"""


def modules() -> list[Path]:
    paths = sorted(SOURCE.rglob("*.py"))
    assert len(paths) > 200, f"only {len(paths)} modules in {SOURCE}"
    return paths


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def test_posix_only_modules_are_imported_only_in_listed_files():
    users = {
        path.relative_to(SOURCE).as_posix() for path in modules() if imported(path) & POSIX_ONLY
    }
    assert users == APART


def test_text_files_are_opened_with_an_explicit_encoding():
    """Else it is the system's, which is not UTF-8 everywhere."""
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr in {"read_text", "write_text"}:
                at = f"{path.relative_to(SOURCE)}:{node.lineno}"
                assert any(word.arg == "encoding" for word in node.keywords), f"{at}: which one?"


def test_every_module_can_be_imported_without_posix():
    assert "paceline.server.run" in python("-c", WITHOUT_POSIX).stdout.splitlines()


def test_a_process_without_alarm_is_killed_by_its_parent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "HAS_ALARM", False)
    endless = b"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    request = b'{"source": "%s", "seconds": 3600, "characters": 9, "names": {}}'
    process = WorkerProcess(Path(templates.__file__).with_name("worker.py"), "renders")
    try:
        with pytest.raises(TimeLimit):
            process.ask(request % endless, 0.5)
        assert process.ask(request % b"again", 60) == {"text": "again"}
    finally:
        process.close()
