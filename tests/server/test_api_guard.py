"""Rejected requests: keys, hosts, origins, body sizes, time limits."""

import re
import socket
from typing import Any

import pytest

from paceline.cli.app import main
from paceline.errors import InvalidRequest, PacelineError
from paceline.runtime.model import Model
from paceline.server.run import Server
from paceline.server.settings import Settings
from support.errors import raises
from support.server import Running, head, running
from support.waiting import PATIENCE

ASK: dict[str, Any] = {"prompt": "a", "max_tokens": 1}


def test_allowed_hosts_are_accepted(model: Model):
    with running(model, Settings(hosts=("box.lan",))) as server:
        assert server.get("/health", headers={"host": "box.lan:80"}).status_code == 200
        assert server.get("/health").status_code == 403
    with running(model, Settings(hosts=("*",))) as server:
        assert server.get("/health", headers={"host": "any"}).status_code == 200


@pytest.mark.parametrize(
    ("option", "values"),
    [
        (
            "--origin",
            ("x", "", "example.com", "http://", "http://a/", "http://A.example", "http://a:b"),
        ),
        ("--allow-host", ("", " ", "a b", "http://a", "a/b", "a:8000", "[::1]", "a..b", "é")),
    ],
)
def test_an_origin_and_a_host_that_no_client_can_send_are_refused(
    option: str, values: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    for value in values:
        assert main(["serve", option, value, "--model", "nothing"]) == 2
        output = capsys.readouterr().err
        assert f"{value!r} is none: expected" in output
        assert output.count("\n") == 1


def test_origins_and_hosts_that_clients_send_are_taken():
    origins = ("*", "http://a", "https://a.example:8443", "http://[::1]:3000", "tauri://localhost")
    hosts = ("*", "a", "A.example", "under_score", "127.0.0.1", "::1", "xn--bcher-kva.example.")
    settings = Settings(origins=origins, hosts=hosts)
    assert (settings.origins, settings.hosts) == (origins, hosts)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/nothing"])
def test_a_client_that_is_still_sending_gets_the_error_of_its_large_body(
    server: Running, path: str
):
    body = b"a" * 20_000_000
    with socket.create_connection(("127.0.0.1", server.server.port), PATIENCE) as client:
        client.sendall(head(len(body), "Connection: close", path=path) + body)
        assert client.recv(12) == b"HTTP/1.1 " + (b"413" if "comp" in path else b"404")


def test_a_json_content_type_may_have_a_charset(server: Running):
    body = b'{"prompt": "a", "max_tokens": 1}'
    kind = "application/json; charset=utf-8"
    response = server.post("/v1/completions", body, headers={"content-type": kind})
    assert response.status_code == 200


def test_a_request_keeps_its_id(server: Running):
    response = server.get("/health", headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    results = [server.get("/nothing").headers["x-request-id"] for _ in range(2)]
    assert results[0] != results[1]
    strange = server.get("/health", headers={"x-request-id": "a" * 500})
    assert len(strange.headers["x-request-id"]) < 200


def test_rejected_requests_are_counted(model: Model):
    with running(model, Settings(api_keys=("key",))) as server:
        key = {"x-api-key": "key"}
        assert server.post("/v1/completions", ASK).status_code == 401
        assert server.get("/health", headers={"host": "evil.example"}).status_code == 403
        assert server.get("/nothing", headers=key).status_code == 404
        assert server.get("/v1/models/other", headers=key).status_code == 404
        assert server.get("/v1/completions", headers=key).status_code == 405
        for body in (b"{", {**ASK, "prompt": "a " * 2000}, {**ASK, "top_p": 7}):
            assert server.post("/v1/completions", body, headers=key).status_code == 400
        received = server.get("/metrics", headers=key).text
    reasons = set(re.findall(r'paceline_requests_refused_total\{reason="(\w+)"\} 1\.0', received))
    assert reasons == {
        *("invalid_api_key", "wrong_host", "unknown_url", "model_not_found", "method_not_allowed"),
        *("invalid_json", "context_length_exceeded", "invalid_request_error"),
    }


def wait_for_hang_up(connection: socket.socket) -> None:
    """The other side has to close."""
    connection.settimeout(PATIENCE)
    while connection.recv(4096):
        pass


def test_slow_headers_and_bodies_time_out(model: Model):
    with running(model, Settings(header_seconds=0.5, body_seconds=0.5)) as server:
        place = ("127.0.0.1", server.server.port)
        for begun in (b"", b"GET /health HT"):
            with socket.create_connection(place) as connection:
                connection.sendall(begun)
                wait_for_hang_up(connection)
        with socket.create_connection(place) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in connection.recv(4096)
            connection.sendall(b"GET /hea")
            wait_for_hang_up(connection)
        with socket.create_connection(place) as connection:
            connection.sendall(head(9) + b"{")
            connection.settimeout(PATIENCE)
            assert b" 408 " in connection.recv(4096)
        assert server.get("/health").status_code == 200


def test_a_server_that_other_machines_reach_requires_a_key(model: Model):
    with raises(InvalidRequest, "API"):
        Server(model, Settings(host="0.0.0.0"))
    for settings in (Settings(api_keys=("k",)), Settings(anyone=True)):
        with running(model, settings, host="0.0.0.0") as server:
            assert server.server.port


def test_a_used_address_is_a_one_line_error(model: Model, own_server: Running):
    with raises(PacelineError, "listen"):
        Server(model, Settings(port=own_server.server.port))
