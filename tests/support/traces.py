"""Reads traces as `generate --trace` writes them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class RecordedTrace:
    """The content of a file, without a last line that was being written."""

    def __init__(self, path: Path) -> None:
        lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
        self.about: dict[str, Any] = lines.pop(0)
        self.prompt: list[int] = self.about["prompt_token_ids"]
        self.result: dict[str, Any] | None = None
        if lines and "result" in lines[-1]:
            self.result = lines.pop()["result"]
        first = lines.pop(0) if lines else {"tokens": [], "pieces": [], "prefill_seconds": 0.0}
        self.first = SimpleNamespace(**first)
        self.steps = [SimpleNamespace(**line) for line in lines]

    @property
    def answer(self) -> list[int]:
        return [*self.first.tokens, *(token for step in self.steps for token in step.tokens)]
