"""Recurrent states of hybrid models in the openvino engine. All comparisons are bitwise."""

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openvino import Model, PartialShape, Shape, Type, opset13

from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import LEAST_STATES, KVSequence
from paceline.engines.invariance import CONDITIONS, measure_invariance
from paceline.engines.openvino.batch import CompiledGraph
from paceline.engines.openvino.engine import OpenVinoEngine
from paceline.engines.profile import measure_profile
from paceline.engines.state_blocks import StatePool
from paceline.errors import ModelError
from paceline.models import ModelFiles
from paceline.storage.openvino import core
from support.engine_rows import feed, random_text, run
from support.errors import raises
from support.hybrids import HYBRIDS, state_of
from support.tiny_checkpoints import write_gguf_of

pytestmark = pytest.mark.slow

CONTEXT = 512
PROMPT = 70
WIDE = "[?,?,64]"
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
ROWS = 8


@pytest.fixture(scope="module", params=HYBRIDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf_of(request.param, tmp_path_factory.mktemp("hybrid") / "m.gguf")


def opened(path: Path, **settings: int) -> OpenVinoEngine:
    engine = open_engine(
        "openvino", path, CONTEXT, EngineSettings(cache_tokens=3 * CONTEXT, **settings)
    )
    assert isinstance(engine, OpenVinoEngine)
    return engine


@pytest.fixture(scope="module")
def engine(path: Path) -> OpenVinoEngine:
    return opened(path)


def alone(engine: OpenVinoEngine, prompt: list[int]) -> KVSequence:
    sequence = engine.open()
    feed(engine, sequence, prompt)
    return sequence


def after_a_fork(engine: OpenVinoEngine, prompt: list[int]) -> KVSequence:
    """Shares a prefix; its parent goes on with other tokens."""
    with closing(alone(engine, prompt)) as parent:
        child = parent.fork(PROMPT - 1)
        assert child.length == 64
        run(engine, (parent, [1, 2, 3], 3))
        parent.commit(3)
        feed(engine, child, prompt[child.length :])
    return child


def after_a_fork_of_a_longer_prompt(engine: OpenVinoEngine, prompt: list[int]) -> KVSequence:
    """Shares the part of another prompt that a third one shared before."""
    with closing(alone(engine, [*prompt[:40], *random_text(engine, 60, 9)])) as parent:
        with closing(parent.fork(40)) as second:
            assert second.length == 0
            feed(engine, second, [*prompt[:40], *random_text(engine, 60, 8)])
            child = second.fork(40)
        assert child.length == 32
        feed(engine, child, prompt[child.length :])
    return child


def after_going_back(engine: OpenVinoEngine, prompt: list[int]) -> KVSequence:
    sequence = alone(engine, [*prompt[:45], *random_text(engine, 30, 7)])
    sequence.rewind(45)
    feed(engine, sequence, prompt[45:])
    return sequence


BEGINNINGS = (alone, after_a_fork, after_a_fork_of_a_longer_prompt, after_going_back)


@pytest.mark.pairs
@pytest.mark.parametrize("begin", BEGINNINGS)
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("kept", range(1, ROWS + 1))
def test_the_state_after_acceptance_is_that_of_plain_decoding(
    engine: OpenVinoEngine,
    begin: Callable[[OpenVinoEngine, list[int]], KVSequence],
    beside: bool,
    kept: int,
):
    prompt, answer = random_text(engine, PROMPT), random_text(engine, ROWS, 1)
    with closing(alone(engine, prompt)) as plain:
        for token in answer[:kept]:
            run(engine, (plain, [token], 1))
            plain.commit(1)
        expected = state_of(engine, plain)
        (following,) = run(engine, (plain, [5], 1))
    draft = [*answer[:kept], *[(token + 1) % engine.vocab_size for token in answer[kept:]]]
    with closing(begin(engine, prompt)) as one, closing(engine.open()) as other:
        feed(engine, other, random_text(engine, 20, 2))
        with closing(engine.open()) as third:
            company = [(other, [1, 2, 3], 3)] if beside else []
            prompts = [(third, random_text(engine, 50, 3), 1)] if beside else []
            run(engine, (one, draft, ROWS), *company, prompts=prompts)
            one.commit(kept)
            if beside:
                other.commit(2)
                third.commit(50)
            assert state_of(engine, one) == expected
            (rows,) = run(engine, (one, [5], 1))
    assert rows.tobytes() == following.tobytes()


def test_every_token_shows_in_the_state(engine: OpenVinoEngine):
    # Without this, states that ignore the tokens would pass the test above.
    text = random_text(engine, 20)
    changed = [*text[:-2], (text[-2] + 1) % engine.vocab_size, text[-1]]
    with closing(alone(engine, text)) as one, closing(alone(engine, changed)) as other:
        state, others = state_of(engine, one), state_of(engine, other)
        assert all(state[name] != others[name] for name in state)


def test_the_bits_of_a_row_depend_on_nothing_else_and_costs_are_measured(engine: OpenVinoEngine):
    invariance = measure_invariance(engine)
    assert invariance.keys() == {*CONDITIONS}
    assert all(item.holds for item in invariance.values())
    assert measure_profile(engine, (1, 2, 8)).row_invariant


@pytest.mark.parametrize("blocks", [LEAST_STATES, 4])
def test_a_pool_that_is_too_small_costs_time_and_no_bit(
    engine: OpenVinoEngine, path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int
):
    monkeypatch.setattr(EngineSettings, "state_blocks", lambda *_: blocks)
    texts = [random_text(engine, 60, seed) for seed in range(4)]
    rows: dict[str, list[np.ndarray]] = {}
    for name, item in (("plenty", engine), ("few", opened(path))):
        sequences = [alone(item, text[:40]) for text in texts]
        rows[name] = []
        for at in range(40, 60, 5):
            for one, text in zip(sequences, texts, strict=True):
                rows[name] += run(item, (one, text[at : at + 8], 8))
                one.commit(5)
        for sequence in sequences:
            sequence.close()
        assert item._states is not None
        assert item._states.free == item._states.blocks
        assert item.free_slots == item._pool.blocks * item.block_size
    for entry, expected in zip(rows["few"], rows["plenty"], strict=True):
        assert entry.tobytes() == expected.tobytes()


def test_memory_of_states_stays_flat(engine: OpenVinoEngine):
    pool = engine._states
    assert isinstance(pool, StatePool)
    free = pool.free
    for seed in range(6):
        with closing(alone(engine, random_text(engine, 90, seed))) as one:
            for token in range(5):
                run(engine, (one, [token, 1, 2, 3], 4))
                one.commit(1 + token % 4)
            assert free - pool.free <= 4
            with closing(one.fork(80)) as child:
                assert free - pool.free <= 4
                feed(engine, child, random_text(engine, 20, seed))
    assert pool.free == free


def test_states_that_do_not_fit_in_memory_are_refused_at_load(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("paceline.engines.openvino.engine.memory_bytes", lambda: 10_000)
    with raises(ModelError, "48 blocks", "GiB"):
        opened(path)


def test_a_recurrent_state_of_an_unknown_kind_is_refused_by_name(tmp_path: Path, tiny_int8):
    import openvino as ov

    model = core().read_model(tiny_int8.path)
    head = model.output("logits").node
    variable = opset13.read_value(
        opset13.constant(np.zeros(1, np.float32)), "ssm.7", Type.f32, Shape([1])
    )
    logits = opset13.add(head.input_value(0), variable)
    head.input(0).replace_source_output(logits.output(0))
    kept = opset13.assign(opset13.constant(np.ones(1, np.float32)), "ssm.7")
    changed = Model(model.get_results(), [*model.get_sinks(), kept], model.get_parameters())
    path = tmp_path / "openvino_model.xml"
    ov.save_model(changed, path)
    with raises(ModelError, "ssm.7"):
        open_engine("openvino", path, CONTEXT, EngineSettings())


@pytest.fixture
def exported(tiny_int8: ModelFiles, tmp_path: Path) -> Path:
    """A stateful graph as exporters write it, with a short convolution behind the embeddings."""
    import openvino as ov

    model = core().read_model(tiny_int8.path)
    used = [node for node in model.get_ordered_ops() if node.get_type_name() == "Gather"]
    embedded = next(node for node in used if node.get_output_partial_shape(0).to_string() == WIDE)
    places = list(embedded.output(0).get_target_inputs())
    name, weights = "cache_params.past.conv.0", np.random.default_rng(3).normal(size=(64, 1, 1, 3))
    rows = opset13.transpose(embedded, np.array([0, 2, 1]))
    state = opset13.read_value(
        opset13.constant(np.zeros((1, 64, 3), np.float32)),
        name,
        Type.f32,
        PartialShape([-1, 64, 3]),
    )
    state = opset13.gather(state, model.input("beam_idx").node, opset13.constant(np.int64(0)))
    joined = opset13.concat([state, rows], -1)
    convolved = opset13.group_convolution(
        joined, opset13.constant(weights.astype(np.float32)), [1], [0], [0], [1]
    )
    end, one, axis = np.array([2**31 - 1]), np.array([1]), np.array([2])
    kept = opset13.assign(opset13.slice(joined, np.array([-3]), end, one, axis), name)
    result = opset13.slice(convolved, one, end, one, axis)
    added = opset13.add(opset13.transpose(result, np.array([0, 2, 1])), embedded)
    for place in places:
        place.replace_source_output(added.output(0))
    changed = Model(model.get_results(), [*model.get_sinks(), kept], model.get_parameters())
    path = tmp_path / "openvino_model.xml"
    ov.save_model(changed, path)
    return path


def test_an_exported_hybrid_gives_the_logits_of_its_stateful_graph(
    exported: Path, monkeypatch: pytest.MonkeyPatch
):

    class ExactGraph(CompiledGraph):
        """Without activations in 8 bits: a rounding that goes the other way is a large step."""

        def __init__(self, model: Any, options: Mapping[str, str]) -> None:
            super().__init__(model, {**options, **EXACT})

    monkeypatch.setattr("paceline.engines.openvino.engine.CompiledGraph", ExactGraph)
    engine = opened(exported)
    assert "states" in engine.describe()
    text = random_text(engine, 40)
    request = core().compile_model(exported, "CPU", EXACT).create_infer_request()
    expected = request.infer(
        {
            "input_ids": np.array([text]),
            "attention_mask": np.ones((1, 40), np.int64),
            "position_ids": np.arange(40)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
    )["logits"][0]
    with closing(engine.open()) as sequence:
        for at in (0, 3, 17):
            (rows,) = run(engine, prompts=[(sequence, text[at:20], 20 - at)])
            assert np.abs(rows - expected[at:20]).max() < 1e-2
            sequence.commit({0: 3, 3: 14, 17: 3}[at])
        (rows,) = run(engine, (sequence, [*text[20:24], 0, 0, 0, 0], 8))
        sequence.commit(4)
        (more,) = run(engine, (sequence, text[24:40], 16))
    assert np.abs(np.concatenate([rows[:4], more]) - expected[20:]).max() < 1e-2
