"""What counts say of drafting, on work that is made up; on an artifact's own where that is here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.decoding.costs import CostTable, speed_up
from paceline.plan import ReportsWork, plan
from paceline.runtime.model import Model
from paceline.storage.report import Table
from paceline_coreml.engine.flops import PartWork, Work
from paceline_coreml.engine.work_report import CHOSEN, WHOLE, as_dict, bounds, tables
from support.faulty import FaultyEngine

# 8 experts of 10 bytes, of which a row has one, and four rows three; 20 bytes of all others.
WORK = Work(
    whole={
        1: {"attention": PartWork(20, 15), "experts": PartWork(80, 80), "rest": PartWork(0, 5)},
        4: {"attention": PartWork(80, 15), "experts": PartWork(320, 80), "rest": PartWork(0, 5)},
    },
    chosen={
        1: {"attention": PartWork(20, 15), "experts": PartWork(10, 10), "rest": PartWork(0, 5)},
        4: {"attention": PartWork(80, 15), "experts": PartWork(40, 30), "rest": PartWork(0, 5)},
    },
)
DENSE = Work({1: {"head": PartWork(1_500, 2_000_000)}, 4: {"head": PartWork(6_000, 2_000_000)}}, {})


def test_by_bytes_further_rows_are_free_and_by_macs_they_cost_what_a_row_costs():
    found = {(end.computed, end.by): end for end in bounds(WORK)}
    assert found[WHOLE, "bytes"].ratio == 1
    assert found[WHOLE, "bytes"].break_even == pytest.approx(0, abs=1e-9)
    assert found[WHOLE, "MACs"].ratio == 4
    assert found[WHOLE, "MACs"].break_even == 1


def test_where_rows_bring_experts_of_their_own_drafting_must_bring_more():
    found = {(end.computed, end.by): end for end in bounds(WORK)}
    by_bytes = found[CHOSEN, "bytes"]
    assert by_bytes.ratio == 50 / 30
    even = by_bytes.break_even
    assert even is not None
    assert speed_up(CostTable({1: 30, 4: 50}), [even] * 3) == pytest.approx(1)
    assert found[CHOSEN, "MACs"].ratio == 4


@pytest.mark.parametrize("chosen", [{}, DENSE.whole], ids=["no experts", "soft routing"])
def test_where_nothing_can_be_left_out_it_is_said_once(chosen: Any):
    work = DENSE._replace(chosen=chosen)
    assert {end.computed for end in bounds(work)} == {WHOLE}
    assert len([*tables(work)]) == 2


def test_a_part_has_its_share_of_the_longest_call():
    whole, chosen, pays = tables(WORK)
    assert whole[1] == [
        *("part", "MACs, 1 row", "MACs, 4 rows", "/ 1", "share"),
        *("bytes, 1 row", "bytes, 4 rows", "/ 1", "share"),
    ]
    assert [*whole[2]] == [
        ["attention", "20", "80", "4.00", "20.0 %", "15", "15", "1.00", "15.0 %"],
        ["experts", "80", "320", "4.00", "80.0 %", "80", "80", "1.00", "80.0 %"],
        ["rest", "0", "0", "", "0.0 %", "5", "5", "1.00", "5.0 %"],
        ["all", "100", "400", "4.00", "100.0 %", "100", "100", "1.00", "100.0 %"],
    ]
    assert [*chosen[2]][1] == [
        *("experts", "10", "40", "4.00", "33.3 %"),
        *("10", "30", "3.00", "60.0 %"),
    ]
    assert [row[3:] for row in pays[2]] == [
        ["4.00", "1.00"],
        ["1.00", "0.00"],
        ["4.00", "1.00"],
        ["1.67", "0.42"],
    ]


def test_large_counts_are_short():
    (_, _, (head, _)), _ = tables(DENSE)
    assert head[1:3] == ["1.50 k", "6.00 k"]
    assert head[5] == "2.00 M"


def test_a_call_of_one_number_of_rows_is_compared_with_none():
    work = Work({4: DENSE.whole[4]}, {})
    assert [*bounds(work)] == []
    ((_, head, rows),) = tables(work)
    assert head == ["part", "MACs, 4 rows", "share", "bytes, 4 rows", "share"]
    assert all(len(row) == len(head) for row in rows)


def test_a_plan_has_the_work_of_an_engine_that_counts_it(model: Model):
    class Counting(FaultyEngine):
        def work_report(self) -> tuple[dict[str, Any], list[Table]]:
            return as_dict(WORK), [*tables(WORK)]

    counting = Model(model.files, Counting(model.engine, lambda *_: None))
    report = plan(lambda _: counting, "openvino", again=False)
    assert json.loads(json.dumps(report.value))["work"] == as_dict(WORK)
    assert [title for title, _, _ in report.tables][1:-1] == [title for title, _, _ in tables(WORK)]


def test_a_plan_of_another_engine_has_none(model: Model):
    assert not isinstance(model.engine, ReportsWork)
    value = plan(lambda _: model, "openvino", again=False).value
    assert {"work", "remark"} & value.keys() == set()


@pytest.mark.coreml
def test_a_plan_says_what_an_artifact_does(model: Model, core_ml: Callable[..., Path]):
    from paceline.engines import EngineSettings
    from paceline_coreml.engine.engine import CoreMlEngine
    from support.zaya import zaya_artifact

    engine = CoreMlEngine(core_ml(zaya_artifact), EngineSettings(min_rows=1))
    converted = Model(model.files, engine)
    report = plan(lambda _: converted, "coreml", again=True)
    assert report.value["remark"] == report.text == engine.remark != ""
    calls = report.value["work"]["calls"]
    assert [*calls] == [WHOLE, CHOSEN]
    assert [*calls[WHOLE]] == ["1", "4"]
    assert [*calls[WHOLE]["4"]] == ["attention", "router", "experts", "rest", "head"]
    for _, head, rows in report.tables:
        assert all(len(row) == len(head) for row in rows)
