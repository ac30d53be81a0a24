from collections.abc import Callable
from functools import partial

import pytest

from paceline.engines.base import Engine
from support.toy import ToyEngine

# What an engine here must be like: a context of at least 160 slots, a cache that holds ten
# sequences of 64 and that a few full contexts fill. A factory may call pytest.skip.
ENGINES: dict[str, Callable[[], Engine]] = {
    "toy": ToyEngine,
    "toy-padded": partial(ToyEngine, min_rows=2),
}


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param]()
