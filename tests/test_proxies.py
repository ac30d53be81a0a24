"""Loopback addresses are reached without a proxy, other servers as the environment defines."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from paceline.cli.app import main
from paceline.cli.options import Output
from paceline.cli.ps import ps
from paceline.errors import InvalidRequest, ModelError, PacelineError
from paceline.models import hub
from paceline.runtime.model import Model
from paceline.server.router.pool import Pool
from paceline.server.router.run import Router
from paceline.server.settings import Settings
from paceline_lab.client import Access, closed_loop, connect
from support.errors import raises
from support.fake_hub import serving, use_hub
from support.server import running

VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
REMOTE = "http://models.invalid/v1"


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Requests that reached the proxy of the environment, which answers none."""
    requests: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(f"{self.path} {self.headers['Authorization']}")
            self.send_error(502)

        do_POST = do_CONNECT = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    for name in VARIABLES:
        monkeypatch.setenv(
            name, "" if name == "NO_PROXY" else f"http://127.0.0.1:{server.server_port}"
        )
        monkeypatch.delenv(name.lower(), raising=False)
    yield requests
    server.shutdown()
    thread.join()
    server.server_close()


def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def test_neither_local_requests_nor_keys_go_through_a_proxy(
    proxied: list[str], model: Model, monkeypatch: pytest.MonkeyPatch, cache: Path
):
    monkeypatch.setenv("PACELINE_API_KEY", "secret")
    with running(model, Settings(api_keys=("secret",))) as server:
        for host in ("127.0.0.1", "localhost"):
            url = f"http://{host}:{server.server.port}/v1"
            endpoints = connect(url, Access())
            (sample,) = closed_loop(
                next(iter(endpoints.values())),
                [("one", [{"role": "user", "content": "Hello"}])],
                clients=1,
                requests=1,
            )
            assert sample.error is None
            assert ps(url=url, output=Output(json=True)) == 0
    assert proxied == []


def test_other_machines_are_reached_through_the_proxy_unless_excluded(
    proxied: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PACELINE_API_KEY", "secret")
    with raises(PacelineError, "502"):
        connect(REMOTE, Access())
    assert proxied == [f"{REMOTE}/models None"]
    monkeypatch.setenv("NO_PROXY", "models.invalid")
    with raises(InvalidRequest, "no server listens"):
        connect(REMOTE, Access())
    assert len(proxied) == 1


def test_a_hub_on_this_machine_is_reached_without_the_proxy(
    proxied: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "other.invalid")
    with serving() as fake:
        use_hub(fake, tmp_path, monkeypatch)
        assert main(["pull", "owner/none"]) == 2
        assert fake.asked
    assert proxied == []


@pytest.mark.parametrize("proxy", ["socks5://user:secret@127.0.0.1:1", "socks://h:1", "foo://h:1"])
def test_an_unusable_proxy_is_reported_and_does_not_block_local_requests(
    proxy: str, model: Model, monkeypatch: pytest.MonkeyPatch
):
    unset(monkeypatch)
    monkeypatch.setenv("ALL_PROXY", proxy)
    with raises(InvalidRequest, REMOTE, "correct or unset $ALL_PROXY") as caught:
        connect(REMOTE, Access())
    assert "secret" not in str(caught.value)
    with running(model) as server:
        assert connect(f"{server.url}/v1", Access())
    Router(list, Pool(None, Settings()), Settings(), "m")  # type: ignore[arg-type]


def test_a_proxy_unsupported_by_the_hub_client_is_reported():
    error = ImportError("Using SOCKS proxy, but the 'socksio' package is not installed.")
    with (
        raises(ModelError, "owner/name", "SOCKS proxy", "correct or unset"),
        hub.errors_of("owner/name"),
    ):
        raise error
