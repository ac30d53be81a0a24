"""Rejected requests: keys, hosts, origins, body sizes, time limits."""

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import main
from paceline.errors import InvalidRequest
from paceline.runtime.model import Model
from paceline.server.run import Server
from paceline.server.settings import Settings, api_keys
from support.errors import raises
from support.server import HTTP, Running, head, running
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
def test_origins_and_hosts_that_no_client_sends_are_rejected(
    option: str, values: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    for value in values:
        assert main(["serve", option, value, "--model", "nothing"]) == 2
        output = capsys.readouterr().err
        assert f"{value!r}; expected" in output
        assert output.count("\n") == 1


def test_origins_and_hosts_that_clients_send_are_accepted():
    origins = ("*", "http://a", "https://a.example:8443", "http://[::1]:3000", "tauri://localhost")
    hosts = ("*", "a", "A.example", "under_score", "127.0.0.1", "::1", "xn--bcher-kva.example.")
    settings = Settings(origins=origins, hosts=hosts)
    assert (settings.origins, settings.hosts) == (origins, hosts)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/nothing"])
def test_a_client_still_sending_a_large_body_gets_its_error(server: Running, path: str):
    body = b"a" * 20_000_000
    with socket.create_connection(("127.0.0.1", server.server.port), PATIENCE) as client:
        client.sendall(head(len(body), "Connection: close", path=path) + body)
        assert client.recv(12) == b"HTTP/1.1 " + (b"413" if "comp" in path else b"404")


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
    """Wait until the other side closes the connection."""
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


def test_a_server_reachable_from_other_machines_requires_a_key(model: Model):
    with raises(InvalidRequest, "API"):
        Server(model, Settings(host="0.0.0.0"))
    for settings in (Settings(api_keys=("k",)), Settings(no_auth=True)):
        with running(model, settings, host="0.0.0.0") as server:
            assert server.server.port


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a command loads a model; remove the key from the environment."""
    monkeypatch.delenv("PACELINE_API_KEY", raising=False)
    monkeypatch.setattr(
        "paceline.cli.serve.load_model", lambda *_, **__: pytest.fail("a model was loaded")
    )


@pytest.mark.parametrize("source", ["--api-key", "PACELINE_API_KEY", "--api-key-file"])
def test_an_empty_api_key_from_any_source_is_rejected(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for empty in ("", " ", "\t"):
        words = ["serve", "--port", "0", source, empty]
        if source == "PACELINE_API_KEY":
            monkeypatch.setenv("PACELINE_API_KEY", empty)
            words = words[:3]
        elif source == "--api-key-file":
            words[-1] = str(tmp_path / "keys.txt")
            (tmp_path / "keys.txt").write_text(empty)
        for more in ([], ["--host", "0.0.0.0", "--no-auth"]):
            assert main([*words, *more]) == 2
            assert source in capsys.readouterr().err
    assert main(["serve", "--api-key", "", "--api-key", "good"]) == 2


def test_an_unusable_address_is_rejected_before_downloading_a_model(
    capsys: pytest.CaptureFixture[str],
):
    assert main(["serve", "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "set an API key" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "choose another with --port" in capsys.readouterr().err


def test_a_key_file_with_an_invalid_line_is_rejected(tmp_path: Path):
    path = tmp_path / "keys.txt"
    contents = (b"", b"# none\n", b"one\n\ntwo\n", b" one\n", b"one\x00\n", b"k" * (2**20 + 1))
    for content in contents:
        path.write_bytes(content)
        with raises(InvalidRequest, "keys.txt"):
            api_keys([], path, {})
    for unreadable in (tmp_path, tmp_path / "none"):
        with raises(InvalidRequest, "api-key-file"):
            api_keys([], unreadable, {})
    with pytest.raises(InvalidRequest) as caught:
        api_keys(["secret "], None, {})
    assert "secret" not in str(caught.value)


def test_keys_from_flags_and_a_file_are_combined_and_override_the_environment(tmp_path: Path):
    path = tmp_path / "keys.txt"
    path.write_bytes(b"# mine\ntwo\r\nthree")
    environment = {"PACELINE_API_KEY": "four"}
    assert api_keys(["one"], path, environment) == ("one", "two", "three")
    assert api_keys([], None, environment) == ("four",)
    assert api_keys([], None, {}) == ()
    assert api_keys(["one"], None, {"PACELINE_API_KEY": ""}) == ("one",)


@pytest.mark.parametrize("key", ["voilà", "a b", "xy\udcff"])
def test_a_non_ascii_key_is_compared_as_bytes(model: Model, key: str):
    sent = key.encode("utf-8", "surrogateescape")
    with running(model, Settings(api_keys=(key,))) as server:
        for header in ({b"x-api-key": sent}, {b"authorization": b"Bearer " + sent}):
            assert server.get("/v1/models", headers=header).status_code == 200
        for wrong in (b"", b"x", sent[:1], sent + b"x", "clé".encode(), b"\xff\xfe"):
            assert server.get("/v1/models", headers={b"x-api-key": wrong}).status_code == 401


def test_every_key_is_compared_in_constant_time(model: Model, monkeypatch: pytest.MonkeyPatch):
    import hmac

    compared = []
    compare = hmac.compare_digest

    def counted(one: Any, other: Any) -> bool:
        compared.append(one)
        return compare(one, other)

    with running(model, Settings(api_keys=("first", "second", "third"))) as server:
        monkeypatch.setattr("paceline.server.http.hmac.compare_digest", counted)
        for key in ("first", "third", "none"):
            compared.clear()
            server.get("/v1/models", headers={"x-api-key": key})
            assert set(compared) == {b"first", b"second", b"third"}


def test_a_stored_response_needs_the_key_that_made_it(model: Model):
    mine, other = ({"authorization": f"Bearer {key}"} for key in ("mine", "other"))
    path = "/v1/responses"
    body = {"input": "this is the one", "max_output_tokens": 4}
    with running(model, Settings(api_keys=("other", "mine"))) as server:
        stored = server.post(path, body, headers=mine).json()
        name, item = stored["id"], stored["output"][0]["id"]
        more: list[dict[str, Any]] = [
            {**body, "previous_response_id": name},
            {**body, "input": [{"type": "item_reference", "id": item}]},
        ]
        spoofed = {**other, "x-paceline-client": "1"}
        for headers in (other, spoofed):
            assert server.get(f"{path}/{name}", headers=headers).status_code == 404
            deleted = HTTP.delete(f"{server.url}{path}/{name}", headers=headers)
            assert deleted.status_code == 404
            for continued in more:
                assert server.post(path, continued, headers=headers).status_code == 400
        assert server.get(f"{path}/{name}", headers=mine).json() == stored
        for continued in more:
            assert server.post(path, continued, headers=mine).status_code == 200
        assert HTTP.delete(f"{server.url}{path}/{name}", headers=mine).status_code == 200
        assert server.get(f"{path}/{name}", headers=mine).status_code == 404
        assert server.post(path, more[0], headers=mine).status_code == 400
        unkept = server.post(path, {**body, "store": False}, headers=mine).json()
        assert server.get(f"{path}/{unkept['id']}", headers=mine).status_code == 404
