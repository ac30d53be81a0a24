"""Checks of error messages: the words that a user needs, not the sentence around them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def raises(kind: Any, *names: object, lines: int = 1) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The block raises `kind` with a message of at most `lines` lines that has all of `names`."""
    with pytest.raises(kind) as caught:
        yield caught
    message = str(caught.value)
    assert message.count("\n") < lines, message
    assert [name for name in map(str, names) if name not in message] == [], message
