"""Several models behind one port: real processes of `paceline serve` with tiny models."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.cli.app import main
from paceline.models import ModelEntry
from paceline.server.router.run import RouterServer
from paceline.server.settings import Settings
from support.command import free_port, served
from support.process import command_lines
from support.server import HTTP
from support.tiny import write_tiny
from support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow

OPTIONS = ("--drafter=suffix", "--cache-tokens=512", "--generation-config=none")


class RunningRouter:
    """A router to the GGUF files of a folder, in a separate thread."""

    def __init__(self, folder: Path, cache: Path, keys: tuple[str, ...] = ()) -> None:
        self.folder, self.said = folder, list[str]()
        self._patch = pytest.MonkeyPatch()
        self._patch.setenv("PACELINE_CACHE", str(cache))
        self.server = RouterServer(
            self.name("one"),
            OPTIONS,
            settings=Settings(api_keys=keys, timeout=PATIENCE),
            listed=self._listed,
            on_line=self.said.append,
        )
        self._thread = threading.Thread(
            target=self.server.run, kwargs={"on_line": self.said.append}
        )

    def _listed(self) -> list[ModelEntry]:
        paths = sorted(self.folder.glob("*.gguf"))
        return [ModelEntry(str(path), True, "", None, path.stat().st_size) for path in paths]

    def __enter__(self) -> Self:
        self._thread.start()
        until(lambda: any(line.startswith("serving all") for line in self.said))
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        self.server.stop()
        self._thread.join(PATIENCE)
        self._patch.undo()
        assert not self._thread.is_alive()

    def name(self, stem: str) -> str:
        return str(self.folder / f"{stem}.gguf")

    def get(self, path: str) -> httpx.Response:
        return HTTP.get(self.server.url + path)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return HTTP.post(self.server.url + path, json=body, **more)

    def complete(self, name: str | None, **more: Any) -> httpx.Response:
        body = {"model": name, "prompt": "a b", "max_tokens": 4, "temperature": 0, **more}
        return self.post("/v1/completions", body)

    def states(self) -> dict[str, str]:
        states: dict[str, str] = self.get("/health").json()["models"]
        return states


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache folder of all servers here: each model is measured once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[RunningRouter]:
    """A router to three files: two models and a file that is not a model."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder / "one.gguf")
    write_tiny(folder / "two.gguf", seed=1)
    (folder / "broken.gguf").write_bytes(b"GGUF")
    with RunningRouter(folder, cache) as instance:
        yield instance


def test_models_are_listed_and_loaded_by_name_or_by_default(router: RunningRouter):
    page = router.get("/v1/models").json()
    listed, names = page["data"], [router.name(stem) for stem in ("broken", "one", "two")]
    assert [model["id"] for model in listed] == names
    assert [model["type"] for model in listed] == ["model"] * 3
    assert (page["first_id"], page["last_id"], page["has_more"]) == (names[0], names[-1], False)
    assert {model["status"]["value"] for model in listed} <= {"loaded", "unloaded"}
    assert router.get(f"/v1/models/{router.name('two')}").json()["id"] == router.name("two")
    first = router.complete(None)
    assert first.status_code == 200, first.text
    assert first.json()["model"] == router.name("one")
    second = router.complete(router.name("two"))
    assert second.json()["model"] == router.name("two")
    assert second.json()["choices"] != first.json()["choices"]
    assert router.states() == {router.name("two"): "loaded"}
    assert _command_lines(router.name("one")) == [], "the memory of the first is not free"
    assert router.complete(router.name("one")).json()["choices"] == first.json()["choices"]


def test_a_stream_is_forwarded_event_by_event(router: RunningRouter):
    body = {"model": router.name("one"), "prompt": "a", "max_tokens": 8, "stream": True}
    with HTTP.stream("POST", router.server.url + "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line for line in response.iter_lines() if line]
    assert events[-1] == "data: [DONE]"
    assert len(events) > 2


def test_a_stored_response_is_found_while_its_model_is_loaded(router: RunningRouter):
    body = {"model": router.name("one"), "input": "a", "max_output_tokens": 2}
    response = router.post("/v1/responses", body).json()
    assert router.get(f"/v1/responses/{response['id']}").json()["id"] == response["id"]
    for wrong in ("resp_0", "a%05b", "%00", "%ff", "%3F", response["id"] + "%3Fa", "9" * 5000):
        assert router.get(f"/v1/responses/{wrong}").status_code == 404, wrong
    deleted = HTTP.delete(f"{router.server.url}/v1/responses/{response['id']}")
    assert deleted.json()["deleted"] is True
    assert router.get(f"/v1/responses/{response['id']}").status_code == 404


def test_router_errors_are_one_line_each(router: RunningRouter):
    unknown = router.complete("/etc/passwd")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"
    body = {"model": "claude-0", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    anthropic = router.post("/v1/messages", body)
    assert anthropic.status_code == 404
    assert anthropic.json()["error"]["type"] == "not_found_error"
    broken = router.complete(router.name("broken"))
    assert broken.status_code == 500
    message = broken.json()["error"]["message"]
    assert "broken.gguf cannot be loaded: " in message
    assert "\n" not in message
    assert "Traceback" not in message
    assert router.complete(["x"]).status_code == 400  # type: ignore[arg-type]
    headers = {"content-type": "application/json"}
    for text in (b"{", b"[]", b"\xff"):
        bad = HTTP.post(router.server.url + "/v1/completions", content=text, headers=headers)
        assert bad.status_code == 400, text
    assert router.get("/v1/nothing").json()["error"]["code"] == "unknown_url"
    passed_on = router.complete(router.name("one"), temperature=-1)
    assert (passed_on.status_code, passed_on.json()["error"]["param"]) == (400, "temperature")
    assert router.complete(router.name("one")).status_code == 200


def test_two_models_taking_turns_lose_nothing(router: RunningRouter):
    """More clients than slots, for both models at once."""
    answers: list[tuple[str, int, Any]] = []

    def client(stem: str) -> None:
        for _ in range(2):
            response = router.complete(router.name(stem))
            answers.append((stem, response.status_code, response.json().get("choices")))

    threads = [threading.Thread(target=client, args=(stem,)) for stem in ("one", "two") * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [status for _, status, _ in answers] == [200] * 12
    texts = {(stem, str(choices[0]["text"])) for stem, _, choices in answers}
    assert len(texts) == 2, "an answer is of the other model"


def test_metrics_are_labeled_by_model_and_parse(router: RunningRouter):
    router.complete(router.name("one"))
    text = router.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    (steps,) = families["paceline_answers"].samples[:1]
    assert steps.labels["model"] == router.name("one")
    assert families["paceline_router_loads"].samples[0].value >= 1


def test_a_model_is_reloaded_after_its_process_is_killed(router: RunningRouter):
    assert router.complete(router.name("one")).status_code == 200
    (child,) = router.server.router._pool.loaded.values()
    child._process.kill()
    until(lambda: router.states() == {})
    assert router.complete(router.name("one")).status_code == 200


def test_the_command_serves_installed_models_and_stops_their_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--owner--repo"
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    write_tiny(repository / "snapshots" / "abc" / "tiny.gguf")
    port = str(free_port())
    with served("owner/repo/tiny.gguf", tmp_path, "--all", "--port", port) as command:
        url = command.url
        listed = [item["id"] for item in HTTP.get(f"{url}/v1/models").json()["data"]]
        assert len(listed) == 1
        body = {"model": listed[0], "prompt": "a", "max_tokens": 2}
        assert HTTP.post(f"{url}/v1/completions", json=body).status_code == 200
    assert "loading " in command.said
    assert "Traceback" not in command.said
    assert "Fatal" not in command.said, "the model's process crashed"
    end = time.monotonic() + PATIENCE
    while any(b"--until-input-ends" in line for line in _command_lines(listed[0])):
        assert time.monotonic() < end, "a model's process is left"
        time.sleep(0.05)


def _command_lines(model: str) -> list[bytes]:
    """Return the command lines that have the model's name, of all processes."""
    return [line for _, line in command_lines() if model.encode() in line]


def test_the_routers_stored_responses_need_the_key_that_made_them(tmp_path: Path, cache: Path):
    write_tiny(tmp_path / "one.gguf")
    mine, other = ({"authorization": f"Bearer {key}"} for key in ("mine", "other"))
    with RunningRouter(tmp_path, cache, ("other", "mine")) as router:
        url = f"{router.server.url}/v1/responses"
        body = {"input": "a b", "max_output_tokens": 4}
        stored = HTTP.post(url, json=body, headers=mine).json()
        continued = {**body, "previous_response_id": stored["id"]}
        for headers in (other, {**other, "x-paceline-client": "1"}):
            assert HTTP.get(f"{url}/{stored['id']}", headers=headers).status_code == 404
            assert HTTP.post(url, json=continued, headers=headers).status_code == 400
        assert HTTP.get(f"{url}/{stored['id']}", headers=mine).json() == stored
        assert HTTP.post(url, json=continued, headers=mine).status_code == 200


def test_a_missing_default_model_and_single_model_options_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    not_here = "--model {} is not installed"
    names = ("nothing", str(tmp_path / "no.gguf"), "owner/repo:Q4_K_M")
    wrong = {("--model", name): not_here.format(name) for name in names}
    for option in (("--engine", "llamacpp"), ("--name", "x"), ("--revision", "a")):
        wrong[option] = "--name, --alias, --revision and --engine are not for --all"
    for words, said in wrong.items():
        assert main(["serve", "--all", "--port", "0", *words]) == 2
        output = capsys.readouterr().err
        assert said in output
        assert output.count("\n") == 1
