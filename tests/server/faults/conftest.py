from collections.abc import Iterator

import pytest

from paceline.runtime.model import Model
from support.other_clients import OtherClients, slowed
from support.server import Running, running


@pytest.fixture(scope="module")
def others(module_model: Model) -> OtherClients:
    return OtherClients(module_model)


@pytest.fixture(scope="module")
def one_server(
    request: pytest.FixtureRequest, module_model: Model, others: OtherClients
) -> Iterator[Running]:
    """A server with the SETTINGS of the file of tests, whose engine is slow."""
    settings = request.module.SETTINGS
    with slowed(module_model), running(module_model, settings) as instance:
        yield instance


@pytest.fixture
def server(one_server: Running, others: OtherClients) -> Iterator[Running]:
    """`one_server`, while other clients send requests whose responses must not change."""
    with others.unharmed(one_server):
        yield one_server
