from collections.abc import Iterator

import pytest

from paceline.runtime.model import Model
from support.others import Others, slowed
from support.server import Running, running


@pytest.fixture(scope="module")
def others(module_model: Model) -> Others:
    return Others(module_model)


@pytest.fixture(scope="module")
def one_server(
    request: pytest.FixtureRequest, module_model: Model, others: Others
) -> Iterator[Running]:
    """A server with the SETTINGS of the file of tests, whose engine is slow."""
    settings = request.module.SETTINGS
    with slowed(module_model), running(module_model, settings) as instance:
        yield instance


@pytest.fixture
def server(one_server: Running, others: Others) -> Iterator[Running]:
    """`one_server`, while other clients send requests whose answers must stay the same."""
    with others.unharmed(one_server):
        yield one_server
