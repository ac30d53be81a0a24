"""A server's models, tokens, health, and metrics, compared with responses."""

import functools
import json
import operator
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from typing import Any, NamedTuple

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from paceline.runtime.model import Model
from paceline.server.http import to_json
from paceline.server.settings import Settings
from support.other_clients import fault, fault_of_anthropic
from support.server import Running, running
from support.waiting import until

REPEATED = "this is the one and this is the one and this is the one and this"
LONG: dict[str, Any] = {"prompt": REPEATED, "max_tokens": 450, "ignore_eos": True, "stream": True}


def families(server: Running) -> list[Metric]:
    response = server.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return list(text_string_to_metric_families(response.text))


def values(server: Running) -> dict[str, dict[str, float]]:
    """Name -> label that distinguishes values, or "" -> value."""
    result: dict[str, dict[str, float]] = {}
    for family in families(server):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            result.setdefault(sample.name, {})[",".join(labels.values())] = sample.value
    return result


def single(result: dict[str, dict[str, float]], name: str) -> float:
    (value,) = result[name].values()
    return value


class Observed(NamedTuple):
    """An idle server with one client so far: its responses and its counters."""

    responses: list[dict[str, Any]]
    counters: dict[str, dict[str, float]]
    server: Running

    def total(self, *path: str) -> float:
        """The sum of a field of the responses."""
        return sum(
            functools.reduce(operator.getitem, path, response) for response in self.responses
        )

    def by(self, *path: str) -> Counter[str]:
        """The sums of an object of counts, by key."""
        counts = Counter[str]()
        for response in self.responses:
            counts.update(functools.reduce(operator.getitem, path, response))
        return counts

    def counted(self, name: str) -> float:
        """The value of a metric `paceline_...`."""
        return single(self.counters, f"paceline_{name}")


@pytest.fixture(scope="module")
def observed(module_model: Model) -> Iterator[Observed]:
    text = {"prompt": REPEATED, "max_tokens": 60, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": REPEATED}], "max_tokens": 40}
    completions: list[dict[str, Any]] = [
        text,
        text,  # from the cache
        {**text, "cache_prompt": False},
        {**text, "speculation": {"drafter": "none"}},
        {**text, "speculation": {"policy": "fixed", "max_block": 6}},
        {**text, "speculation": {"drafter": "suffix+ngram:min=1"}, "ignore_eos": True},
        {**text, "stop": ["e"], "ignore_eos": True},
        {**text, "max_tokens": 0, "echo": True},
        {**text, "max_tokens": 1},
    ]
    with running(module_model) as server:
        responses = [server.post("/v1/completions", body).json() for body in completions]
        # With seed 176 the text ends right after its first token: one token, yet one step.
        for more in ({"temperature": 0}, {"seed": 3, "logprobs": True}, {"seed": 176}):
            responses.append(server.post("/v1/chat/completions", {**chat, **more}).json())
        streamed = {**chat, "seed": 4, "stream_options": {"include_usage": True}}
        responses.append(server.events("/v1/chat/completions", streamed)[-2])
        server.rest()
        yield Observed(responses, values(server), server)


def test_token_counters_match_the_usage(observed: Observed):
    assert observed.counted("prompt_tokens_total") == observed.total("usage", "prompt_tokens")
    assert observed.counted("generation_tokens_total") == observed.total(
        "usage", "completion_tokens"
    )
    cached = observed.total("usage", "prompt_tokens_details", "cached_tokens")
    assert observed.counted("cached_prompt_tokens_total") == observed.counted(
        "prompt_cache_hits_total"
    )
    assert observed.counted("cached_prompt_tokens_total") == cached > 0


def test_step_and_drafter_counters_match_the_speculation_fields(observed: Observed):
    assert observed.counted("steps_total") == observed.total("speculation", "steps") > 0
    result = observed.counters
    assert result["paceline_drafter_draft_tokens_total"] == observed.by("speculation", "drafted_by")
    assert result["paceline_drafter_accepted_tokens_total"] == observed.by(
        "speculation", "accepted_by"
    )
    tokens = sum(
        response["speculation"]["steps"] * response["speculation"]["tokens_per_step"]
        for response in observed.responses
    )
    assert observed.counted("step_tokens_total") == pytest.approx(tokens)


def test_draft_counters_match_the_acceptance_histograms(observed: Observed):
    about = [response["metrics"]["speculative_decoding"] for response in observed.responses]
    assert observed.counted("drafts_total") == sum(item["num_spec_steps"] for item in about) > 0
    assert observed.counted("draft_tokens_total") == sum(item["num_draft_tokens"] for item in about)
    accepted = sum(item["num_accepted_draft_tokens"] for item in about)
    assert 0 < accepted == observed.counted("accepted_tokens_total")
    assert accepted < observed.counted("draft_tokens_total")
    places = Counter[str]()
    for line in about:
        for length, steps in enumerate(line["acceptance_histogram"]):
            places.update({str(place): steps for place in range(length)})
    result = observed.counters["paceline_accepted_tokens_per_position_total"]
    assert result == {place: steps for place, steps in places.items() if steps}
    assert sum(result.values()) == accepted


def test_latencies_are_observed_once_per_response(observed: Observed):
    steps = [response["speculation"]["steps"] for response in observed.responses]
    names = ("queue", "time_to_first_token", "e2e_request_latency", "time_per_output_token")
    counts = [observed.counted(f"{name}_seconds_count") for name in names]
    assert counts == [len(steps)] * 3 + [sum(each > 0 for each in steps)]
    queue, first, whole, each = (observed.counted(f"{name}_seconds_sum") for name in names)
    assert 0 < queue < first < whole
    per_token = sum(r["timings"]["predicted_per_token_ms"] for r in observed.responses)
    assert each == pytest.approx(per_token / 1e3)


def test_several_responses_count_one_prompt(module_model: Model):
    with running(module_model) as server:
        body = {"prompt": ["a b", REPEATED], "max_tokens": 5, "n": 3, "ignore_eos": True}
        usage = server.post("/v1/completions", body).json()["usage"]
        counters = values(server)
    assert single(counters, "paceline_prompt_tokens_total") == usage["prompt_tokens"]
    assert single(counters, "paceline_generation_tokens_total") == usage["completion_tokens"] == 30
    assert counters["paceline_answers_total"] == {"length": 6}
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert single(counters, "paceline_cached_prompt_tokens_total") == cached


def test_every_metric_has_its_help_and_type(observed: Observed):
    text = observed.server.get("/metrics").text
    for family in families(observed.server):
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram")
    assert text.count("# HELP ") == text.count("# TYPE ") == len(families(observed.server))
    assert "_created" not in text
    assert REPEATED[:8] not in text


def test_metrics_are_also_served_under_v1_and_require_a_key(module_model: Model):
    with running(module_model, Settings(api_keys=("key",))) as server:
        for path in ("/metrics", "/v1/metrics"):
            assert server.get(path).status_code == 401
            assert server.get(path, headers={"x-api-key": "key"}).status_code == 200
        assert server.get("/slots", headers={"x-api-key": "key"}).status_code == 404


def test_gauges_show_the_load_and_a_client_that_disconnects_is_counted(slow_model: Model):
    settings = Settings(max_concurrent=1, queue=1)
    with running(slow_model, settings) as server, ExitStack() as stack:
        asked = {"method": "POST", "url": f"{server.url}/v1/completions", "json": LONG}
        client = stack.enter_context(httpx.Client())
        stack.enter_context(client.stream(**asked))
        until(lambda: single(values(server), "paceline_requests_running") == 1)
        threading.Thread(target=server.post, args=("/v1/completions", LONG)).start()
        until(lambda: single(values(server), "paceline_requests_waiting") == 1)
        assert server.post("/v1/completions", LONG).status_code == 429
        now = values(server)
        assert now["paceline_requests_refused_total"] == {"queue_full": 1}
        assert 0 < single(now, "paceline_cache_usage") < 1
        stack.close()
        until(lambda: values(server).get("paceline_requests_failed_total") == {"client_gone": 1})
        until(lambda: single(values(server), "paceline_requests_waiting") == 0)
        server.scheduler.close()


@pytest.mark.parametrize("reason", ["cancelled", "timeout", "draining"])
def test_truncated_responses_are_counted_with_their_tokens(slow_model: Model, reason: str):
    settings = Settings(max_concurrent=1, timeout=0.4 if reason == "timeout" else None)
    with running(slow_model, settings) as server:
        load = server.scheduler.load
        with ExitStack() as stack:
            body = {**LONG, "stream": True}
            asked = {"method": "POST", "url": f"{server.url}/v1/completions", "json": body}
            response = stack.enter_context(httpx.Client()).stream(**asked)
            lines = stack.enter_context(response).iter_lines()
            assert next(lines)
            waiting = threading.Thread(target=server.post, args=("/v1/completions", LONG))
            waiting.start()
            until(lambda: load.waiting == 1)
            if reason == "cancelled":
                for queued in [*server.scheduler._waiting]:
                    queued.cancel()
                stack.close()
            elif reason == "draining":
                server.scheduler.close()
            until(lambda: load.running == load.waiting == 0)
            if reason != "cancelled":
                waiting.join()
        counters = values(server)
    assert counters["paceline_requests_cut_total"] == {reason: 2}
    assert 0 < counters["paceline_cut_tokens_total"][reason] < LONG["max_tokens"]
    assert counters["paceline_generation_tokens_total"] == {"": 0}


def test_the_model_is_listed_and_found(server: Running):
    (listed,) = server.openai.models.list().data
    assert listed.id == "tiny"
    assert server.openai.models.retrieve("tiny").id == "tiny"
    for path in ("/models", "/v1/models/", "/models/"):
        assert server.get(path).json() == server.get("/v1/models").json()
    assert listed.model_dump()["max_model_len"] == 512
    assert fault(server.get("/v1/models/other/one"), 404)["code"] == "model_not_found"


def test_the_model_list_is_also_a_valid_anthropic_page(server: Running):
    headers = {"anthropic-version": "2023-06-01"}
    page = server.get("/v1/models?limit=1", headers=headers).json()
    (listed,) = page["data"]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "tiny", "tiny")
    assert (listed["type"], listed["display_name"]) == ("model", "tiny")
    at = datetime.strptime(listed["created_at"], "%Y-%m-%dT%H:%M:%S%z")
    assert at.timestamp() == listed["created"]
    assert server.get("/v1/models/tiny", headers=headers).json() == listed
    unknown = server.get("/v1/models/other", headers=headers)
    assert "other" in fault_of_anthropic(unknown, 404, "not_found_error")


def test_tokenize_returns_the_tokens_of_a_prompt(server: Running):
    text = "the rain <|im_end|>"
    ids = server.model.tokens(text, raw=True)
    response = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert response["tokens"] == ids
    assert "".join(response["token_strs"]) == text
    plain = server.post("/tokenize", {"content": text, "parse_special": False}).json()
    assert len(plain["tokens"]) > len(ids)
    pieces = server.post("/tokenize", {"content": text, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    assert pieces[-1]["piece"] == "<|im_end|>" == server.get("/tokenizer_info").json()["eos_token"]


def test_the_tokens_of_a_chat_can_be_counted(server: Running):
    messages: list[Any] = [{"role": "user", "content": "how many <|im_end|>?"}]
    response = server.post("/tokenize", {"messages": messages}).json()
    used = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json()
    assert response["count"] == used["usage"]["prompt_tokens"]
    shorter = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert shorter.json()["count"] < response["count"]


def test_health_is_ok_until_the_engine_fails(own_server: Running):
    assert own_server.get("/health").json() == {"status": "ok"}
    own_server.scheduler.close()
    assert own_server.get("/v1/health").status_code == 503


def test_json_is_one_line_for_every_parser():
    value = {"text": "a\x85b\u2028c\u2029d\x1ce\nf\u00e9"}
    written = to_json(value).decode()
    assert len(written.splitlines()) == 1
    assert "\u00e9" in written
    assert json.loads(written) == value
