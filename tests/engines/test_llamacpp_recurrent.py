"""Models with recurrent layers in the engine llamacpp: rollbacks and recomputed rows.

tests/conformance compares their rows with those of plain decoding, whatever happens before.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from paceline.decoding.types import Logits
from paceline.engines.base import EngineSettings
from paceline.engines.llamacpp import engine as engine_module
from paceline.engines.llamacpp.binding import PARTIAL_STATE, ContextSettings
from paceline.engines.llamacpp.engine import LlamaCppEngine
from paceline.engines.llamacpp.native import NativeModel, NativeSequence
from paceline.engines.rows import RowRange
from paceline.errors import ModelError
from support.engine_rows import feed, random_text, run, same
from support.errors import raises
from support.families import write_gguf_of
from support.llamacpp import library
from support.tiny import Type

IK, UPSTREAM = "ik_llama.cpp", "llama.cpp"
CONTEXT = 1024
ONE_THREAD = EngineSettings(cache_tokens=16 * CONTEXT, threads=1)


def file_of(form: str, folder: Path, weights: Type = Type.F32) -> Path:
    return write_gguf_of(form, folder / f"{form}-{weights.name}.gguf", weights=weights)


@pytest.fixture(scope="module", params=["lfm2", "qwen3_5_text"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaCppEngine]:
    binding = library(UPSTREAM)
    path = file_of(request.param, tmp_path_factory.mktemp("hybrid"))
    with closing(LlamaCppEngine(path, CONTEXT, ONE_THREAD, binding=binding)) as opened:
        yield opened


@contextmanager
def rows_run() -> Iterator[list[int]]:
    counts: list[int] = []
    decode = NativeSequence.decode

    def counted(self: NativeSequence, tokens: list[int], outputs: slice) -> Logits:
        counts.append(len(tokens))
        return decode(self, tokens, outputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeSequence, "decode", counted)
        yield counts


def plain(engine: LlamaCppEngine, text: list[int], prompt: int) -> Logits:
    with closing(engine.open()) as sequence:
        feed(engine, sequence, text[:prompt])
        rows = []
        for token in text[prompt:]:
            rows += run(engine, (sequence, [token], 1))
            sequence.commit(1)
    return np.concatenate(rows)


def test_recurrent_layers_run_only_in_llama_cpp(tmp_path: Path):
    path = file_of("qwen3_5_text", tmp_path)
    LlamaCppEngine(path, 512, ONE_THREAD, binding=library(UPSTREAM)).close()
    binding = library(IK)
    with raises(ModelError, "qwen35"):
        LlamaCppEngine(path, 512, ONE_THREAD, binding=binding)


@pytest.mark.parametrize(
    ("function", "value", "fault"),
    [
        ("rollback", 0, "of a family whose states llama.cpp cannot roll back"),
        ("has_window", True, "recurrent layers and an attention window"),
    ],
)
def test_states_without_rollback_are_rejected_before_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, value: int, fault: str
):
    binding = library(UPSTREAM)
    open_before = binding.open
    monkeypatch.setattr(binding, function, lambda _pointer: value)
    with raises(ModelError, fault, "another family", "lfm2-F32.gguf") as caught:
        LlamaCppEngine(file_of("lfm2", tmp_path), 512, ONE_THREAD, binding=binding)
    del caught
    assert binding.open <= open_before + 1  # the model, until it is collected


def test_positions_that_crash_the_library_are_rejected(tmp_path: Path):
    path = file_of("qwen3_5_text-small", tmp_path)  # heads of 16
    binding = library(UPSTREAM)
    with raises(ModelError, "32 numbers"):
        LlamaCppEngine(path, 512, ONE_THREAD, binding=binding)


@pytest.mark.parametrize("form", ["lfm2", "qwen3_5_text"])
def test_a_context_rolls_back_once_into_its_last_forward_pass(tmp_path: Path, form: str):
    """It reports where it cannot: the library keeps no state from before a call, silently."""
    model = NativeModel(library(UPSTREAM), file_of(form, tmp_path))
    tokens = np.random.default_rng(1).integers(3, 250, 200).tolist()
    settings = ContextSettings(256, 64, 1, rollback=15)

    def after(length: int) -> bytes:
        with closing(model.context(settings)) as context:
            (fresh,) = context.sequences
            fresh.decode(tokens[:40], slice(0, 0))
            fresh.decode([*tokens[40:length], 7, 7], slice(0, 0))
            fresh.truncate(length)
            return fresh.decode(tokens[length : length + 2], slice(0, 2)).tobytes()

    with closing(model.context(settings)) as opened:
        (place,) = opened.sequences
        for rows in (8, 16, 24):
            for dropped in range(1, min(rows, 16)):
                place.truncate(0)
                place.decode(tokens[:40], slice(0, 0))
                place.decode(tokens[40 : 40 + rows], slice(0, 0))
                length = 40 + rows - dropped
                place.truncate(length)
                assert place.decode(tokens[length : length + 2], slice(0, 2)).tobytes() == after(
                    length
                )
            place.truncate(0)
            place.decode(tokens[:40], slice(0, 0))
            place.decode(tokens[40 : 40 + rows], slice(0, 0))
            possible = [length for length in range(1, 41 + rows) if place.can_truncate(length)]
            assert possible == list(range(max(41, 40 + rows - 15), 41 + rows))
            place.truncate(possible[0])
            place.state(PARTIAL_STATE)  # which drops rows: another time is once too often
            assert [n for n in range(1, 99) if place.can_truncate(n)] == possible[:1]


def test_rejecting_drafts_of_one_pass_recomputes_no_rows(engine: LlamaCppEngine):
    text = random_text(engine, 300)
    expected = plain(engine, text, 40)
    with closing(engine.open()) as sequence:
        feed(engine, sequence, text[:40])
        with rows_run() as counts:
            for rows, kept in [(16, 1), (16, 16), (9, 4), (1, 1), (2, 1), (16, 15), (5, 5)]:
                start = sequence.length
                block = text[start : start + kept] + [7] * (rows - kept)
                (logits,) = run(engine, (sequence, block, rows))
                assert same(logits[:kept], expected[start - 40 : start - 40 + kept])
                sequence.commit(kept)
    assert counts == [16, 16, 9, 2, 2, 16, 5]


@pytest.mark.parametrize("kept", [1, 16, 17, 20, 39])
def test_rejecting_a_draft_of_several_passes_recomputes_its_rows(engine: LlamaCppEngine, kept: int):
    text = random_text(engine, 300)
    expected = plain(engine, text, 40)
    with closing(engine.open()) as sequence:
        feed(engine, sequence, text[:40])
        for _ in range(3):
            start = sequence.length
            with rows_run() as counts:
                block = text[start : start + kept] + [7] * (40 - kept)
                (logits,) = run(engine, (sequence, block, 40))
                sequence.commit(kept)
                assert same(logits[:kept], expected[start - 40 : start - 40 + kept])
                at = sequence.length
                (logits,) = run(engine, (sequence, text[at : at + 2], 2))
            assert same(logits, expected[at - 40 : at - 38])
            sequence.commit(2)
            again = 0 if kept > 32 else kept + (kept % 16 == 1)  # padding of a row
            assert sum(counts) == 40 + again + 2


def test_a_chats_next_turn_recomputes_few_tokens(engine: LlamaCppEngine):
    """A turn rewinds to about the end of the last prompt, and runs only new tokens."""
    text = random_text(engine, 700)
    with closing(engine.open()) as sequence:
        run(engine, prompts=[(sequence, text[:300], 1)])
        sequence.commit(300)
        for end, back in ((400, 300), (500, 395), (600, 490)):
            for at in range(sequence.length, sequence.length + 30, 5):
                run(engine, (sequence, text[at : at + 5], 5))
                sequence.commit(3)
            sequence.rewind(back)
            with rows_run() as counts:
                (logits,) = run(engine, prompts=[(sequence, text[back:end], 1)])
                sequence.commit(end - back)
            assert sum(counts) < end - back + 50
            with closing(engine.open()) as fresh:
                (expected,) = run(engine, prompts=[(fresh, text[:end], 1)])
            assert same(logits, expected)


def test_a_fork_of_a_long_prompt_shares_everything_but_its_end(engine: LlamaCppEngine):
    text = random_text(engine, 300)
    with closing(engine.open()) as sequence:
        run(engine, prompts=[(sequence, text, 1)])
        sequence.commit(300)
        assert [sequence.fork_length(length) for length in (500, 300, 299, 280)] == [
            *(300, 300),
            *(256, 256),
        ]
        run(engine, (sequence, text[:9], 9))
        sequence.commit(5)
        expected = None
        for length in (300, 299, 0):
            with closing(sequence.fork(length)) as fork, rows_run() as counts:
                rest = text[fork.length :]
                if rest:
                    run(engine, prompts=[(fork, rest, 1)])
                    fork.commit(len(rest))
                (logits,) = run(engine, (fork, text[:3], 3))
                fork.commit(2)
            assert sum(counts) == len(rest) + 3
            expected = logits if expected is None else expected
            assert same(logits, expected)


def test_recomputed_rows_keep_the_prompts_checkpoint(engine: LlamaCppEngine):
    text = random_text(engine, 200)
    expected = plain(engine, text, 40)
    with closing(engine.open()) as sequence:
        feed(engine, sequence, text[:40])
        for at in range(40, 120, 8):
            run(engine, (sequence, text[at : at + 8], 8))
            sequence.commit(8)
        for back in (90, 100, 70):
            sequence.rewind(back)
            (logits,) = run(engine, (sequence, text[back : back + 16], 16))
            sequence.commit(16)
            assert same(logits, expected[back - 40 : back - 24])
            assert sequence.fork_length(200) == 40


def test_a_requested_prefix_is_shared_the_next_time(engine: LlamaCppEngine):
    """A server's prompts share a system message like this."""
    system = random_text(engine, 150)
    texts = [system + random_text(engine, 90, seed) for seed in (1, 2, 3)]
    sequences = [engine.open()]
    for text in texts:
        fork = sequences[-1].fork(150)
        assert fork.length == (150 if len(sequences) == 3 else 0)
        for start in range(fork.length, 240, 100):
            chunk = text[start : min(start + 100, 240)]
            (rows,) = run(engine, prompts=[(fork, chunk, 1)])
            fork.commit(len(chunk))
        with closing(engine.open()) as fresh:
            (expected,) = run(engine, prompts=[(fresh, text, 1)])
        assert same(rows, expected)
        sequences.append(fork)
    for sequence in sequences:
        sequence.close()


def test_a_draft_model_rolls_back_several_passes_with_few_rows(engine: LlamaCppEngine):
    """Draft like `drafters.model`: one token at a time, some of them rejected."""
    text = random_text(engine, 300)
    expected = plain(engine, text, 40)
    with closing(engine.open()) as sequence:
        feed(engine, sequence, text[:40])
        with rows_run() as counts:
            while sequence.length < 200:
                start = sequence.length
                for token in [*text[start : start + 3], 7, 7]:
                    (logits,) = run(engine, (sequence, [token], 1))
                    sequence.commit(1)
                    if sequence.length == start + 3:
                        assert same(logits, expected[start - 38 : start - 37])
                sequence.rewind(start + 3)
    rounds = (200 - 40 + 2) // 3
    assert sum(counts) < rounds * (5 * 2 + 8)


def test_more_sequences_than_contexts_change_no_bit(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine._contexts, "_max_contexts", 2)
    texts = [random_text(engine, 140, seed) for seed in range(5)]
    expected = [plain(engine, text, 40) for text in texts]
    sequences = [engine.open() for _ in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        feed(engine, sequence, text[:40])
    for kept in (5, 1, 8, 3, 8, 8):
        work = []
        for sequence, text in zip(sequences, texts, strict=True):
            at = sequence.length
            work.append((sequence, text[at : at + kept] + [7] * (8 - kept), 8))
        for logits, (sequence, _, _), known in zip(run(engine, *work), work, expected, strict=True):
            start = sequence.length - 40
            assert same(logits[:kept], known[start : start + kept])
            sequence.commit(kept)
        assert len(engine._contexts._lent) <= 2
    for sequence in sequences:
        sequence.close()


def test_a_sequence_that_outgrows_its_context_changes_no_bit(engine: LlamaCppEngine):
    text = random_text(engine, 700)
    with closing(engine.open()) as short, closing(engine.open()) as long:
        feed(engine, long, text[:600])
        while short.length < 600:  # from 512 slots to 1,024
            feed(engine, short, text[short.length :][: min(70, 600 - short.length)])
        first, second = run(engine, (short, text[600:616], 16), (long, text[600:616], 16))
        assert same(first, second)


def test_a_failed_forward_pass_is_followed_by_the_same_rows(engine: LlamaCppEngine):
    text = random_text(engine, 100)
    expected = plain(engine, text, 40)
    with closing(engine.open()) as sequence:
        feed(engine, sequence, text[:40])
        run(engine, (sequence, text[40:50], 10))
        sequence.commit(10)
        with raises(ModelError, "5 rows"):
            run(engine, (sequence, [3, engine.vocab_size, 4, 5, 6], 5))
        assert sequence.length == 50
        (logits,) = run(engine, (sequence, text[50:60], 10))
        assert same(logits, expected[10:20])


@pytest.mark.parametrize("call", [1, 3, 5])
def test_an_interrupted_forward_pass_is_followed_by_the_same_rows(
    engine: LlamaCppEngine, call: int
):
    """This includes recomputed rows: two passes, and then three."""
    text = random_text(engine, 140)
    expected = plain(engine, text, 40)
    decode, calls = engine._binding.library.llama_decode, []

    def interrupted(*arguments: object) -> int:
        code: int = decode(*arguments)
        calls.append(code)
        if len(calls) == call:
            raise KeyboardInterrupt
        return code

    with closing(engine.open()) as sequence, pytest.MonkeyPatch.context() as patch:
        feed(engine, sequence, text[:40])
        for at in (40, 56, 72):
            run(engine, (sequence, text[at : at + 16], 16))
            sequence.commit(16)
        sequence.rewind(57)
        patch.setattr(engine._binding.library, "llama_decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(engine, (sequence, text[57:97], 40))
        (logits,) = run(engine, (sequence, text[57:97], 40))
        assert same(logits, expected[17:57])


@pytest.mark.parametrize("form", ["lfm2", "qwen3_5_text"])
def test_as_many_contexts_are_opened_as_their_states_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
):
    binding, path = library(UPSTREAM), file_of(form, tmp_path)
    with closing(NativeModel(binding, path)) as model:
        state = model.sizes(1).state
    monkeypatch.setattr(engine_module, "_STATE_BYTES", 3 * 16 * state)
    with closing(LlamaCppEngine(path, 512, ONE_THREAD, binding=binding)) as engine:
        assert engine._contexts._max_contexts == 3
    monkeypatch.setattr(engine_module, "_STATE_BYTES", 0)
    with closing(LlamaCppEngine(path, 512, ONE_THREAD, binding=binding)) as engine:
        assert engine._contexts._max_contexts == 1
    memory = path.stat().st_size + 8 * state  # half of a context's size
    monkeypatch.setattr(engine_module, "memory_bytes", lambda: memory)
    with raises(ModelError, "MiB", "memory"):
        LlamaCppEngine(path, 512, ONE_THREAD, binding=binding)


@pytest.mark.parametrize(("weights", "single"), [(Type.F32, False), (Type.Q8_0, True)])
@pytest.mark.parametrize("form", ["lfm2", "qwen3_5_text"])
def test_padding_and_state_copies_are_rare(tmp_path: Path, form: str, weights: Type, single: bool):
    path = file_of(form, tmp_path, weights)
    with closing(LlamaCppEngine(path, 512, ONE_THREAD, binding=library(UPSTREAM))) as engine:
        assert engine.rules.decode == RowRange(2, 16)
        assert engine.rules.prefill == RowRange(2, 256)
        assert engine.rules.single == single  # weights of convolutions are floats in all files
        assert "15 rows" in engine.describe()["states"]
