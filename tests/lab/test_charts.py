"""What charts a record has, and what is in them."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_lab.bench.record import Record, Row, Spread, parse_record
from paceline_lab.report.charts import Chart, record_charts
from support.results import BLOCKS, HEAD, RUN, SWEEP


def charts(record: Record) -> dict[str, Chart]:
    found = record_charts(record)
    by_slug = {chart.slug: chart for chart in found}
    assert len(by_slug) == len(found), "every chart has a name of its own"
    for chart in found:
        _, head, rows = chart.table
        assert rows
        assert all(len(each) == len(head) for each in rows)
        assert chart.title
        assert chart.note
    return by_slug


def close(found: Spread | None, *expected: float) -> bool:
    return found is not None and [*found] == pytest.approx(expected)


def test_a_run_has_speed_and_tau_by_kind():
    found = charts(RUN)
    assert [*found] == ["ratio-by-kind", "tokens_per_step-by-kind"]
    speed = found["ratio-by-kind"]
    assert speed.groups == ["all", "chat", "code"]
    assert [*speed.series] == ["x", "y"], "plain is what the others are measured by"
    # Medians of the rounds are 1.25 times the first; of several cases the geometric mean.
    whole, chat, code = speed.series["x"]
    assert close(chat, 1.25 * math.sqrt(1.25 * 2), 1.25 * 1.25, 1.25 * 2)
    assert close(whole, 1.25 * 10 ** (1 / 3), 1.25 * 1.25, 1.25 * 4)
    assert close(code, 5.0, 4.0, 6.0), "of one case its rounds"
    assert speed.line == 1.0
    tau = found["tokens_per_step-by-kind"]
    assert close(tau.series["y"][1], (0.625 + 1) / 2, 0.625, 1.0)


def test_a_sweep_is_charted_by_its_variable():
    found = charts(SWEEP)
    assert [*found] == [
        "ratio-by-prompt_tokens",
        "tokens_per_step-by-prompt_tokens",
        "decode_tokens_per_second-by-prompt_tokens",
        "prefill_tokens_per_second-by-prompt_tokens",
    ]
    speed = found["ratio-by-prompt_tokens"]
    assert speed.groups == ["100", "800"]
    assert speed.series == {"x": [Spread(2.5, 2.0, 3.0), Spread(11.25, 9.0, 13.5)]}
    assert [*found["decode_tokens_per_second-by-prompt_tokens"].series] == ["plain", "x"]


def test_contenders_that_differ_only_in_block_size_are_one_series():
    speed = charts(BLOCKS)["ratio-by-block"]
    assert speed.groups == ["2", "4", "8"]
    assert [*speed.series] == ["suffix, fixed", "suffix, kelly"]
    assert all(map(all, speed.series.values()))


NAMES = st.sampled_from(
    [
        *("ratio", "tokens_per_step", "decode_tokens_per_second", "prefill_tokens_per_second"),
        *("first_token_seconds", "decode_seconds", "verify_seconds"),
        *("draft_seconds", "sample_seconds"),
    ]
)
SMALL = st.sampled_from(["a", "b", "plain", "cold"])
COUNTS = st.lists(st.integers(-1, 20), max_size=4)
ROWS = st.builds(
    Row,
    case=SMALL,
    kind=SMALL,
    contender=SMALL,
    measures=st.dictionaries(NAMES, st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=3)),
    at=st.dictionaries(
        st.sampled_from(["depth", "block", "state", "rows"]), st.integers(-2, 2) | SMALL
    ),
    counts=st.dictionaries(
        st.sampled_from(["drafted_at", "accepted_at"]), COUNTS | st.integers(0, 3)
    ),
    facts=st.dictionaries(
        st.sampled_from(["tokens", "way", "same_tokens"]), st.none() | st.integers() | SMALL
    ),
)


@settings(max_examples=50)
@given(rows=st.lists(ROWS, max_size=6, unique_by=lambda row: row.key))
def test_any_record_gives_charts_or_none(rows: list[Row]):
    charts(parse_record(json.loads(json.dumps(Record("any", rows, **HEAD).as_dict())), "it"))
