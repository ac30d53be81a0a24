import json
from dataclasses import replace

from paceline.decoding.types import FinishReason
from paceline.runtime.request import Setting
from paceline.runtime.result import Result, Stats


def stats() -> Stats:
    return Stats(
        steps=10,
        drafted=40,
        accepted=20,
        drafted_by={"suffix": 40},
        accepted_by={"suffix": 20},
        cached_tokens=3,
        load_seconds=1.0,
        first_token_seconds=0.5,
        prefill_seconds=0.4,
        decode_seconds=2.0,
        draft_seconds=0.1,
        verify_seconds=1.5,
        sample_seconds=0.2,
        decoded=30,
    )


def result() -> Result:
    return Result(
        text="é",
        token_ids=[5, 6],
        finish_reason=FinishReason.STOP,
        stats=stats(),
        prompt_tokens=7,
        model="m",
        engine="llamacpp",
        drafter="suffix",
        policy="auto",
        exact=True,
        seed=3,
        settings={"temperature": Setting(0.7, "model"), "max_tokens": Setting(None, "fallback")},
    )


def test_rates_are_counts_divided_by_time():
    counted, nothing = stats(), Stats(first_token_seconds=0.25)
    assert (counted.acceptance_rate, counted.tokens_per_step, counted.host_seconds) == (0.5, 3, 0.5)
    assert counted.decode_tokens_per_second == 15.0
    assert nothing.acceptance_rate == nothing.tokens_per_step == nothing.host_seconds == 0.0
    assert nothing.decode_tokens_per_second == 0.0
    assert nothing.line() == "1 token in 0.25 s"


def test_the_statistics_line_has_speed_drafts_and_queue_time():
    line = stats().line()
    for part in ("31 tokens", "15.0 tokens/s", "3.00 tokens per step", "20 of 40 drafts accepted"):
        assert part in line
    assert "first token after 0.50 s, host 25.0 %" in line
    assert "no drafts" in Stats(steps=1, decoded=1, decode_seconds=1.0).line()


def test_a_json_result_has_all_documented_fields_and_round_trips():
    value = json.loads(json.dumps(result().as_dict()))
    assert value == result().as_dict()
    assert value["finish_reason"] == "stop"
    assert value["completion_tokens"] == 2
    assert value["settings"] == {
        "temperature": {"value": 0.7, "source": "model"},
        "max_tokens": {"value": None, "source": "fallback"},
    }
    assert value.keys() == {
        *("text", "reasoning", "reasoning_tokens", "token_ids", "prompt_tokens"),
        *("completion_tokens", "finish_reason", "model"),
        *("engine", "drafter", "policy", "exact", "exactness", "seed", "settings", "stats"),
    }
    probed = Stats(probe={"ngram": {"steps": 1, "drafted": 2, "accepted": 1}})
    assert probed.as_dict()["probe"] == probed.probe
    assert "; ngram would have 1 of 2 accepted;" in replace(stats(), probe=probed.probe).line()
    assert value["stats"].keys() == {
        *("steps", "drafted", "accepted", "forced", "fallbacks", "acceptance_rate"),
        *("tokens_per_step", "drafted_by", "accepted_by", "drafted_at", "accepted_at"),
        *("cached_tokens", "load_seconds", "first_token_seconds", "prefill_seconds"),
        *("decode_seconds", "draft_seconds", "verify_seconds", "sample_seconds"),
        *("host_seconds", "decode_tokens_per_second"),
    }


def test_the_statistics_line_shows_the_seed_only_if_sampled():
    engine = f"{result().engine}, drafter {result().drafter}"
    assert result().line() == f"{stats().line()}; {engine}, seed 3"
    greedy = replace(result(), settings={"temperature": Setting(0.0, "registry")})
    assert greedy.line() == f"{stats().line()}; {engine}"
    assert replace(greedy, token_ids=[]).line() == f"no tokens; {engine}"
