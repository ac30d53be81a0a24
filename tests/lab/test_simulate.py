from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from paceline.decoding.costs import CostTable
from paceline.decoding.policy import Fixed
from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import Stopping
from paceline.decoding.types import Drafter, Policy
from paceline.drafters import DrafterResources, RequestContext, create
from paceline.options import Options
from paceline.runtime.request import check as check_options
from paceline_lab.simulate import replay
from paceline_lab.simulate.replay import Recording, SimulatedStep, Simulation, simulate
from support.drafters import write_toy_table
from support.driver import CHEAP, POLICIES, answer, generation
from support.toy import ToyEngine

EVEN = CostTable({1: 1.0, 32: 1.0})


def one(
    recording: Recording, drafter: str, cost: CostTable = EVEN, **options: int | str
) -> Simulation:
    asked: Options = {"drafter": drafter, "policy": "fixed", **options}  # type: ignore[typeddict-item]
    (found,) = simulate([recording], check_options(asked), cost, DrafterResources(vocab_size=64))
    return found


def text(prompt: Sequence[int], answer: Sequence[int], max_tokens: int | None = None) -> Recording:
    return Recording("one", "any", prompt, answer, max_tokens)


def steps(
    recording: Recording, drafters: Sequence[Drafter], policy: Policy, cost: CostTable
) -> list[SimulatedStep]:
    generation = replay._generation(recording, drafters, policy)
    return [step for _, step in replay._steps(generation, recording, replay.costs_by_context(cost))]


def real(engine: ToyEngine, prompt: list[int], **settings: object) -> Iterator[SimulatedStep]:
    machine = generation(engine, prompt, **settings)  # type: ignore[arg-type]
    with closing(engine.open()) as sequence:
        while not machine.finished:
            prefilling = machine.prefilling
            block, context = machine.next_block(), machine.length
            result = engine.step([(sequence, block)])
            step = machine.accept(result.logits[0], taps={}, seconds=CHEAP(len(block.tokens)))
            sequence.commit(step.accepted_rows)
            if not prefilling:
                silent = step._replace(
                    pieces=[one._replace(text="", final="") for one in step.pieces]
                )
                yield SimulatedStep(len(block.tokens), context, silent)
    machine.close()


@pytest.mark.parametrize(
    ("name", "drafter", "sampling"),
    [
        ("auto", "suffix+table", Sampling()),
        ("auto", "suffix", Sampling(temperature=0.8, seed=3)),
        ("fixed", "table", Sampling(temperature=0.8, seed=3)),
        ("adaptive", "ngram", Sampling()),
        ("kelly", "suffix+table", Sampling()),
        ("fixed", "none", Sampling()),
    ],
)
def test_simulated_steps_match_a_real_generation(
    name: str, drafter: str, sampling: Sampling, tmp_path: Path
):
    engine, block = ToyEngine(), 16 if name == "auto" else 8
    prompt, most = [1, 2, 3, 1, 2], 60
    stopping = Stopping(max_tokens=most)
    whole = answer(engine, prompt, sampling=sampling, stopping=stopping).tokens
    folder = write_toy_table(tmp_path / "table", [[*prompt, *whole[:20]]], engine.vocab_size)
    spec = drafter.replace("table", f"table:{folder}")
    shared = DrafterResources(vocab_size=engine.vocab_size)
    taken = list(
        real(
            engine,
            prompt,
            sampling=sampling,
            stopping=stopping,
            drafters=create(spec, shared),
            policy=POLICIES[name](block),
        )
    )
    simulated = steps(text(prompt, whole), create(spec, shared), POLICIES[name](block), CHEAP)
    assert simulated == taken
    assert drafter == "none" or any(each.step.accepted for each in taken)


def test_drafts_continue_after_a_stop_token():
    # What follows the end was said in the prompt, so that it is drafted, too.
    recording = text([1, 2, 3, 9, 1, 2, 3], [9], max_tokens=None)
    assert one(recording, "suffix").counters.steps == 0
    ended = text([1, 2, 3, 9, 4, 5, 6, 7, 1, 2, 3], [9, 4, 5], max_tokens=50)
    assert ended.ended_by == 5
    (step,) = steps(ended, create("suffix"), Fixed(8), EVEN)
    assert (step.rows, step.step.accepted, step.step.drafted) == (8, 2, 7)
    cut = text(ended.prompt, ended.answer)
    (step,) = steps(cut, create("suffix"), Fixed(8), EVEN)
    assert (step.rows, step.step.accepted, step.step.drafted) == (2, 1, 1)


def test_repetitive_text_gives_known_figures():
    # The prompt says it once; five rows bring five tokens a pass.
    recording = text([1, 2, 3, 4, 5, 6] * 2, [1, 2, 3, 4, 5, 6] * 5)
    found = one(recording, "ngram", CostTable({1: 2.0, 5: 3.0}), max_block=5)
    assert found.decoded == 29
    assert found.counters.steps == 6
    assert found.decoded / found.counters.steps == pytest.approx(29 / 6)
    # The last pass has room for three guesses.
    assert found.counters.drafted_at == [6, 6, 6, 5]
    assert found.counters.accepted_at == [6, 6, 6, 5]
    assert found.plain_seconds == pytest.approx(29 * 2.0)
    assert found.seconds == pytest.approx(5 * 3.0 + 2.75)
    assert found.speed_up == pytest.approx(58 / 17.75)


def test_a_longer_context_costs_more_in_simulation():
    cost = CostTable({1: 1.0, 8: 1.0}, 0, {1: 0.01, 8: 0.02})
    near, far = (one(text([7] * n, [7, 1, 2, 3]), "none", cost) for n in (1, 6401))
    assert far.plain_seconds - near.plain_seconds == pytest.approx(3 * 64.0, rel=0.01)


def test_nothing_is_learned_from_other_texts_by_default():
    same = [5, 9, 2, 7, 1, 8, 3, 6]
    texts = [text([1, 2], same), text([3, 4], same)]
    request = check_options({"drafter": "suffix:earlier", "policy": "fixed"})

    def passes(*, carry: bool) -> list[int]:
        found = simulate(texts, request, EVEN, DrafterResources(), carry=carry)
        return [each.counters.steps for each in found]

    assert passes(carry=False) == [7, 7]
    assert passes(carry=True) == [7, 1]
    shared = DrafterResources()
    for _ in range(2):  # nor from the same texts by another contender
        assert [s.counters.steps for s in simulate(texts, request, EVEN, shared, carry=True)] == [
            7,
            1,
        ]


def test_answer_history_is_used_after_enough_replayed_responses():
    answers = [[start, *range(10, 510)] for start in range(3)]
    texts = [text([1, 2], answer) for answer in answers]
    request = check_options({"drafter": "kept", "policy": "fixed"})
    found = list(simulate(texts, request, EVEN, DrafterResources(), carry=True))
    drafted = [each.counters.drafted > 0 for each in found]
    assert drafted == [False, False, True]  # 1,002 tokens before the third
    assert found[2].counters.drafted_by["kept text"] > 400
    apart = simulate(texts, request, EVEN, DrafterResources())
    assert not any(each.counters.drafted for each in apart)


def test_a_simulated_prediction_drafts_as_in_a_real_request():
    same = [5, 9, 2, 7, 1, 8, 3, 6]
    guessed = Recording("one", "any", [1, 2], same, prediction=same)
    assert one(guessed, "suffix").counters.drafted_by == {"prediction": 6}
    assert one(guessed, "none").counters.drafted == 0
    assert create("prediction", request=RequestContext(prediction=same, prompt_length=2))
