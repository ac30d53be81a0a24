"""`paceline ps` against a server, nothing, and something else that listens."""

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline import Model
from paceline.cli.app import main
from paceline.cli.servers import registration
from paceline.server.settings import Settings
from support.server import running


def listed(url: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["ps", "--url", url, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_served_model_is_listed(model: Model, capsys: pytest.CaptureFixture[str]):
    with running(model) as server:
        (served,) = listed(f"{server.url}/v1", capsys)
        assert (served["state"], served["drafter"]) == ("loaded", "suffix")
        assert served["device"] == "the CPU"
        assert main(["ps", "--url", f"{server.url}/v1"]) == 0
        assert served["id"] in capsys.readouterr().out


def test_ps_without_a_url_lists_the_users_servers(
    model: Model, cache: Path, capsys: pytest.CaptureFixture[str]
):
    with running(model) as server, registration() as register:
        register(f"serving at {server.url}/v1 (a page)")
        assert main(["ps", "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)
    assert f"{server.url}/v1" in [entry["url"] for entry in listed]


def test_ps_lists_a_server_with_another_key_next_to_the_rest(
    model: Model, cache: Path, capsys: pytest.CaptureFixture[str]
):
    closed = Settings(api_keys=("secret",))
    with running(model, closed) as server, registration() as register:
        register(f"serving at {server.url}/v1 (a page)")
        assert main(["ps"]) == 0
        assert "needs its key" in capsys.readouterr().out
        (locked,) = listed(f"{server.url}/v1", capsys)
        assert (locked["id"], locked["state"]) == (None, "needs its key")


def test_ps_lists_nothing_without_a_server(capsys: pytest.CaptureFixture[str]):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        assert listed(f"http://127.0.0.1:{unused.getsockname()[1]}/v1", capsys) == []


@pytest.mark.parametrize("url", ["no url", "http://127.0.0.1:1:2"])
def test_an_invalid_url_is_a_one_line_error(url: str, capsys: pytest.CaptureFixture[str]):
    assert main(["ps", "--url", url]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("host", "sent"), [("127.0.0.1", True), ("models.example", False)])
def test_the_servers_api_key_is_sent_only_to_this_machine(
    host: str, sent: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    clients: list[Any] = []

    class Refused(httpx.Client):
        def get(self, *_: object, **__: object) -> Any:
            clients.append(self)
            raise httpx.ConnectError("refused")

    monkeypatch.setenv("PACELINE_API_KEY", "secret")
    monkeypatch.setattr("httpx.Client", Refused)
    assert listed(f"http://{host}:8000/v1", capsys) == []
    assert [client.headers.get("authorization") == "Bearer secret" for client in clients] == [sent]
