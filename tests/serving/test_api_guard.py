"""Who is let in: keys, hosts, pages of others, sizes, patience."""

import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from paceline.errors import InvalidRequest, PacelineError
from paceline.runtime import Model
from paceline.serving.command import Server
from paceline.serving.settings import Settings
from support.server import Running, running

ASK: dict[str, Any] = {"prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def locked(module_model: Model) -> Iterator[Running]:
    settings = Settings(api_keys=("first", "sécond"), origins=("http://good.example",))
    with running(module_model, settings) as made:
        yield made


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic first"}, 401),
        ({"x-api-key": "firs"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Bearer first"}, 200),
        ({"authorization": "bearer first"}, 200),
        ({"x-api-key": "first"}, 200),
        ({"x-api-key": "sécond".encode()}, 200),
    ],
)
def test_a_key_opens(locked: Running, headers: dict[str, str], status: int):
    response = locked.post("/v1/completions", ASK, headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["type"] == "authentication_error"
        assert locked.get("/v1/models", headers=headers).status_code == 401
        assert locked.get("/nothing", headers=headers).status_code == 401


def test_health_needs_no_key(locked: Running):
    assert locked.get("/health").status_code == 200


def test_pages_of_others_are_not_let_in(locked: Running):
    ask = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    path = f"{locked.url}/v1/completions"
    good = httpx.options(path, headers={"origin": "http://good.example", **ask})
    assert good.headers["access-control-allow-origin"] == "http://good.example"
    evil = httpx.options(path, headers={"origin": "http://evil.example", **ask})
    assert "access-control-allow-origin" not in evil.headers
    answered = locked.post(
        "/v1/completions",
        ASK,
        headers={"origin": "http://good.example", "x-api-key": "first"},
    )
    assert answered.headers["access-control-allow-origin"] == "http://good.example"


def test_without_being_asked_no_page_is_let_in(server: Running):
    response = server.post("/v1/completions", ASK, headers={"origin": "http://any.example"})
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [("evil.example", 403), ("localhost.evil", 403), ("LOCALHOST:1", 200), ("[::1]:80", 200)],
)
def test_a_page_that_points_its_name_here_is_turned_away(server: Running, host: str, status: int):
    response = server.get("/v1/models", headers={"host": host})
    assert response.status_code == status


def test_a_host_can_be_named(model: Model):
    with running(model, Settings(hosts=("box.lan",))) as server:
        assert server.get("/health", headers={"host": "box.lan:80"}).status_code == 200
        assert server.get("/health").status_code == 403
    with running(model, Settings(hosts=("*",))) as server:
        assert server.get("/health", headers={"host": "any"}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_read(server: Running, kind: str):
    response = server.post("/v1/completions", b"{}", headers={"content-type": kind})
    assert response.status_code == 415


def test_json_may_say_its_letters(server: Running):
    body = b'{"prompt": "a", "max_tokens": 1}'
    kind = "application/json; charset=utf-8"
    response = server.post("/v1/completions", body, headers={"content-type": kind})
    assert response.status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_turned_away(model: Model, chunked: bool):
    with running(model, Settings(body_bytes=100_000)) as server:
        body: Any = b'{"prompt": "' + b"a" * 10_000_000 + b'"}'
        if chunked:
            small = b'{"prompt": "' + b"a" * 200_000 + b'"}'
            parts = iter([small[:70_000], small[70_000:]])
            response = httpx.post(
                f"{server.url}/v1/completions",
                content=parts,
                headers={"content-type": "application/json"},
            )
        else:
            response = server.post("/v1/completions", body)
        assert response.status_code == 413
        assert server.post("/v1/completions", ASK).status_code == 200


def test_a_request_keeps_its_id(server: Running):
    given = server.get("/health", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    made = [server.get("/nothing").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    strange = server.get("/health", headers={"x-request-id": "a" * 500})
    assert len(strange.headers["x-request-id"]) < 200


def hung_up(connection: socket.socket) -> float:
    """Seconds until the other side has closed, having sent nothing else."""
    started = time.monotonic()
    connection.settimeout(5)
    while connection.recv(4096):
        pass
    return time.monotonic() - started


def test_headers_and_bodies_that_do_not_come_are_not_waited_for(model: Model):
    with running(model, Settings(header_seconds=0.2, body_seconds=0.2)) as server:
        place = ("127.0.0.1", server.server.port)
        for begun in (b"", b"GET /health HT"):
            with socket.create_connection(place) as connection:
                connection.sendall(begun)
                assert hung_up(connection) < 3
        with socket.create_connection(place) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in connection.recv(4096)
            connection.sendall(b"GET /hea")
            assert hung_up(connection) < 3
        with socket.create_connection(place) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
                b"Content-Type: application/json\r\n\r\n{"
            )
            connection.settimeout(5)
            assert b" 408 " in connection.recv(4096)
        assert server.get("/health").status_code == 200


def test_a_server_that_others_reach_wants_a_key(model: Model):
    with pytest.raises(InvalidRequest, match="API key"):
        Server(model, "0.0.0.0")
    for settings in (Settings(api_keys=("k",)), Settings(anyone=True)):
        with running(model, settings, host="0.0.0.0") as server:
            assert server.server.port


def test_an_address_that_is_taken_is_one_line(model: Model, own_server: Running):
    with pytest.raises(PacelineError, match="cannot listen at"):
        Server(model, port=own_server.server.port)
