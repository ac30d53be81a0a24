"""Families of GGUF files in the libraries of the engine llamacpp: ik_llama.cpp as llama.cpp.

Each is a tiny random checkpoint, converted to a GGUF file of F16 weights. Which one a library does
not compute right, it must refuse: some would end the process.
"""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from paceline.decoding.types import Logits
from paceline.engines import EngineSettings
from paceline.engines.invariance import CONDITIONS, measure_invariance
from paceline.engines.llamacpp.engine import LlamaCppEngine
from paceline.errors import ModelError
from support.divergence import divergences
from support.engine_rows import run
from support.errors import raises
from support.llamacpp import library
from support.tiny_checkpoints import FORMS, write_gguf_of

pytestmark = pytest.mark.slow

CONTEXT = 512
WINDOW = 128
"""The least that ik_llama.cpp computes; those of the forms are of 16 tokens."""
TOKENS = 300
IGNORED = {"mistral", "exaone4-window"}
"""Forms with a window that both libraries ignore."""
ABORTS = {"gemma4_text"}
"""Forms without a layer that others would share keys with, which ends the process."""
REFERENCE = "llama.cpp"
AS_WIDE = {"exaone4", "exaone4-window", "llama3", "qwen2"}
"""Forms of families that the libraries take to be as wide as all heads together."""
WRONG = {
    "ik_llama.cpp": {
        *("exaone4", "gemma2", "gemma4_text-k-is-v", "hunyuan_v1_dense", "llama3", "minicpm"),
        *("ministral3", "olmoe", "phi3-longrope"),  # the last has no output matrix of its own
        *("lfm2", "lfm2_moe", "qwen3_5_moe_text", "qwen3_5_text"),  # recurrent layers
    },
    "llama.cpp": set[str](),
}
"""Forms that a library does not know, does not compute right, or ends the process with."""
CASES = [(name, form) for name in WRONG for form in sorted(FORMS.keys() - ABORTS)]


def gguf_of(name: str, form: str, path: Path) -> Path:
    """The form with a window that the library computes, and as wide as its heads are."""
    sizes = FORMS[form]
    changes = {}
    if sizes.get("sliding_window") and name == "ik_llama.cpp":
        changes["sliding_window"] = WINDOW
    if form in AS_WIDE:
        changes["hidden_size"] = sizes["num_attention_heads"] * sizes["head_dim"]
    return write_gguf_of(form, path, **changes)


def text_logits(engine: LlamaCppEngine) -> Logits:
    """[TOKENS, vocab]: a text as a prompt."""
    text = np.random.default_rng(3).integers(3, 250, TOKENS).tolist()
    with closing(engine.open()) as sequence:
        (rows,) = run(engine, prompts=[(sequence, text, TOKENS)])
    return rows


def check_forks(engine: LlamaCppEngine) -> None:
    """Sequences that go on from a part of a long prompt are those that read this part alone."""
    text = np.random.default_rng(4).integers(3, 250, TOKENS).tolist()
    with closing(engine.open()) as whole:
        run(engine, prompts=[(whole, text, 1)])
        whole.commit(TOKENS)
        for length in (256, 140):
            with closing(whole.fork(length)) as fork, closing(engine.open()) as fresh:
                assert fork.length == whole.fork_length(length)
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
def test_a_family_is_right_and_exact_or_is_refused(name: str, form: str, tmp_path: Path):
    binding = library(name)
    path = gguf_of(name, form, tmp_path / "m.gguf")
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
    if name == REFERENCE:
        return
    with closing(LlamaCppEngine(path, CONTEXT, settings, binding=library(REFERENCE))) as reference:
        far = divergences(text_logits(reference), rows)
    # 16-bit keys and values decide a near tie of two experts: one row of 120 in a mixture.
    assert np.quantile(far, 0.97) < 0.02
    assert np.median(far) < 0.002


def test_a_window_of_which_ik_llama_cpp_would_end_the_process_is_refused(tmp_path: Path):
    path = write_gguf_of("gemma3_text", tmp_path / "m.gguf", sliding_window=WINDOW - 1)
    with raises(ModelError, "127"):
        LlamaCppEngine(path, CONTEXT, binding=library("ik_llama.cpp"))
