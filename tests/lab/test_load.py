"""Load on a server: what is asked, and what is said of it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli.app import main
from paceline.errors import InvalidRequest
from paceline.models import QUIET
from paceline.options import GREEDY
from paceline.runtime.model import Model
from paceline.runtime.request import Defaults
from paceline.verify.client import ServedModel, closed_loop, model_of
from paceline.verify.suite import SuitePrompt
from paceline_lab.bench.record import parse_record
from paceline_lab.load import bench_serve, load_facts, open_loop, percentiles
from support.server import Running, running

PROMPTS = [
    SuitePrompt(f"p{n}", "chat", [{"role": "user", "content": text}])
    for n, text in enumerate(("the rain", "one and two", "this is"))
]


@pytest.fixture(scope="module")
def server(tiny_model: Model) -> Iterator[Running]:
    with running(tiny_model) as found:
        yield found


@pytest.fixture
def endpoint(server: Running) -> ServedModel:
    url = f"{server.url}/v1"
    return ServedModel(url, model_of(url), max_tokens=6, fields={"ignore_eos": True})


def test_load_is_greedy_whatever_the_servers_model_says(tiny_model: Model, server: Running):
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    hot = Defaults(registry={"temperature": 0.9, **dict.fromkeys(penalties, 1.7)})
    with running(Model(tiny_model.files, tiny_model.engine, defaults=hot)) as other:
        endpoint = ServedModel(f"{other.url}/v1", "tiny", max_tokens=20)
        (sample,) = closed_loop(endpoint, PROMPTS[:1], clients=1, requests=1).samples
    expected = tiny_model.generate(PROMPTS[0].messages, max_tokens=20, drafter="none", **GREEDY)
    assert (sample.error, sample.text) == (None, expected.text)


@pytest.mark.parametrize("clients", [1, 3])
def test_clients_ask_until_enough_was_asked(endpoint: ServedModel, clients: int):
    heard: list[int] = []
    run = closed_loop(endpoint, PROMPTS, clients=clients, requests=7, watch=heard.append)
    assert len(run.samples) == 7
    assert heard == [*range(1, 8)]
    assert sorted(s.prompt for s in run.samples) == ["p0", "p0", "p0", "p1", "p1", "p2", "p2"]
    found = load_facts(run)
    assert (found["failed"], found["completion_tokens"]) == (0, 42)
    assert found["tokens_per_second"] == pytest.approx(42 / run.seconds)
    for sample in run.samples:
        assert sample.first is not None
        assert 0 < sample.first <= sample.ended - sample.started
        assert sample.per_token is not None
        assert sample.prompt_tokens > 3
    # As many at once as there are clients, and no more.
    marks = sorted([(s.started, 1) for s in run.samples] + [(s.ended, -1) for s in run.samples])
    at_once = most = 0
    for _, change in marks:
        at_once += change
        most = max(most, at_once)
    assert most == clients


def test_requests_come_at_a_rate(endpoint: ServedModel):
    run = open_loop(endpoint, PROMPTS, rate=40.0, requests=8, seed=1)
    starts = [sample.started for sample in sorted(run.samples, key=lambda s: s.started)]
    assert len(starts) == 8
    assert 0.05 < starts[-1] - starts[0] < 2
    assert load_facts(run)["failed"] == 0


def test_errors_are_counted_and_said(endpoint: ServedModel):
    wrong = ServedModel(endpoint.url, "nobody", 4)
    found = load_facts(closed_loop(wrong, PROMPTS, clients=2, requests=3))
    assert found["failed"] == 3
    assert "404" in found["errors"][0]
    assert found["first_token"] is None


def test_a_base_url_that_is_none_is_named(server: Running):
    with pytest.raises(InvalidRequest, match="models"):
        model_of(f"{server.url}/health")


def test_a_url_that_cannot_be_parsed_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "serve", "--url", "http://["]) == 2
    said = capsys.readouterr().err
    assert said.startswith("paceline: http://[/models cannot be read")
    assert said.count("\n") == 1


def test_percentiles_of_few():
    assert percentiles(iter([])) is None
    assert percentiles(iter([2.0])) == {"p50": 2.0, "p90": 2.0, "p99": 2.0, "max": 2.0}
    found = percentiles(iter([3.0, 1.0, 2.0]))
    assert found is not None
    assert (found["p50"], found["max"]) == (2.0, 3.0)


def test_from_the_command_line(server: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    suite = tmp_path / "suite.jsonl"
    lines = ({"id": p.id, "kind": p.kind, "messages": list(p.messages)} for p in PROMPTS)
    suite.write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = ["bench", "serve", "--url", f"{server.url}/v1/", "--suite", str(suite)]
    common += ["--requests", "3", "--max-tokens", "4", "--quiet"]
    assert main([*common, "--clients", "1", "--clients", "2", "--rate", "50", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    record = parse_record(value, "it")
    assert record.kind == "serve"
    assert record.cases == ["1 client", "2 clients", "50 requests/s"]
    assert record.suite_sha256
    for row in record.rows:
        assert len(row.measures["first_token_seconds"]) == row.facts["requests"] == 3
        assert row.measures["tokens_per_second"][0] > 0
    assert main([*common, "--clients", "1"]) == 0
    assert "tokens/s" in capsys.readouterr().out
    assert main([*common, "--model", "nobody"]) == 1


def test_extra_fields_are_a_json_object(server: Running):
    with pytest.raises(InvalidRequest, match=r"--extra is 'x'; expected a JSON object"):
        bench_serve(QUIET, url=server.url, requests=1, max_tokens=1, extra="x")
