import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.models import Progress
from support.training import WORDS

Telling = Callable[[Callable[[int], object]], Progress]
WritePrompts = Callable[..., Path]


class _Telling(Progress):
    def __init__(self, reach: Callable[[int], object]) -> None:
        super().__init__(quiet=True)
        self.tasks: list[tuple[str, int | None, str]] = []
        self._reach = reach

    @contextmanager
    def task(
        self, label: str, total: int | None = None, *, unit: str = "bytes"
    ) -> Iterator[Callable[[int], object]]:
        self.tasks.append((label, total, unit))
        yield self._reach


@pytest.fixture
def telling() -> Telling:
    """Makes a progress that tells how much is done to a function, which may raise."""
    return _Telling


@pytest.fixture
def write_prompts_file(tmp_path: Path) -> WritePrompts:
    def write(*words: str, name: str = "prompts.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
        return path

    return write


@pytest.fixture
def prompts(write_prompts_file: WritePrompts) -> Path:
    return write_prompts_file(*WORDS)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"
