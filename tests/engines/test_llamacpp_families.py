"""Families of GGUF files in the libraries of the engine llamacpp: correct or rejected.

Each is a tiny random model. `tests/data/tiny_families.npz` has rows of logits of OpenVINO 2026.4 in
November 2026, whose graphs of GGUF files agreed with transformers on all of these families; those
of GLM-4 are of transformers itself. What a library does not compute right, it must refuse: some
families would end the process.
"""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from paceline.decoding.types import Logits
from paceline.engines import EngineSettings
from paceline.engines.exact import CONDITIONS, measure_invariance
from paceline.engines.llamacpp.engine import LlamaCppEngine
from paceline.errors import ModelError
from support.divergence import divergences
from support.engine_rows import run
from support.errors import raises
from support.families import architecture_of, forms, write_gguf_of
from support.llamacpp import library

pytestmark = pytest.mark.slow

CONTEXT = 512
WINDOW = 128
"""The least that ik_llama.cpp computes; those of the forms are of 16 tokens."""
TOKENS = 300
IGNORED = {"mistral", "exaone4-window"}
"""Forms with a window that both libraries ignore."""
ABORTS = {"gemma4_text"}
"""Forms without a layer that others would share keys with, which ends the process."""
NOT_RECORDED = {"gemma2"}
RECORDED = Path(__file__).parents[1] / "data" / "tiny_families.npz"
ROWS = range(24, TOKENS, 25)
WRONG = {
    "ik_llama.cpp": {
        *("exaone4", "gemma2", "gemma4_text-k-is-v", "hunyuan_v1_dense", "llama3", "minicpm"),
        *("ministral3", "olmoe", "phi3-longrope"),  # the last has no output matrix of its own
        *("lfm2", "lfm2_moe", "qwen3_5_moe_text", "qwen3_5_text"),  # recurrent layers
        *("qwen3_5_text-mtp", "qwen3_5_text-small"),
    },
    "llama.cpp": {"qwen3_5_text-small"},  # more sections of positions than numbers in a head
}
"""Forms that a library does not know, does not compute right, or ends the process with."""
CASES = [(name, form) for name in WRONG for form in sorted(forms().keys() - ABORTS)]


def window_of(name: str, form: str) -> dict[str, int]:
    """The field of a window that the library computes; empty: the form's own, or none."""
    field = f"{architecture_of(form)}.attention.sliding_window"
    has_window = name == "ik_llama.cpp" and forms()[form]["fields"].get(field)
    return {field: WINDOW} if has_window else {}


def text_logits(engine: LlamaCppEngine) -> Logits:
    text = np.random.default_rng(3).integers(3, 250, TOKENS).tolist()
    with closing(engine.open()) as sequence:
        (rows,) = run(engine, prompts=[(sequence, text, TOKENS)])
    return rows


def check_forks(engine: LlamaCppEngine) -> None:
    """Forks and restored states continue a part of a prompt like a sequence that read only that."""
    text = np.random.default_rng(4).integers(3, 250, TOKENS).tolist()
    with closing(engine.open()) as whole:
        run(engine, prompts=[(whole, text, 1)])
        whole.commit(TOKENS)
        if engine.can_export_kv:
            state = engine.state_of(whole)
        for length in (256, 200, 140):
            with closing(whole.fork(length)) as fork, closing(engine.open()) as fresh:
                assert fork.length == whole.fork_length(length)
                if engine.can_export_kv and length == 140:  # a state that is put back is as a fork
                    fork.close()
                    engine.restore(fork, state, length)
                    assert fork.length == fork.shareable_length == length
                for item in (fork, fresh):  # with recurrent layers, a fork may be shorter
                    rest = text[item.length : length]
                    if rest:
                        run(engine, prompts=[(item, rest, 1)])
                        item.commit(len(rest))
                for rows in (1, 3):
                    block = text[length : length + rows]
                    first, second = run(engine, (fork, block, rows), (fresh, block, rows))
                    assert first.tobytes() == second.tobytes(), f"after {length} tokens"


@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_family_is_correct_and_exact_or_rejected(name: str, form: str, tmp_path: Path):
    binding = library(name)
    window = window_of(name, form)
    path = write_gguf_of(form, tmp_path / "m.gguf", fields=window)
    settings = EngineSettings(cache_tokens=3 * CONTEXT, threads=1)
    if form in WRONG[name] | IGNORED:
        with raises(ModelError, name):
            LlamaCppEngine(path, CONTEXT, settings, binding=binding)
        return
    with closing(LlamaCppEngine(path, CONTEXT, settings, binding=binding)) as engine:
        rows = text_logits(engine)
        check_forks(engine)
        conditions = measure_invariance(engine)
    assert {key: compared.differing for key, compared in conditions.items()} == dict.fromkeys(
        CONDITIONS, 0
    )
    if form not in NOT_RECORDED:
        check_recorded(f"{form}-{WINDOW}" if window else form, rows)


def check_recorded(name: str, rows: Logits) -> None:
    far = divergences(np.load(RECORDED)[name].astype(np.float32), rows[list(ROWS)])
    # 16-bit keys and values decide a near tie of two experts: a row in a hundred of a mixture.
    assert np.sort(far)[-2] < 0.02
    assert np.median(far) < 0.003


@pytest.mark.parametrize("name", ["ik_llama.cpp", "llama.cpp"])
def test_longrope_uses_short_factors_up_to_the_original_context(name: str, tmp_path: Path):
    fields = {"phi3.rope.scaling.original_context_length": CONTEXT}
    path = write_gguf_of("phi3-longrope-untied", tmp_path / "m.gguf", fields=fields)
    settings = EngineSettings(threads=1)
    with closing(LlamaCppEngine(path, CONTEXT, settings, binding=library(name))) as engine:
        check_recorded("phi3-longrope-untied-short", text_logits(engine))


def test_a_window_that_crashes_ik_llama_cpp_is_rejected(tmp_path: Path):
    fields = {"gemma3.attention.sliding_window": WINDOW - 1}
    path = write_gguf_of("gemma3_text", tmp_path / "m.gguf", fields=fields)
    with raises(ModelError, "127"):
        LlamaCppEngine(path, CONTEXT, binding=library("ik_llama.cpp"))
