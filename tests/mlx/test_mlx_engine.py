"""The engine for mlx-lm's models: against transformers, its calls of MLX, and its taps."""

import gc
import importlib
import threading
import weakref
from contextlib import closing
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines import EngineSettings, open_engine
from paceline.engines.exact import measure_invariance
from paceline.errors import InvalidRequest, ModelError
from paceline.storage.files import read_json
from paceline_mlx.engine import MlxEngine
from support import mlx
from support.engine_rows import rows_of
from support.errors import raises
from support.mlx_rows import TEXT, step

pytestmark = pytest.mark.mlx

RECURRENT = ["lfm2", "qwen3_5"]


@pytest.mark.parametrize("family", mlx.FAMILIES)
def test_mlx_rows_match_transformers(
    family: str, opened: mlx.Opened, checkpoint_of: mlx.Checkpoints
):
    expected = mlx.reference_logits(checkpoint_of(family), family, TEXT)
    for cuts in ([40], [1] * 4 + [3, 9, 24]):
        rows = rows_of(opened(family), TEXT, cuts)
        assert np.abs(rows - expected).max() < 1e-5 * np.abs(expected).max() + 2e-5


LLAMA_3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0}
LLAMA_3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
ROPES = {
    "theta": ("llama", {"rope_type": "default", "rope_theta": 50.0}),
    "scaled": ("llama", LLAMA_3),
    "by layer": (
        "gemma3",
        {
            "full_attention": {"rope_type": "default", "rope_theta": 50.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
        },
    ),
}


@pytest.mark.parametrize("rope", ROPES)
def test_rotations_follow_the_config_of_transformers_5(rope: str, checkpoint_of: mlx.Checkpoints):
    family, parameters = ROPES[rope]
    folder = checkpoint_of(family, rope_parameters=parameters)
    assert "rope_theta" not in read_json(folder / "config.json")
    expected = mlx.reference_logits(folder, family, TEXT)
    engine = MlxEngine(folder, mlx.CONTEXT, EngineSettings(cache_tokens=512))
    assert np.abs(rows_of(engine, TEXT, [40]) - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_quantized_rows_match_mlx_lm(
    family: str, bits: int, checkpoint_of: mlx.Checkpoints, tmp_path: Path
):
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    folder = mlx.quantized(checkpoint_of(family), tmp_path / "quantized", bits=bits)
    model, config = load_model(folder)
    assert config["quantization"]["bits"] == bits
    expected = np.array(model(mx.array([TEXT]), cache=make_prompt_cache(model))[0])
    engine = MlxEngine(folder, mlx.CONTEXT, EngineSettings(cache_tokens=512))
    assert np.array_equal(rows_of(engine, TEXT, [3, 8, 29]), expected)
    exact = mlx.reference_logits(checkpoint_of(family), family, TEXT)
    cosines = (expected * exact).sum(1) / np.linalg.norm(expected, axis=1)
    cosines /= np.linalg.norm(exact, axis=1)
    assert np.median(cosines) > (0.9 if bits == 4 else 0.999)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_16_bit_model_returns_float32_rows(dtype: str, checkpoint_of: mlx.Checkpoints):
    folder = checkpoint_of("llama", dtype=dtype)
    engine = MlxEngine(folder, mlx.CONTEXT, EngineSettings(cache_tokens=512, taps=(0,)))
    with closing(engine.open()) as sequence:
        result = engine.step([(sequence, Block(TEXT, 40))])
        best = engine.step([(sequence, Block(TEXT, 40, best=True))]).best[0]
    assert result.logits[0].dtype == result.taps[0]["tap.0"].dtype == np.float32
    assert best is not None
    # The first of equal scores, which occur in 16 bits.
    assert np.array_equal(best.tokens, result.logits[0].argmax(axis=1))
    assert np.array_equal(best.scores, result.logits[0].max(axis=1))


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_best_tokens_match_the_argmax_of_all_logits(opened: mlx.Opened, rows: int):
    engine = opened("qwen3", rules=mlx.rules(2, 8))
    whole = rows_of(engine, TEXT, [40])
    with closing(engine.open()) as one, closing(engine.open()) as other:
        result = engine.step([(one, Block(TEXT, rows, best=True)), (other, Block(TEXT, rows))])
    best, none = result.best
    assert none is None
    assert best is not None
    assert result.logits[0].shape == (0, mlx.VOCAB)
    assert best.tokens.dtype == np.int64
    assert np.array_equal(best.tokens, whole[40 - rows :].argmax(axis=1))
    assert np.array_equal(best.scores, whole[40 - rows :].max(axis=1))


@pytest.mark.parametrize(("family", "reads"), [("phi3", 16), ("lfm2", 1), ("lfm2", 7)])
def test_a_prompt_may_be_prefilled_in_passes_of_any_length(
    family: str, reads: int, opened: mlx.Opened
):
    expected = rows_of(opened(family), TEXT, [40])
    engine = opened(family, rules=mlx.rules(2, 8, prefill=reads))
    with closing(engine.open()) as sequence:
        engine.step([(sequence, Block(TEXT[:30], 0))])
        sequence.commit(30)
        last = engine.step([(sequence, Block(TEXT[30:], 1))]).logits[0]
    assert np.array_equal(last, expected[-1:])


# -- accepting part of a block ---------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(1, 32), (2, 8), (8, 8)], ids=str)
@pytest.mark.parametrize("family", mlx.FAMILIES)
def test_a_rejected_block_is_not_recomputed_and_a_step_syncs_once(
    family: str, rows: tuple[int, int], opened: mlx.Opened, calls: dict[str, int]
):
    engine = opened(family, mlx.rules(*rows))
    with closing(engine.open()) as sequence:
        engine.step([(sequence, Block(TEXT[:12], 1))])
        sequence.commit(12)
        calls.update(model=0, waits=0)
        for kept in (3, 8, 0, 1, 7, 2):
            step(engine, sequence, TEXT[12:20])
            sequence.commit(kept)
        assert calls == {"model": 6, "waits": 6}
        calls.update(model=0, waits=0)
        with closing(engine.open()) as other:  # several are waited for once
            work = [(sequence, Block(TEXT[:8], 8)), (other, Block(TEXT[:3], 1, best=True))]
            engine.step(work)
        assert calls == {"model": 2, "waits": 1}


@pytest.mark.parametrize("family", RECURRENT)
def test_a_rewind_recomputes_no_projection(
    family: str, opened: mlx.Opened, monkeypatch: pytest.MonkeyPatch
):
    # Unneeded modules are called but never evaluated; these graphs have the evaluated ones.
    import mlx.core as mx
    from mlx import nn

    engine = opened(family)
    with closing(engine.open()) as sequence:
        step(engine, sequence, TEXT[:8])
        sequence.commit(3)
        called: list[int] = []
        linear = nn.Linear.__call__

        def counting(self: Any, x: Any) -> Any:
            called.append(1)
            return linear(self, x)

        monkeypatch.setattr(nn.Linear, "__call__", counting)
        sequence.states.accept(3)
        mx.eval(sequence.states.arrays())
        assert not called
        step(engine, sequence, TEXT[3:5])
        assert called


@pytest.mark.parametrize("family", RECURRENT)
def test_a_recurrent_state_rewinds_further_by_recomputing_tokens(
    family: str, opened: mlx.Opened, calls: dict[str, int]
):
    engine = opened(family, rules=mlx.rules(1, 8, prefill=8))
    expected = rows_of(engine, TEXT, [40])
    with closing(engine.open()) as sequence:
        engine.step([(sequence, Block(TEXT[:30], 1, prefill=True))])
        sequence.commit(30)
        sequence.rewind(18)
        calls.update(model=0)
        # From where the prompt was cut last, at 16, and then the block itself.
        assert np.array_equal(step(engine, sequence, TEXT[18:24]), expected[18:24])
        assert calls["model"] == 2
        with closing(sequence.fork(20)) as other:
            assert other.length == 18
            assert np.array_equal(step(engine, other, TEXT[18:30]), expected[18:30])
        with closing(sequence.fork(10)) as other:
            assert other.length == 8


def test_few_recurrent_states_are_kept(opened: mlx.Opened):
    engine = opened("lfm2", rules=mlx.rules(1, 8, prefill=2))
    with closing(engine.open()) as sequence:
        engine.step([(sequence, Block(TEXT, 1, prefill=True))])
        sequence.commit(40)
        with closing(sequence.fork(10)) as other:
            assert other.length == 0  # only slots near the end are kept
        with closing(sequence.fork(37)) as other:
            assert other.length == 36


def test_a_sliding_window_advances_and_keeps_the_keys_it_needs(checkpoint_of: mlx.Checkpoints):
    long = np.random.default_rng(0).integers(0, mlx.VOCAB, 900).tolist()
    folder = checkpoint_of("gemma3", max_position_embeddings=1024)
    engine = MlxEngine(folder, 1024, EngineSettings(cache_tokens=4096), rules=mlx.rules(1, 32))
    expected = mlx.reference_logits(folder, "gemma3", long)
    with closing(engine.open()) as whole, closing(engine.open()) as sequence:
        (logits,) = engine.step([(whole, Block(long, 900))]).logits
        assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
        engine.step([(sequence, Block(long[:500], 0))])
        sequence.commit(500)
        for rows in cycle((1, 8, 1, 3)):
            at = sequence.length
            if at >= 890:
                break
            assert np.array_equal(step(engine, sequence, long[at:][:rows]), logits[at:][:rows]), at
            sequence.commit(rows)
        # 24 positions are looked at; not all 900 are held.
        held = [cache.slots.offset for cache in sequence.states.caches if hasattr(cache, "slots")]
        assert 24 <= max(held) < 700
        for back in (880, 700, 250):
            sequence.rewind(back)
            assert np.array_equal(step(engine, sequence, long[back : back + 9]), logits[back:][:9])


# -- exactness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", mlx.FAMILIES)
def test_every_number_of_rows_is_bit_identical_on_this_machine(family: str, opened: mlx.Opened):
    engine = opened(family, None)
    assert engine.rules == mlx.rules(1, 32, together=32)
    assert engine.describe()["rows"] == "decode 1-32, prefill 1-512, 32 of several sequences"
    assert all(compared.holds for compared in measure_invariance(engine).values())


def test_a_single_row_setting_skips_probing_and_padding(
    checkpoint_of: mlx.Checkpoints, calls: dict[str, int]
):
    settings = EngineSettings(cache_tokens=512, min_rows=1)
    engine = MlxEngine(checkpoint_of("llama"), mlx.CONTEXT, settings)
    assert (engine.min_rows, engine.rules) == (1, mlx.rules(1, 32))
    assert calls["model"] == 1  # how many columns the logits have


# -- life ------------------------------------------------------------------------------------------


def test_another_thread_may_drive_the_engine(opened: mlx.Opened):
    engine = opened("qwen3_5", taps=(0,))
    expected = rows_of(engine, TEXT, [40])
    results: list[Any] = []
    with closing(engine.open()) as sequence:
        engine.step([(sequence, Block(TEXT[:10], 0, prefill=True))])
        sequence.commit(10)

        def drive() -> None:
            result = engine.step([(sequence, Block(TEXT[10:20], 10, prefill=True))])
            results.extend([result.logits[0], result.taps[0]["tap.0"]])

        for kept in (4, 10):
            worker = threading.Thread(target=drive)
            worker.start()
            worker.join()
            sequence.commit(kept)
            if kept == 4:
                assert np.array_equal(results[0], expected[10:20])
                sequence.rewind(10)
        with closing(sequence.fork(20)) as other:
            for one in (sequence, other):
                assert np.array_equal(step(engine, one, TEXT[20:]), expected[20:])


def test_a_failed_forward_pass_leaves_its_sequences_unchanged(
    opened: mlx.Opened, monkeypatch: pytest.MonkeyPatch
):
    import mlx.core as mx

    engine = opened("lfm2")
    expected = rows_of(engine, TEXT, [40])
    with closing(engine.open()) as sequence:
        engine.step([(sequence, Block(TEXT[:20], 0))])
        sequence.commit(20)

        def fail(*_: object) -> None:
            raise RuntimeError("[metal::malloc] Attempting to allocate 9 bytes")

        with monkeypatch.context() as patched:
            patched.setattr(mx, "eval", fail)
            with raises(ModelError, "9 bytes"):
                step(engine, sequence, TEXT[20:30])
        assert sequence.length == 20
        with raises(ValueError, "commit"):
            sequence.commit(1)
        assert np.array_equal(step(engine, sequence, TEXT[20:30]), expected[20:30])


def test_a_fork_without_free_slots_shares_nothing(checkpoint_of: mlx.Checkpoints):
    engine = MlxEngine(checkpoint_of("llama"), mlx.CONTEXT, EngineSettings(cache_tokens=64))
    with closing(engine.open()) as sequence:
        engine.step([(sequence, Block(TEXT, 1, prefill=True))])
        sequence.commit(40)
        with closing(sequence.fork(40)) as other:
            assert other.length == 0
        assert sequence.length == 40
    assert engine.free_slots == 64
    whole = MlxEngine(checkpoint_of("llama"), 300, rules=mlx.rules(1, 32))
    assert whole.free_slots == 320, "a context, in whole blocks"


def test_unsupported_threads_layers_and_sequences_are_rejected(
    opened: mlx.Opened, checkpoint_of: mlx.Checkpoints
):
    with raises(InvalidRequest, "threads"):
        open_engine("mlx", checkpoint_of("llama"), 64, EngineSettings(threads=2))
    for layers in ((2,), (0, 5), (-1,)):
        with raises(InvalidRequest, "0 to 1"):
            opened("llama", taps=layers)
    stranger: Any = object()
    with raises(TypeError, "object"):
        opened("llama").step([(stranger, Block([1], 1))])


@pytest.mark.parametrize("family", mlx.FAMILIES)
def test_taps_match_transformers_hidden_states(
    family: str, opened: mlx.Opened, checkpoint_of: mlx.Checkpoints
):
    expected = mlx.reference_taps(checkpoint_of(family), family, TEXT)[0]
    engine = opened(family, taps=(0,), rules=mlx.rules(2, 8, prefill=16))
    for rows in (0, 1, 6, 40):
        with closing(engine.open()) as sequence:
            taps = engine.step([(sequence, Block(TEXT, rows))]).taps[0]
        assert list(taps) == ["tap.0"]
        assert taps["tap.0"].shape == (40, 64)
        assert np.abs(taps["tap.0"] - expected).max() < 1e-4 * np.abs(expected).max()
    with pytest.raises(KeyError):
        taps["tap.1"]


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_taps_affect_only_their_model_and_it_is_freed_with_its_engine(
    family: str, opened: mlx.Opened
):
    before = opened(family)
    module = importlib.import_module(f"mlx_lm.models.{family}")
    kind = {"llama": "TransformerBlock", "lfm2": "Lfm2DecoderLayer"}[family]
    call = getattr(module, kind).__call__
    assert call.__module__ == module.__name__  # as it was written
    tapped = opened(family, taps=(1,))
    assert isinstance(tapped.model.module.layers[1], getattr(module, kind))
    assert getattr(module, kind).__call__ is call
    assert before.model._tapped == {}
    with closing(tapped.open()) as sequence:
        step(tapped, sequence, TEXT)
    gone = [weakref.ref(item) for item in (tapped, tapped.model.module)]
    del tapped, sequence
    gc.collect()
    assert [name() for name in gone] == [None, None]


# -- for those who share the model -----------------------------------------------------------------


@pytest.mark.parametrize("family", [result for result in mlx.FAMILIES if result != "gemma3"])
def test_the_embeddings_and_the_head_can_be_shared(family: str, opened: mlx.Opened):
    import mlx.core as mx

    model = opened(family).model
    tokens = mx.array(TEXT)
    inner = model.module.model
    assert mx.array_equal(model.embed(tokens), inner.embed_tokens(tokens))
    assert mx.array_equal(model.head(inner(tokens[None])), model.module(tokens[None]))
