"""The engine llamacpp: its library's rule for single rows, its contexts, and what it refuses."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from paceline.decoding.types import Block, Logits
from paceline.engines.base import EngineSettings
from paceline.engines.llamacpp import libraries
from paceline.engines.llamacpp.engine import LlamaCppEngine
from paceline.engines.llamacpp.heads import Heads, heads_of
from paceline.engines.row_classes import RowClasses, RowRange
from paceline.errors import InvalidRequest, MissingExtra, ModelError
from support.tiny import SIZES, write_tiny
from support.tiny_checkpoints import write_gguf_of

pytest.importorskip("ik_llama_cpp")

CONTEXT = 2048
UNPADDED = RowClasses(RowRange(1, 16), RowRange(32, 256))


def run(engine: LlamaCppEngine, tokens: list[int], start: int, sizes: list[int]) -> Logits:
    """Rows of an answer after a prompt of `start` tokens, in blocks of these sizes."""
    with closing(engine.open()) as sequence:
        engine.step([(sequence, Block(tokens[:start], 0, prefill=True))])
        sequence.commit(start)
        rows = []
        for size in sizes:
            block = Block(tokens[sequence.length :][:size], size)
            rows.append(engine.step([(sequence, block)]).logits[0].copy())
            sequence.commit(size)
    return np.concatenate(rows)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [(9, 3), (4, 1), (4, 4), (4, 2)])
def test_a_single_row_has_the_bits_of_several_where_the_rule_allows_it(
    tmp_path: Path, heads: tuple[int, int], threads: int
):
    queries, keys = heads
    sizes = {**SIZES, "d": 64 * queries, "heads": queries, "kv_heads": keys, "context": CONTEXT}
    path = write_tiny(tmp_path / "m.gguf", sizes=sizes)  # f16: rounding hides no difference
    engine = LlamaCppEngine(path, CONTEXT, EngineSettings(threads=threads), classes=UNPADDED)
    tokens = np.random.default_rng(2).integers(3, 250, CONTEXT).tolist()
    allowed = compared = 0
    with closing(engine):
        for start in (40, 240, 270, 300, 340, 400, 500, 540, 600, 800, 1100):
            single = run(engine, tokens, start, [1] * 12)
            block = run(engine, tokens, start, [12])
            positions = range(start, start + 12)
            binding = libraries.installed()
            group = Heads(keys, queries // keys)
            if all(binding.may_be_single(position, group, threads) for position in positions):
                assert single.tobytes() == block.tobytes(), f"after {start} keys"
                allowed += 1
            compared += 1
    assert compared == 11
    assert allowed or (keys == 1 and threads > 1) or keys < threads


@pytest.mark.slow
def test_a_single_row_differs_where_the_rule_does_not_allow_it(tmp_path: Path):
    sizes = {**SIZES, "d": 576, "heads": 9, "kv_heads": 3, "context": CONTEXT}
    path = write_tiny(tmp_path / "m.gguf", sizes=sizes)
    tokens = np.random.default_rng(2).integers(3, 250, CONTEXT).tolist()
    settings = EngineSettings(threads=2)
    with closing(LlamaCppEngine(path, CONTEXT, settings, classes=UNPADDED)) as engine:
        assert not libraries.installed().may_be_single(270, Heads(3, 3), 2)
        single, block = (run(engine, tokens, 270, sizes) for sizes in ([1] * 12, [12]))
        assert single.tobytes() != block.tobytes()
    # Padded by the engine, the same rows are equal.
    padded = UNPADDED._replace(decode=RowRange(2, 16))
    with closing(LlamaCppEngine(path, CONTEXT, settings, classes=padded)) as engine:
        assert run(engine, tokens, 270, [1] * 12).tobytes() == block.tobytes()


def test_more_sequences_than_contexts_change_no_bit(tmp_path: Path):
    path = write_tiny(tmp_path / "m.gguf")
    with closing(
        LlamaCppEngine(path, 512, EngineSettings(cache_tokens=16 * 512, threads=1))
    ) as engine:
        texts = [np.random.default_rng(n).integers(3, 250, 80).tolist() for n in range(9)]
        alone = [run(engine, text, 40, [1, 2, 3]) for text in texts]
        sequences = [engine.open() for _ in texts]
        for sequence, text in zip(sequences, texts, strict=True):
            engine.step([(sequence, Block(text[:40], 0, prefill=True))])
            sequence.commit(40)
        rows: list[list[Logits]] = [[] for _ in texts]
        for size in (1, 2, 3):
            for sequence, text, logits in zip(sequences, texts, rows, strict=True):
                block = Block(text[sequence.length :][:size], size)
                logits.append(engine.step([(sequence, block)]).logits[0].copy())
                sequence.commit(size)
        for logits, expected in zip(rows, alone, strict=True):
            assert np.concatenate(logits).tobytes() == expected.tobytes()


def test_a_sequence_that_outgrows_its_context_changes_no_bit(tmp_path: Path):
    path = write_tiny(tmp_path / "m.gguf", sizes={**SIZES, "context": CONTEXT})
    tokens = np.random.default_rng(3).integers(3, 250, CONTEXT).tolist()
    with closing(LlamaCppEngine(path, CONTEXT, EngineSettings(threads=1))) as engine:
        short, long = engine.open(), engine.open()
        engine.step([(long, Block(tokens[:1000], 0, prefill=True))])
        long.commit(1000)
        while short.length < 1000:  # from 512 slots to 1,024
            count = min(100, 1000 - short.length)
            engine.step([(short, Block(tokens[short.length :][:count], 0, prefill=True))])
            short.commit(count)
        block = Block(tokens[1000:1008], 8)
        first, second = engine.step([(short, block), (long, block)]).logits
        assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize(
    ("metadata", "heads"),
    [
        ({"attention.head_count": "9", "attention.head_count_kv": "3"}, Heads(3, 3)),
        ({"attention.head_count": "4"}, Heads(4, 1)),
        ({"attention.head_count": "4", "attention.sliding_window": "512"}, None),
        ({"attention.head_count_kv": "3"}, None),
        ({}, None),
    ],
)
def test_heads_are_known_where_all_layers_have_the_same(metadata, heads):
    values = {"general.architecture": "llama"} | {f"llama.{k}": v for k, v in metadata.items()}
    assert heads_of(values.get) == heads


def test_a_processor_without_the_instructions_of_the_wheel_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    old = tmp_path / "cpuinfo"
    old.write_text("processor\t: 0\nflags\t\t: fpu sse sse2 avx f16c\n")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert libraries.missing_instructions(old) == ["avx2", "fma"]
    monkeypatch.setattr(libraries, "missing_instructions", lambda: ["avx2"])
    with pytest.raises(MissingExtra, match="avx2"):
        libraries.installed.__wrapped__()


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ik_llama_cpp", None)
    with pytest.raises(MissingExtra, match=r"paceline\[llamacpp\]"):
        libraries.installed.__wrapped__()


def test_a_refused_file_is_named_with_the_librarys_own_words(tmp_path: Path):
    path = write_tiny(tmp_path / "m.gguf", fields={"llama.embedding_length": 96})
    with pytest.raises(ModelError, match=r"m\.gguf.*(embd|shape|tensor)"):
        LlamaCppEngine(path, 512)


def test_recurrent_layers_and_hidden_states_are_refused_by_name(tmp_path: Path):
    with pytest.raises(ModelError, match="recurrent"):
        LlamaCppEngine(write_gguf_of("qwen3_5_text", tmp_path / "m.gguf"), 512)
    with pytest.raises(InvalidRequest, match="hidden states"):
        LlamaCppEngine(write_tiny(tmp_path / "t.gguf"), 512, EngineSettings(taps=(0,)))


def test_measured_classes_are_kept_for_the_next_time(tmp_path: Path):
    path = write_tiny(tmp_path / "m.gguf")
    settings = EngineSettings(measurements=tmp_path / "measurements", threads=1)
    with closing(LlamaCppEngine(path, 512, settings)) as engine:
        measured = engine.classes
    (file,) = (tmp_path / "measurements").glob("*.rows")
    file.write_text('{"decode": [2, 7], "prefill": [64, 256], "single": false}')
    with closing(LlamaCppEngine(path, 512, settings)) as engine:
        assert engine.classes != measured
        assert engine.classes.decode == (2, 7)


def test_nothing_is_printed_by_the_library(tmp_path: Path):
    path = write_tiny(tmp_path / "m.gguf")
    script = (
        "import sys; from pathlib import Path;"
        "from paceline.engines.llamacpp.engine import LlamaCppEngine;"
        "from paceline.engines.base import EngineSettings;"
        "LlamaCppEngine(Path(sys.argv[1]), 512, EngineSettings(threads=1)).close()"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")


def test_a_last_chunk_of_one_token_is_computed_as_a_prompt(tmp_path: Path):
    sizes = {**SIZES, "d": 576, "heads": 9, "kv_heads": 3, "context": CONTEXT}
    path = write_tiny(tmp_path / "m.gguf", sizes=sizes)
    tokens = np.random.default_rng(4).integers(3, 250, 64).tolist()
    classes = RowClasses(RowRange(2, 16), RowRange(40, 256), single=True)
    sizes_seen = []
    with closing(LlamaCppEngine(path, 512, EngineSettings(threads=1), classes=classes)) as engine:
        sequence = engine.open()
        context = sequence.context(256)
        decode = context.decode
        context.decode = lambda padded, outputs: (  # type: ignore[method-assign]
            sizes_seen.append(len(padded)) or decode(padded, outputs)
        )
        for chunk, prefill in ((tokens[:63], True), (tokens[63:], True), (tokens[:1], False)):
            engine.step([(sequence, Block(chunk, 1, prefill=prefill))])
            sequence.commit(len(chunk))
    assert sizes_seen == [63, 40, 1]
