"""Advice in errors works for the user's installation and interface."""

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.cli.answers import ending
from paceline.errors import pip_install
from paceline.runtime.model import Model

SOURCE = Path(paceline.__file__).parents[1]


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'paceline[lab]'"),
        ({"url": "file:///a%20b", "dir_info": {"editable": True}}, "pip install -e '/a b[lab]'"),
        ({"url": "file:///a", "dir_info": {}}, "pip install '/a[lab]'"),
        ({"url": "file:///p-1.whl", "archive_info": {}}, "pip install '/p-1.whl[lab]'"),
        ({"url": "https://x/p.whl"}, "pip install 'paceline[lab] @ https://x/p.whl'"),
        (
            {"url": "https://x/p", "vcs_info": {"vcs": "git", "commit_id": "c0"}},
            "pip install 'paceline[lab] @ git+https://x/p@c0'",
        ),
    ],
)
def test_extras_install_from_the_same_source_as_paceline(
    origin: Any, command: str, monkeypatch: pytest.MonkeyPatch
):
    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return origin and json.dumps(origin)

    monkeypatch.setattr("importlib.metadata.distribution", lambda _name: Distribution())
    assert pip_install("lab") == command


def strings() -> list[str]:
    """Return the strings of the source except docstrings."""
    found = []
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in alone
        ]
    return found


def test_no_message_names_a_docs_file_missing_from_wheels():
    assert [text for text in strings() if re.search(r"docs/[\w/-]+\.md", text)] == []
    assert [text for text in strings() if "paceline[" in text] == ["pip install 'paceline["]


def test_chat_hints_name_chat_commands_instead_of_options(model: Model):
    result = model.generate("Hello", max_tokens=4, ignore_eos=True)
    for reason, option in (("length", "max_tokens -1"), ("repetition", "repetition_detection off")):
        settings = {**result.settings}
        settings["max_tokens"] = settings["max_tokens"]._replace(source="default")
        ended = replace(result, finish_reason=reason, settings=settings)
        assert f"/set {option}" in str(ending(ended, chat=True))
        assert "--" not in str(ending(ended, chat=True))
        assert "/set" not in str(ending(ended))
