from collections.abc import Callable

import pytest

from paceline.constraints.grammar import Grammars
from paceline.decoding.types import Constraint
from paceline.engines.base import Engine
from paceline.models import ModelFiles, Tokenizer
from support.grammars import COLUMNS, STOPS, follows
from support.toy import ToyEngine


@pytest.fixture(scope="module")
def tokenizer(tiny_files: ModelFiles) -> Tokenizer:
    return tiny_files.tokenizer


@pytest.fixture(scope="module")
def grammars(tiny_files: ModelFiles) -> Grammars:
    path = tiny_files.folder / "tokenizer.json"
    return Grammars(path, vocab_size=COLUMNS, stop_token_ids=STOPS)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return ToyEngine(vocab_size=COLUMNS, context_length=512, cache_blocks=256)


@pytest.fixture(scope="module")
def takes(tokenizer: Tokenizer) -> Callable[[Constraint, str], bool]:
    """Return whether a text may be the whole response."""

    def takes(constraint: Constraint, text: str) -> bool:
        tokens = tokenizer.encode(text)
        return follows(constraint, tokens) == len(tokens) + 1

    return takes
