import json
from pathlib import Path

import pytest

PROMPTS = [
    ("one", "chat", "Hello"),
    ("two", "code", "this is one and the user, this is one and the user"),
    ("three", "chat", "2 + 2 = 12"),
]


@pytest.fixture
def suite_file(tmp_path: Path) -> Path:
    path = tmp_path / "suite.jsonl"
    lines = [
        json.dumps({"id": id, "kind": kind, "messages": [{"role": "user", "content": content}]})
        for id, kind, content in PROMPTS
    ]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return path
