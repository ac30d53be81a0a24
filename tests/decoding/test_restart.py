"""A preempted response continues with the same tokens; its rows are recomputed in their roles."""

from collections.abc import Sequence
from contextlib import closing

from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding.generation import Generation
from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import Stopping
from paceline.decoding.types import Block
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.suffix import SuffixDrafter
from support.driver import POLICIES, generation, run
from support.errors import raises
from support.toy import ToyEngine

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


class PhaseEngine(ToyEngine):
    """A toy whose keys depend on a row's phase, as an engine's last bits do."""

    def __init__(self) -> None:
        super().__init__(context_length=256)
        self.blocks: list[Block] = []

    def step(self, work: Sequence) -> object:
        self.blocks += [block for _, block in work]
        return super().step(work)

    def _write(self, table, tokens) -> None:  # type: ignore[no-untyped-def]
        before = table.length
        super()._write(table, tokens)
        if not self.blocks[-1].prefill:
            table.keys[before : before + len(tokens)] ^= 0x5555


def new_request(engine: ToyEngine, drafter: str, policy: str, sampling: Sampling) -> Generation:
    drafters = {"none": [], "suffix": [SuffixDrafter()], "ngram": [NgramDrafter()]}[drafter]
    return generation(
        engine,
        PROMPT,
        sampling=sampling,
        stopping=Stopping(max_tokens=40),
        drafters=drafters,
        policy=POLICIES[policy](8),
    )


@given(
    preempted_after=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    cached=st.integers(0, len(PROMPT)),
    most=st.integers(1, 40),
    drafter=st.sampled_from(["none", "suffix", "ngram"]),
    policy=st.sampled_from(sorted(POLICIES)),
    temperature=st.sampled_from([0.0, 0.9]),
    in_flight=st.booleans(),
)
def test_preempted_decode_continues_with_the_same_tokens(
    preempted_after: list[int],
    cached: int,
    most: int,
    drafter: str,
    policy: str,
    temperature: float,
    in_flight: bool,
):
    sampling = Sampling(temperature=temperature, seed=5)
    engine = PhaseEngine()
    (plain,) = run(engine, [new_request(engine, "none", "fixed", sampling)])
    one = new_request(engine, drafter, policy, sampling)
    sequence = engine.open()
    steps, left = 0, list(preempted_after)
    while not one.finished:
        block = one.next_block(most)
        if left and steps == left[0] and not one.prefilling and not one.recomputing:
            # Its block may be out already, as when the KV cache was full.
            left.pop(0)
            steps = 0
            sequence.close()
            sequence = engine.open()
            if cached:
                engine.step([(sequence, Block(PROMPT[:cached], 0, prefill=True))])
                sequence.commit(cached)
            one.restart(sequence.length)
            assert one.recomputing == (cached < one.token_count - 1)
            if not in_flight:
                continue
            block = one.next_block(most)
        again = one.recomputing
        result = engine.step([(sequence, block)])
        step = one.accept(result.logits[0], seconds=result.seconds)
        assert not (again and step.tokens)
        sequence.commit(step.accepted_rows)
        assert sequence.length == one.length
        steps += bool(step.tokens)
    sequence.close()
    assert one.answer == plain.tokens


def test_rows_are_recomputed_in_their_role_in_large_passes():
    engine = PhaseEngine()
    one = new_request(engine, "none", "fixed", Sampling())
    with closing(engine.open()) as sequence:
        for _ in range(31):
            step = one.accept(engine.step([(sequence, one.next_block())]).logits[0])
            sequence.commit(step.accepted_rows)
    assert len(one.answer) == 31
    with closing(engine.open()) as sequence:
        one.restart(0)
        engine.blocks.clear()
        while one.recomputing:
            step = one.accept(engine.step([(sequence, one.next_block())]).logits[0])
            sequence.commit(step.accepted_rows)
    prefill, decode = engine.blocks
    assert (list(prefill.tokens), prefill.rows, prefill.prefill) == (PROMPT, 0, True)
    assert (list(decode.tokens), decode.rows, decode.prefill) == (one.answer[:-1], 0, False)


def test_restart_requires_a_response_in_progress():
    engine = ToyEngine()
    one = new_request(engine, "none", "fixed", Sampling())
    with raises(RuntimeError, "begun"):
        one.restart(0)
    with closing(engine.open()) as sequence:
        step = one.accept(engine.step([(sequence, one.next_block())]).logits[0])
        sequence.commit(step.accepted_rows)
    with raises(ValueError, "12"):
        one.restart(13)
    one.cancel()
    with raises(RuntimeError, "ended"):
        one.restart(0)
