"""Names of a GGUF model's files: one, or shards (`NAME-00001-of-00003.gguf`), the first for all."""

import re
from pathlib import Path
from typing import NamedTuple

SUFFIX = ".gguf"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
"""Stem, number and count."""


class SplitFile(NamedTuple):
    """A file of a split model, from its name."""

    stem: str
    """The name without the numbers."""
    number: int
    """From 1."""
    total: int

    def paths(self) -> list[str]:
        numbers = range(1, self.total + 1)
        return [f"{self.stem}-{number:05}-of-{self.total:05}{SUFFIX}" for number in numbers]


def shard_of(path: str) -> SplitFile | None:
    """Split a shard's file name; return None for a whole file."""
    match = _SHARD.fullmatch(path)
    if match is None:
        return None
    stem, number, total = match[1], int(match[2]), int(match[3])
    return SplitFile(stem, number, total) if 1 <= number <= total else None


def shards_beside(path: Path) -> list[Path]:
    """All shards of the model that the shard `path` is of; of a file that is whole, itself."""
    shard = shard_of(path.name)
    if shard is None or shard.total == 1:
        return [path]
    return [path.parent / name for name in shard.paths()]
