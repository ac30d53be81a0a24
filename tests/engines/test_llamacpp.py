"""The engine llamacpp: its library's rule for single rows, its contexts and its errors."""

import ctypes
import gc
import json
import signal
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.types import Block, Logits
from paceline.engines.base import EngineSettings
from paceline.engines.exact import measure_invariance
from paceline.engines.llamacpp import libraries, llama_h, rules
from paceline.engines.llamacpp.binding import Binding, ContextSettings, Heads
from paceline.engines.llamacpp.engine import LlamaCppEngine
from paceline.engines.llamacpp.libraries import PATHS, version_of
from paceline.engines.llamacpp.native import NativeModel, NativeSequence
from paceline.engines.llamacpp.rules import RowLimits, may_be_single
from paceline.engines.rows import RowRange, RowRules
from paceline.errors import InvalidRequest, MissingExtra, ModelError
from paceline.models import resolve
from paceline.runtime.model import Model
from paceline.storage.gguf_file import read_gguf
from support import tiny
from support.divergence import divergence
from support.engine_rows import feed
from support.errors import raises
from support.families import write_gguf_of
from support.ggml import quantize
from support.llamacpp import library
from support.process import python
from support.tiny import SIZES, WIDE, Type, write_tiny

IK, UPSTREAM = "ik_llama.cpp", "llama.cpp"

CONTEXT = 2048
ONE_THREAD = EngineSettings(cache_tokens=8192, threads=1)
UNPADDED = RowRules(RowRange(1, 16), RowRange(32, 256))


@pytest.fixture(params=[IK, UPSTREAM])
def binding(request: pytest.FixtureRequest) -> Binding:
    return library(request.param)


def run(engine: LlamaCppEngine, tokens: list[int], start: int, sizes: list[int]) -> Logits:
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
@pytest.mark.parametrize(
    ("heads", "threads"),
    [((9, 3), 1), ((9, 3), 2), ((9, 3), 4), ((4, 1), 2), ((4, 4), 3), ((4, 2), 3)],
)
def test_a_single_row_is_bit_identical_if_the_rules_allow_it(
    tmp_path: Path, heads: tuple[int, int], threads: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("paceline.engines.base.cpu_cores", lambda: threads)
    queries, keys = heads
    sizes = {**SIZES, "d": 64 * queries, "heads": queries, "kv_heads": keys, "context": CONTEXT}
    path = write_tiny(tmp_path / "m.gguf", sizes=sizes)  # f16: rounding hides no difference
    binding = library(IK)
    settings = EngineSettings(threads=threads)
    engine = LlamaCppEngine(path, CONTEXT, settings, binding=binding, rules=UNPADDED)
    tokens = np.random.default_rng(2).integers(3, 250, CONTEXT).tolist()
    allowed = compared = 0
    with closing(engine), closing(engine.open()) as sequence:

        def step(count: int, rows: int) -> Logits:
            block = Block(tokens[sequence.length :][:count], rows, prefill=not rows)
            return engine.step([(sequence, block)]).logits[0].copy()

        for start in (40, 240, 270, 300, 340, 400, 500, 540, 600, 800, 1100):
            step(start - sequence.length, 0)
            sequence.commit(start - sequence.length)
            several = step(12, 12)
            single = []
            for _ in range(12):
                single.append(step(1, 1))
                sequence.commit(1)
            sequence.rewind(start)
            positions = range(start, start + 12)
            assert engine._model.heads == Heads(keys, queries // keys)
            if all(may_be_single(engine._model, threads, keys) for keys in positions):
                assert np.concatenate(single).tobytes() == several.tobytes(), f"after {start} keys"
                allowed += 1
            compared += 1
    assert compared == 11
    assert allowed or (keys == 1 and threads > 1) or keys < threads


@pytest.mark.slow
def test_a_single_row_differs_if_the_rules_forbid_it(tmp_path: Path):
    sizes = {**SIZES, "d": 576, "heads": 9, "kv_heads": 3, "context": CONTEXT}
    path = write_tiny(tmp_path / "m.gguf", sizes=sizes)
    tokens = np.random.default_rng(2).integers(3, 250, CONTEXT).tolist()
    settings, binding = EngineSettings(threads=2), library(IK)
    with closing(
        LlamaCppEngine(path, CONTEXT, settings, binding=binding, rules=UNPADDED)
    ) as engine:
        assert not may_be_single(engine._model, 2, 270)
        single, block = (run(engine, tokens, 270, sizes) for sizes in ([1] * 12, [12]))
        assert single.tobytes() != block.tobytes()
    # Padded by the engine, the same rows are equal.
    padded = UNPADDED._replace(decode=RowRange(2, 16))
    with closing(LlamaCppEngine(path, CONTEXT, settings, binding=binding, rules=padded)) as engine:
        assert run(engine, tokens, 270, [1] * 12).tobytes() == block.tobytes()


def test_more_sequences_than_contexts_change_no_bit_and_active_ones_run_first(
    tmp_path: Path, binding: Binding, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("paceline.engines.llamacpp.engine._MAX_CONTEXTS", 4)
    restored, restore = [], NativeSequence.restore

    def counted(place: NativeSequence, *state: Any) -> None:
        restored.append(place)
        restore(place, *state)

    monkeypatch.setattr(NativeSequence, "restore", counted)
    path = write_tiny(tmp_path / "m.gguf")
    settings = EngineSettings(cache_tokens=16 * 512, threads=1)
    with closing(LlamaCppEngine(path, 512, settings, binding=binding)) as engine:
        texts = [np.random.default_rng(n).integers(3, 250, 80).tolist() for n in range(9)]
        alone = [run(engine, text, 40, [1, 2, 3]) for text in texts]
        sequences = [engine.open() for _ in texts]
        for sequence, text in zip(sequences, texts, strict=True):
            engine.step([(sequence, Block(text[:40], 0, prefill=True))])
            sequence.commit(40)
        rows: list[list[Logits]] = [[] for _ in texts]
        for size in (1, 2, 3):
            restored.clear()
            blocks = [
                Block(text[sequence.length :][:size], size)
                for sequence, text in zip(sequences, texts, strict=True)
            ]
            batch = engine.step(list(zip(sequences, blocks, strict=True))).logits
            assert len(restored) == 5
            for sequence, logits, block_rows in zip(sequences, batch, rows, strict=True):
                block_rows.append(logits)
                sequence.commit(size)
        for block_rows, expected in zip(rows, alone, strict=True):
            assert np.concatenate(block_rows).tobytes() == expected.tobytes()


def write_longrope(path: Path, context: int) -> Path:
    """Write a Phi-3 with different position factors beyond 700 tokens."""
    fields = {"phi3.context_length": context, "phi3.rope.scaling.original_context_length": 700}
    return write_gguf_of("phi3-longrope-untied", path, fields=fields)


@pytest.mark.parametrize("longrope", [False, True])
def test_a_sequence_that_outgrows_its_context_changes_no_bit(
    tmp_path: Path, binding: Binding, longrope: bool
):
    """ik_llama.cpp chooses LongRoPE's factors by the context's slots."""
    path = tmp_path / "m.gguf"
    if longrope:
        write_longrope(path, CONTEXT)
    else:
        write_tiny(path, sizes={**SIZES, "context": CONTEXT})
    tokens = np.random.default_rng(3).integers(3, 250, CONTEXT).tolist()
    settings = EngineSettings(threads=1)
    with closing(LlamaCppEngine(path, CONTEXT, settings, binding=binding)) as engine:
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
        ({"attention.head_count_kv": "3"}, None),
        ({}, None),
    ],
)
def test_head_counts_are_reported_if_equal_in_all_layers(
    binding: Binding, metadata, heads, monkeypatch: pytest.MonkeyPatch
):
    values = {"general.architecture": "llama"} | {f"llama.{k}": v for k, v in metadata.items()}
    monkeypatch.setattr(binding, "metadata", lambda _model, key: values.get(key))
    assert binding.heads(0) == heads


def test_a_cpu_without_the_required_instructions_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    old = tmp_path / "cpuinfo"
    old.write_text("processor\t: 0\nflags\t\t: fpu sse sse2 avx f16c\n")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert libraries.missing_instructions(old) == ["avx2", "fma"]
    monkeypatch.setattr(libraries, "load", libraries._load.__wrapped__)
    monkeypatch.setattr(libraries, "missing_instructions", lambda: ["avx2"])
    monkeypatch.setenv(libraries.VARIABLE, IK)
    with raises(MissingExtra, "avx2"):
        next(libraries.installed())


def test_building_from_source_is_suggested_if_the_wheel_needs_a_newer_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    new, old = tmp_path / "new", tmp_path / "old"
    new.write_text("flags\t\t: avx2 avx512f avx512bw avx512dq avx512vl avx512_vnni\n")
    old.write_text("flags\t\t: avx2 avx512f\n")
    ik = library(IK)
    monkeypatch.setattr(ik.library, "llama_print_system_info", lambda: b"AVX512_VNNI = 0 | ")
    assert "-DGGML_NATIVE=ON" in libraries.faster_build(ik, new)
    assert not libraries.faster_build(ik, old) and not libraries.faster_build(
        library(UPSTREAM), new
    )
    monkeypatch.setattr(ik.library, "llama_print_system_info", lambda: b"AVX512_VNNI = 1 | ")
    assert not libraries.faster_build(ik, new)


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a process that has not loaded a library yet."""
    monkeypatch.setattr(libraries, "load", libraries._load.__wrapped__)
    monkeypatch.setitem(sys.modules, "ik_llama_cpp", None)
    monkeypatch.setattr(llama_h, "find_spec", lambda _: None)


@pytest.mark.usefixtures("unloaded")
def test_missing_libraries_are_reported_with_install_instructions():
    with raises(MissingExtra, "pip install", "xllamacpp", "ik-llama-cpp-python"):
        next(libraries.installed())


def test_a_library_with_other_structs_or_without_a_function_is_rejected_by_name(
    monkeypatch: pytest.MonkeyPatch,
):
    for name in (UPSTREAM, IK):
        library(name)
    monkeypatch.setattr(libraries, "load", libraries._load.__wrapped__)
    monkeypatch.setitem(llama_h.DEFAULTS, llama_h.ContextParams, {"n_batch": 2048})
    monkeypatch.setenv(libraries.VARIABLE, UPSTREAM)
    with raises(MissingExtra, "llama.cpp", "structs", "n_ctx", "install xllamacpp"):
        next(libraries.installed())
    monkeypatch.setattr("ik_llama_cpp._ctypes_api._lib", ctypes.CDLL(None))
    monkeypatch.setenv(libraries.VARIABLE, IK)
    with raises(MissingExtra, "llama_kv_cache_seq_rm"):
        next(libraries.installed())


def test_a_library_logs_to_a_binding_that_was_dropped(binding: Binding, tiny_gguf: Path):
    """Were the callback freed, one of these would take its memory, and the library call that."""
    args = [libraries.library_folder(binding.name)] if binding.name == UPSTREAM else []
    type(binding)(*args)
    gc.collect()
    calls: list[Any] = []
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    kept = [kind(lambda *values: calls.append(values)) for _ in range(64)]
    binding.free_model(binding.load(tiny_gguf))
    assert kept and not calls


def test_the_library_setting_selects_the_only_library(
    monkeypatch: pytest.MonkeyPatch, binding: Binding
):
    monkeypatch.setenv(libraries.VARIABLE, binding.name)
    assert [library.name for library in libraries.installed()] == [binding.name]
    monkeypatch.setenv(libraries.VARIABLE, "llama")
    with raises(InvalidRequest, "ik_llama.cpp", "llama.cpp"):
        next(libraries.installed())


def test_the_first_library_that_supports_a_file_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tiny, "quantize", partial(quantize, library(UPSTREAM)))
    paths = {
        write_tiny(tmp_path / "q8.gguf", weights=Type.Q8_0): library(IK).name,
        write_tiny(tmp_path / "iq4.gguf", weights=Type.IQ4_XS, sizes=WIDE): UPSTREAM,
        write_gguf_of("minicpm", tmp_path / "minicpm.gguf"): UPSTREAM,
    }
    for path, name in paths.items():
        with closing(LlamaCppEngine(path, 512, EngineSettings(threads=1))) as engine:
            assert engine.describe()["library"].startswith(f"{name} "), path.name


def test_a_file_unsupported_by_all_libraries_is_rejected_by_both(tmp_path: Path):
    path = write_gguf_of("mistral", tmp_path / "m.gguf")
    for name in (IK, UPSTREAM):
        library(name)
    with raises(ModelError, "ik_llama.cpp", "llama.cpp"):
        LlamaCppEngine(path, 512)


def test_a_custom_library_is_reported_with_its_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    packaged, build = version_of("numpy", IK).split()
    assert len(build) == 10  # a digest
    file = tmp_path / "libllama.so"
    file.write_bytes(b"1")
    monkeypatch.setenv(PATHS[IK], str(file))
    first = version_of("numpy", IK)
    assert first.startswith(f"{packaged}, own build {file}")
    (tmp_path / "libggml.so.0").write_bytes(b"2")
    assert version_of("numpy", IK) != first
    monkeypatch.setenv(PATHS[UPSTREAM], str(tmp_path))
    assert "own build" in version_of("numpy", UPSTREAM)


@pytest.mark.parametrize("name", [IK, UPSTREAM])
def test_a_custom_library_that_fails_to_load_is_an_error(tmp_path: Path, name: str):
    library(name)
    script = (
        "from pathlib import Path\n"
        "from paceline.engines.llamacpp import libraries\n"
        "from paceline.errors import MissingExtra\n"
        "assert libraries.device_for(Path('m.gguf')) is None\n"
        "try: print(libraries.library_with_devices('auto'), [*libraries.installed()])\n"
        "except MissingExtra as error: print(error)"
    )
    finished = python("-c", script, env={PATHS[name]: str(tmp_path / "missing.so")})
    assert finished.stdout.startswith(f"{name} cannot be loaded from ${PATHS[name]} ({tmp_path}")


def test_a_float_output_head_needs_two_rows_in_llama_cpp(tmp_path: Path):
    path = write_tiny(tmp_path / "m.gguf")  # f16
    settings = EngineSettings(threads=1)
    with closing(LlamaCppEngine(path, 512, settings, binding=library(UPSTREAM))) as engine:
        assert engine.rules.outputs == 2
        assert not engine.rules.single
        tokens = np.random.default_rng(5).integers(3, 250, 80).tolist()
        whole = run(engine, tokens, 40, [12])
        for sizes in ([1] * 12, [2] * 6, [5, 7]):
            assert run(engine, tokens, 40, sizes).tobytes() == whole.tobytes(), sizes
        engine.rules = engine.rules._replace(single=True)
        assert run(engine, tokens, 40, [1] * 12).tobytes() != whole.tobytes()


@pytest.mark.parametrize(
    ("name", "weights", "threads", "context", "prefill"),
    [
        (IK, Type.F16, 3, 512, (32, 256)),
        (IK, Type.F16, 1, 40, (1, 1)),
        (UPSTREAM, Type.Q4_K, 1, 512, (1, 1)),
        (IK, Type.Q6_K, 1, 512, (1, 1)),
    ],
    ids=["heads that threads divide", "no room to compare", "a wrong table", "a wrong line of it"],
)
def test_rows_run_alone_if_a_rule_fails_and_drafts_change_no_token(
    tmp_path: Path,
    name: str,
    weights: Type,
    threads: int,
    context: int,
    prefill: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("paceline.engines.base.cpu_cores", lambda: threads)
    binding = library(name)
    if weights != Type.F16:  # as for types that have no kernel for many rows
        monkeypatch.setattr(rules, "_LLAMA", {})
        monkeypatch.setattr(rules, "_IK", {"Q6_K": RowLimits()})
        monkeypatch.setattr(rules, "_IK_OTHERS", RowLimits())
    monkeypatch.setattr(tiny, "quantize", partial(quantize, binding))
    sizes = {**(SIZES if weights == Type.F16 else WIDE), "context": context}  # heads of 16 or 64
    path = write_tiny(tmp_path / "m.gguf", sizes=sizes, weights=weights)
    files = resolve(str(path), tmp_path, engine="llamacpp")
    engine = LlamaCppEngine(path, context, EngineSettings(threads=threads), binding=binding)
    assert (engine.rules.decode, engine.rules.prefill) == ((1, 1), prefill)
    with closing(Model(files, engine)) as model:
        plain, drafted = (
            # A context of 40 slots has no room to compare rows after a cached prefix.
            model.without_history().generate(
                "a b a b", raw=True, max_tokens=32, drafter=name, policy="fixed"
            )
            for name in ("none", "suffix")
        )
    assert drafted.stats.drafted > 5
    assert drafted.token_ids == plain.token_ids
    assert plain.exact
    assert drafted.exact


@pytest.mark.parametrize("name", [UPSTREAM, IK])
def test_a_q8_0_kv_cache_takes_less_memory_and_rows_stay_equal(tmp_path: Path, name: str):
    binding = library(name)
    path = write_tiny(tmp_path / "m.gguf", sizes=WIDE, weights=Type.Q8_0)
    tokens = np.random.default_rng(5).integers(3, 250, 80).tolist()
    logits, slots = [], []
    for kv in (None, "q8_0"):
        settings = EngineSettings(cache_tokens=2048, threads=1, kv_cache_type=kv)
        with closing(LlamaCppEngine(path, 512, settings, binding=binding)) as engine:
            compared = measure_invariance(engine)
            assert all(each.holds for each in compared.values()), (kv, compared)
            logits.append(run(engine, tokens, 70, [10]))
            slots.append(engine._model.sizes(1).slot)
    assert slots[1] < 0.8 * slots[0]
    assert 0 < divergence(*logits) < 0.01
    odd = write_tiny(tmp_path / "odd.gguf")  # heads of 16
    settings = EngineSettings(threads=1, kv_cache_type="q8_0")
    with raises(ModelError, "odd.gguf", "not multiples of 32", "--kv-cache-type"):
        LlamaCppEngine(odd, 512, settings, binding=binding)


def test_a_q8_0_cache_with_an_attention_window_is_rejected(tmp_path: Path):
    content = read_gguf(write_tiny(tmp_path / "m.gguf"))
    fields = {**content.fields, "llama.attention.sliding_window": 512, "llama.context_length": 256}
    with raises(ModelError, "m.gguf", "attention window and keys in q8_0", "--kv-cache-type"):
        library(IK).check("m.gguf", replace(content, fields=fields), quantized=True)


@pytest.mark.parametrize(("weights", "shared"), [(Type.Q8_0, 44), (Type.Q4_K, 40)])
def test_a_fork_shares_output_kv_that_is_in_the_prompts_row_class(
    tmp_path: Path, weights: Type, shared: int, monkeypatch: pytest.MonkeyPatch
):
    """Rows of Q4_K are not in llama.cpp; in ik_llama.cpp only those of packed weights are."""
    monkeypatch.setattr(tiny, "quantize", partial(quantize, library(UPSTREAM)))
    path = write_tiny(tmp_path / "m.gguf", sizes=WIDE, weights=weights)
    tokens = np.random.default_rng(5).integers(3, 250, 50).tolist()
    with closing(LlamaCppEngine(path, 512, ONE_THREAD, binding=library(UPSTREAM))) as engine:
        sequence, fresh = engine.open(), engine.open()
        feed(engine, sequence, tokens[:40])
        for token in tokens[40:44]:
            engine.step([(sequence, Block([token], 1))])
            sequence.commit(1)
        fork = sequence.fork(44)
        assert fork.length == shared
        feed(engine, fresh, tokens[:44])
        feed(engine, fork, tokens[shared:44])
        block = Block(tokens[44:50], 6)
        logits = [engine.step([(each, block)]).logits[0].copy() for each in (fork, fresh)]
    assert np.array_equal(*logits)


def test_a_rejected_file_is_reported_with_the_librarys_own_message(
    tmp_path: Path, binding: Binding
):
    path = write_tiny(tmp_path / "m.gguf", fields={"llama.embedding_length": 96})
    with raises(ModelError, "m.gguf"):
        LlamaCppEngine(path, 512, binding=binding)


def test_a_cache_larger_than_memory_is_rejected_with_a_size_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, binding: Binding
):
    path = write_tiny(tmp_path / "m.gguf", sizes={**SIZES, "context": CONTEXT})
    settings = EngineSettings(cache_tokens=4 * CONTEXT, threads=1)
    slot = 2 * 2 * 2 * 2 * 16  # layers, keys and values, bytes, heads of 16
    memory = path.stat().st_size + 3000 * slot
    monkeypatch.setattr("paceline.engines.llamacpp.engine.memory_bytes", lambda: memory)
    with raises(ModelError, "--cache-tokens"):
        LlamaCppEngine(path, CONTEXT, settings, binding=binding)


def test_nonexistent_hidden_state_layers_are_rejected(tmp_path: Path):
    with raises(InvalidRequest, "hidden states after layer 2", "has 2 layers"):
        LlamaCppEngine(write_tiny(tmp_path / "t.gguf"), 512, EngineSettings(taps=(0, 2)))


def test_measured_rules_are_saved_and_the_file_is_not_reread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_tiny(tmp_path / "m.gguf")
    settings = EngineSettings(measurements=tmp_path / "measurements", threads=1)
    with closing(LlamaCppEngine(path, 512, settings)) as engine:
        measured = engine.rules
    monkeypatch.setattr(libraries, "read_gguf", None)
    monkeypatch.setattr("paceline.engines.llamacpp.engine.read_gguf", None)
    (file,) = (tmp_path / "measurements").glob("*.rows")
    stored = json.loads(file.read_text())
    file.write_text(json.dumps({**stored, "decode": [2, 7]}))
    with closing(LlamaCppEngine(path, 512, settings)) as engine:
        assert engine.rules == measured._replace(decode=RowRange(2, 7))


def test_the_library_prints_nothing(tmp_path: Path, binding: Binding):
    path = write_tiny(tmp_path / "m.gguf")
    script = (
        "import sys; from pathlib import Path;"
        "from paceline.engines.llamacpp.engine import LlamaCppEngine;"
        "from paceline.engines.base import EngineSettings;"
        "LlamaCppEngine(Path(sys.argv[1]), 512, EngineSettings(threads=1)).close()"
    )
    finished = python("-c", script, path, env={libraries.VARIABLE: binding.name})
    assert (finished.stdout, finished.stderr) == ("", "")


def test_a_single_row_is_padded_in_prefill_and_if_its_keys_would_be_split(tmp_path: Path):
    sizes = {**SIZES, "d": 576, "heads": 9, "kv_heads": 3, "context": CONTEXT}
    path = write_tiny(tmp_path / "m.gguf", sizes=sizes)
    tokens = np.random.default_rng(4).integers(3, 250, 300).tolist()
    rules = RowRules(RowRange(2, 16), RowRange(40, 256), single=True)
    sizes_seen = []
    settings = EngineSettings(threads=1)
    engine = LlamaCppEngine(path, 512, settings, binding=library(IK), rules=rules)
    with closing(engine):
        sequence = engine.open()
        place = sequence.place(256)
        decode = place.decode
        place.decode = lambda padded, outputs: (  # type: ignore[method-assign]
            sizes_seen.append(len(padded)) or decode(padded, outputs)
        )
        for count, prefill in ((63, True), (1, True), (1, False), (205, True), (1, False)):
            chunk = tokens[sequence.length :][:count]
            engine.step([(sequence, Block(chunk, 1, prefill=prefill))])
            sequence.commit(count)
    # After 270 keys the library would divide those of a single row.
    assert sizes_seen == [63, 40, 1, 205, 2]


def test_a_short_fork_of_a_long_prompt_is_a_short_sequence(binding: Binding, tmp_path: Path):
    """The state is that of the whole prompt, which needs a larger context than the fork has."""
    path = write_tiny(tmp_path / "m.gguf", sizes={**SIZES, "context": CONTEXT})
    text = np.random.default_rng(5).integers(3, 250, 1300).tolist()
    engine = LlamaCppEngine(path, CONTEXT, ONE_THREAD, binding=binding, rules=UNPADDED)
    with closing(engine), closing(engine.open()) as prompt:
        feed(engine, prompt, text[:1280])
        forks = [prompt.fork(60), prompt.fork(60)]
        forks.append(forks[0].fork(60))  # of a sequence that waits
        assert [fork.length for fork in forks] == [60, 60, 60]
        expected = run(engine, text, 60, [8])
        for fork in forks:
            (rows,) = engine.step([(fork, Block(text[60:68], 8))]).logits
            assert rows.tobytes() == expected.tobytes()
        (rows,) = engine.step([(prompt, Block(text[1280:1288], 8))]).logits
        assert rows.tobytes() == run(engine, text, 1280, [8]).tobytes()


def test_unreferenced_models_are_freed(tmp_path: Path):
    """The library has room for about thirty models and contexts, and aborts beyond that."""
    path = write_tiny(tmp_path / "m.gguf")
    opened = library(IK)
    gc.collect()
    before = opened.open
    for _ in range(5):
        for _ in range(8):
            engine = LlamaCppEngine(path, 256, ONE_THREAD, binding=library(IK), rules=UNPADDED)
            engine.step([(engine.open(), Block([1, 2], 1))])
        del engine
        gc.collect()
    assert opened.open == before


def test_more_models_than_the_librarys_limit_are_rejected(tmp_path: Path):
    path = write_tiny(tmp_path / "m.gguf")
    engines: list[LlamaCppEngine] = []
    with raises(ModelError, "open"):
        while True:
            engines.append(
                LlamaCppEngine(path, 256, ONE_THREAD, binding=library(IK), rules=UNPADDED)
            )
    engine = engines[0]
    sequences = [engine.open() for _ in range(3)]
    engines.pop().close()
    rows = engine.step([(sequence, Block([5], 1)) for sequence in sequences]).logits
    assert rows[0].tobytes() == rows[1].tobytes() == rows[2].tobytes()


def test_sequences_beyond_the_librarys_limit_wait(tmp_path: Path):
    engine = LlamaCppEngine(
        write_tiny(tmp_path / "m.gguf"), 256, ONE_THREAD, binding=library(IK), rules=UNPADDED
    )
    with closing(engine):
        sequences = [engine.open() for _ in range(70)]
        for token in (5, 6, 7):
            rows = engine.step([(result, Block([token], 1)) for result in sequences]).logits
            assert {row.tobytes() for row in rows} == {rows[0].tobytes()}
            for sequence in sequences:
                sequence.commit(1)


@pytest.mark.parametrize("call", ["load", "context"])
def test_ctrl_c_during_a_logging_library_call_is_raised_after_it(
    binding: Binding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
):
    path = write_tiny(tmp_path / "m.gguf")
    calls = []
    original = getattr(binding, call)

    def interrupted(*arguments: object) -> int | None:
        signal.raise_signal(signal.SIGINT)  # the library's log would be running
        calls.append(call)
        result: int | None = original(*arguments)
        return result

    gc.collect()
    before = binding.open
    with monkeypatch.context() as patch:
        patch.setattr(binding, call, interrupted)
        with pytest.raises(KeyboardInterrupt):
            NativeModel(binding, path).context(ContextSettings(256, 16, 1))
    assert calls == [call]
    gc.collect()
    assert binding.open == before
    NativeModel(binding, path).close()


def test_library_threads_spin_briefly_whatever_thread_calls(tiny_gguf: Path):
    """Under the default policy a second thread's calls take twice as long; see `_short_spins`."""
    library(IK)
    load = (
        "import sys; from pathlib import Path; "
        "from paceline.engines.llamacpp.engine import LlamaCppEngine; "
        "LlamaCppEngine(Path(sys.argv[1]), 64).close()"
    )
    shown = python("-c", load, tiny_gguf, env={"OMP_DISPLAY_ENV": "verbose"}).stderr
    assert "GOMP_SPINCOUNT = '1000'" in shown
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in shown
