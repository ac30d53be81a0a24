from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np
import pytest

from paceline.engines.base import Engine, KVSequence
from support.engine_rows import Plain, Rows, run
from support.engines import ENGINES, NEEDS, QUICK
from support.packages import params


@pytest.fixture(scope="session", params=params(ENGINES, NEEDS, slow=ENGINES.keys() - QUICK))
def engine(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param](request)


@pytest.fixture(scope="module")
def plain(engine: Engine) -> Plain:
    """Logits of every row of a text in a separate sequence, given the length of its prompt.

    The prompt is read at once, and the answer comes one token at a time.
    """
    known: dict[tuple[int, ...], Rows] = {}

    def rows_of(text: Sequence[int], prompt: int) -> Rows:
        key = (prompt, *text)
        if key not in known:
            rows = []
            with closing(engine.open()) as sequence:
                if prompt:
                    rows += run(engine, prompts=[(sequence, text[:prompt], prompt)])
                    sequence.commit(prompt)
                for token in text[prompt:]:
                    rows += run(engine, (sequence, [token], 1))
                    sequence.commit(1)
            known[key] = np.concatenate(rows)
        return known[key]

    return rows_of


@pytest.fixture
def sequence(engine: Engine) -> Iterator[KVSequence]:
    with closing(engine.open()) as opened:
        yield opened


@pytest.fixture
def other(engine: Engine) -> Iterator[KVSequence]:
    with closing(engine.open()) as opened:
        yield opened
