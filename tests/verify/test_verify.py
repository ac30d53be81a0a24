import json
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine, KVSequence, StepResult
from paceline.engines.exact import CONDITIONS, RowComparison
from paceline.errors import InvalidRequest
from paceline.options import POLICIES, Options
from paceline.runtime.model import Model
from paceline.verify.checks import (
    BLOCKS,
    DRAFTERS,
    SAMPLED,
    Verdict,
    VerifyCase,
    row_checks,
    run_checks,
    token_checks,
    verify_cases,
)
from paceline.verify.suite import load_suite
from support.faulty import (
    Change,
    FaultyEngine,
    by_block_length,
    by_company,
    other_picks_when_drafting,
)
from support.toy import ToyEngine

GREEDY: Options = {"temperature": 0.0}


def compare(engine: Engine, verdict: Verdict) -> None:
    run_checks(row_checks(engine, verdict))


def pairs(chosen: list[VerifyCase]) -> set[object]:
    """Every two values that come together in a case."""
    values = [(c.drafter, c.policy, c.block, str(c.sampling)) for c in chosen]
    return {((i, a[i]), (j, a[j])) for a in values for i, j in combinations(range(4), 2)}


def test_the_cases_cover_every_pair_of_values_deterministically():
    chosen = verify_cases()
    assert len(chosen) < len(DRAFTERS) * len(POLICIES) * len(BLOCKS) / 2
    parts = (DRAFTERS, POLICIES, BLOCKS, [*map(str, ({"temperature": 0.0}, *SAMPLED))])
    every = {
        ((i, x), (j, y))
        for (i, a), (j, b) in combinations(enumerate(parts), 2)
        for x, y in product(a, b)
    }
    assert pairs(chosen) == every
    assert verify_cases() == chosen


def test_rows_of_an_exact_engine_never_differ(model: Model):
    verdict = Verdict()
    compare(model.engine, verdict)
    # After three contexts: 256 rows of blocks, 36 of batches, 53 of forks; and 18 ways to prefill.
    assert verdict.rows.rows == 3 * (256 + 36 + 53) + 18 * 17
    assert (verdict.rows.differing, verdict.rows.largest_difference) == (0, 0.0)
    assert verdict.exact
    assert verdict.conditions.keys() == {*CONDITIONS}


@pytest.mark.parametrize("change", [by_block_length, by_company])
def test_rows_that_depend_on_their_computation_are_detected(change: Change, model: Model):
    verdict = Verdict()
    compare(FaultyEngine(model.engine, change), verdict)
    assert 0 < verdict.rows.differing < verdict.rows.rows
    assert 1e-5 < verdict.rows.largest_difference < 0.1
    assert not verdict.exact


def test_rows_that_depend_on_prompt_chunking_are_detected():
    class Forgetful(ToyEngine):
        """Reads a slot of the prompt wrongly that was the first of a chunk."""

        def step(self, work: list[tuple[KVSequence, Block]]) -> StepResult:
            for sequence, block in work:
                if block.prefill and sequence.length == 62:
                    work = [(sequence, block._replace(tokens=[1, *block.tokens[1:]]))]
            return super().step(work)

    verdict = Verdict()
    compare(ToyEngine(), verdict)
    assert verdict.exact
    compare(Forgetful(), verdict)
    assert not verdict.exact


def test_a_check_frees_all_slots_even_if_it_fails(model: Model):
    free = model.engine.free_slots

    class Failing(FaultyEngine):
        def step(self, work: list[tuple[KVSequence, Block]]) -> StepResult:
            if len(work) > 1:
                raise RuntimeError("the engine died")
            return super().step(work)

    with pytest.raises(RuntimeError):
        compare(Failing(model.engine, by_company), Verdict())
    assert model.engine.free_slots == free


class Crossing(ToyEngine):
    """Rows are off in a call of several rows that has 1,024 keys or more."""

    def step(self, work: list[tuple[KVSequence, Block]]) -> StepResult:
        result = super().step(work)
        for rows, (sequence, block) in zip(result.logits, work, strict=True):
            count = len(block.tokens)
            if not block.prefill and count > 1 and 1024 <= sequence.length + count < 1050:
                rows[:, 0] += np.float32(1e-4)
        return result


def test_rows_that_depend_on_key_counts_are_detected_around_thresholds():
    verdict = Verdict()
    checks = row_checks(Crossing(context_length=1100, cache_blocks=400), verdict)
    assert run_checks(checks, until=0) == 1
    assert verdict.exact
    assert run_checks(checks) == len(checks) == 6
    assert 0 < verdict.conditions["block_length"].differing < 80


def test_one_in_eight_cases_has_a_long_response(model: Model, suite_file: Path):
    verdict = Verdict()
    cases = [VerifyCase("suffix", "fixed", 4, GREEDY)] * 8
    suite = load_suite(suite_file)
    run_checks(token_checks(model, suite, cases, verdict, max_tokens=10, long=40, together=(1,)))
    assert verdict.tokens_compared == 7 * 10 + 40


def test_a_differing_token_is_reported_with_its_mode_and_position(model: Model, suite_file: Path):
    liar = Model(model.files, FaultyEngine(model.engine, other_picks_when_drafting))
    verdict = Verdict()
    case = VerifyCase("suffix", "fixed", 4, GREEDY)
    run_checks(token_checks(liar, load_suite(suite_file), [case] * 3, verdict, max_tokens=60))
    assert verdict.answers_differing
    assert not verdict.exact
    for said in verdict.answers_differing:
        assert "(suffix, fixed, block 4, temperature=0.0, " in said
        assert said.split(" ")[0] in ("one", "two", "three")


def test_a_response_that_only_ends_earlier_also_differs(model: Model, suite_file: Path):
    class Short(Model):
        def _batch_request(self, prompt: Any, options: Any) -> Any:
            shorter = {} if options["drafter"] == "none" else {"max_tokens": 5}
            return super()._batch_request(prompt, {**options, **shorter})

    verdict = Verdict()
    case = VerifyCase("suffix", "fixed", 4, GREEDY)
    short = Short(model.files, model.engine)
    run_checks(token_checks(short, load_suite(suite_file), [case], verdict, max_tokens=9))
    assert len(verdict.answers_differing) == 1
    assert "token 5 differs" in verdict.answers_differing[0]


@pytest.mark.parametrize(
    ("slots", "contexts", "thresholds"),
    [(2048, 4, 2), (1536, 3, 2), (192, 2, 0), (64, 1, 0), (48, 0, 0)],
)
def test_rows_are_compared_at_context_lengths_that_two_sequences_fit(
    slots: int, contexts: int, thresholds: int
):
    engine = ToyEngine(context_length=2048, block_size=16, cache_blocks=slots // 16)
    verdict = Verdict()
    compare(engine, verdict)
    compared = verdict.conditions.get("block_length", RowComparison())
    # Around 512 and 1,024 slots, where one sequence has to fit, 16 rows in blocks of five lengths.
    assert compared.rows == contexts * (1 + len(BLOCKS)) * 16 + thresholds * 5 * 16
    assert not compared.differing
    assert engine.free_slots == slots


def test_batched_responses_may_need_more_than_the_cache(
    model: Model, suite_file: Path, tmp_path: Path
):
    settings = EngineSettings(cache_tokens=160)
    engine = open_engine("llamacpp", model.files.path, model.files.context_length, settings)
    long = {"id": "long", "kind": "chat", "messages": [{"role": "user", "content": "x" * 400}]}
    suite = tmp_path / "more.jsonl"
    suite.write_text(json.dumps(long) + "\n" + suite_file.read_text())
    cases = [VerifyCase("suffix", "fixed", block, GREEDY) for block in (2, 5)]
    verdict = Verdict()
    small = Model(model.files, engine)
    checks = token_checks(
        small, load_suite(suite), cases, verdict, max_tokens=30, together=[5], long=0
    )
    run_checks(checks)
    assert verdict.answers_differing == []
    assert verdict.answers_compared == 5 * len(cases)
    assert verdict.prompts_left_out == ["long"]
    suite.write_text(json.dumps(long))
    with pytest.raises(InvalidRequest, match="160 tokens"):
        token_checks(small, load_suite(suite), cases, verdict, max_tokens=30)
