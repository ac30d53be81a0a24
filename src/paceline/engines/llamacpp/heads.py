"""Attention heads of a GGUF model, as the rule for single rows needs them."""

from collections.abc import Callable
from typing import NamedTuple


class Heads(NamedTuple):
    """Heads that all layers have alike."""

    keys: int
    """Heads of keys and values."""
    queries: int
    """Heads of queries for each of these."""


def heads_of(metadata: Callable[[str], str | None]) -> Heads | None:
    """The heads of a model; `metadata` returns a value of its file.

    None where layers differ (the values are lists) or have windows: what kernel a row takes then
    depends on more than the keys before it.
    """
    family = metadata("general.architecture")
    queries = metadata(f"{family}.attention.head_count") or ""
    keys = metadata(f"{family}.attention.head_count_kv") or queries
    if metadata(f"{family}.attention.sliding_window") or not (queries.isdigit() and keys.isdigit()):
        return None
    groups, rest = divmod(int(queries), max(int(keys), 1))
    return Heads(int(keys), groups) if int(keys) and not rest else None
