"""Prompts run in wide calls, answers and drafts in calls of at most 8 rows: each role is exact."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.types import Block, tap_name
from paceline.engines import EngineSettings
from paceline.engines.kv_blocks import BlockTable
from paceline_coreml.engine.artifact import read_artifact
from paceline_coreml.engine.engine import CoreMlEngine
from paceline_coreml.rehearsal.program import read_package
from support.coreml import tiny_artifact
from support.coreml_checkpoints import MODELS, VOCAB, convert_tiny, tiny_checkpoint

pytestmark = pytest.mark.coreml

TEXT = [(7 * i + i * i) % VOCAB for i in range(100)]
PROMPT, ANSWER = TEXT[:83], TEXT[83:]
TAPS = (0, 1)
"""Layers; the second is the last one of LFM2 and ZAYA."""


def of_two_roles(folder: Path, model: str) -> Path:
    """An artifact with calls of 8 rows and of 64: Llama's in two functions, others' in one.

    Functions take thrice as long to convert.
    """
    checkpoint = tiny_checkpoint(folder / "checkpoint", model)
    layers = str(MODELS[model]["num_hidden_layers"])
    sizes: dict[str, Any] = {"slots": 192, "topology": layers, "head_rows": VOCAB}
    calls: dict[str, Any] = {"functions": (8, 64)} if model == "llama" else {"rows": 64}
    return convert_tiny(checkpoint, folder / "artifact", weights="f16", **sizes, **calls)


@pytest.fixture(scope="module", params=["llama", "zaya"])
def engine(request: pytest.FixtureRequest, core_ml: Callable[..., Path]) -> CoreMlEngine:
    folder = core_ml(of_two_roles, model=request.param)
    return CoreMlEngine(folder, EngineSettings(taps=TAPS))


@pytest.fixture(scope="module")
def llama(core_ml: Callable[..., Path]) -> Path:
    return core_ml(of_two_roles, model="llama")


@contextmanager
def other_shapes(engine: CoreMlEngine) -> Iterator[list[int]]:
    """Calls of 64 rows compute a little otherwise, as another program may. Rows of the calls."""
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for package in {bucket.packages.layers[0] for bucket in (*engine._decode, *engine._prompt)}:

            def watched(data: Any, state: Any = None, predict: Any = package.predict) -> Any:
                calls.append(data["hidden"].shape[2])
                hidden = data["hidden"] * np.float32(1 if calls[-1] < 64 else 1.01)
                return predict({**data, "hidden": hidden}, state)

            patch.setattr(package, "predict", watched)
        yield calls


def answer_rows(
    engine: CoreMlEngine, prompt: Sequence[int], blocks: Sequence[tuple[int, int]]
) -> bytes:
    """The prompt's last row, and rows of the answer in blocks of (accepted, rejected) tokens.

    And the hidden states of all.
    """
    with closing(engine.open()) as sequence:
        # In two chunks, as a scheduler cuts a prompt.
        logits, taps = [], []
        for chunk, rows in ((PROMPT[: len(prompt)], 0), (PROMPT[len(prompt) :], 1)):
            if chunk:
                step = engine.step([(sequence, Block(chunk, rows, prefill=True))])
                sequence.commit(len(chunk))
                logits.append(step.logits[0].copy())
                taps.append([step.taps[0][tap_name(tap)] for tap in TAPS])
        at = 0
        for kept, rejected in blocks:
            wrong = [(token + 1) % VOCAB for token in TEXT[:rejected]]
            tokens = [*ANSWER[at : at + kept], *wrong]
            step = engine.step([(sequence, Block(tokens, len(tokens)))])
            sequence.commit(kept)
            logits.append(step.logits[0][:kept].copy())
            taps.append([step.taps[0][tap_name(tap)][:kept] for tap in TAPS])
            at += kept
        assert at == len(ANSWER)
        hidden = np.concatenate(taps, axis=1)
        assert hidden.shape[:2] == (len(TAPS), len(TEXT))
        return np.concatenate(logits).tobytes() + hidden.tobytes()


def test_prefill_uses_the_wide_function_and_decode_the_narrow_one(engine: CoreMlEngine):
    with other_shapes(engine) as calls:
        answer_rows(engine, [], [(1, 0), (4, 3), (12, 0)])
    assert calls == [64, 64, 8, 8, 8, 8]
    about = engine.describe()
    assert (about["rows"], about["prompt_rows"]) == ("8", "64")


def test_draft_rows_match_plain_decoding(engine: CoreMlEngine):
    alike = answer_rows(engine, [], [(1, 0)] * len(ANSWER))
    with other_shapes(engine):
        plain = answer_rows(engine, [], [(1, 0)] * len(ANSWER))
        assert plain != alike
        assert answer_rows(engine, PROMPT[:31], [(1, 0)] * len(ANSWER)) == plain
        assert answer_rows(engine, PROMPT[:64], [(3, 4), (1, 7), (8, 0), (5, 20)]) == plain


def test_only_prompt_kv_is_shared(llama: Path, core_ml: Callable[..., Path]):
    """What calls of another shape wrote may have other bits on a Neural Engine."""
    one_role = core_ml(tiny_artifact, taps=(0, 2))
    for folder, shared in ((llama, len(PROMPT)), (one_role, len(TEXT))):
        engine = CoreMlEngine(folder)
        with closing(engine.open()) as sequence:
            for tokens, prefill in ((PROMPT, True), (ANSWER, False)):
                engine.step([(sequence, Block(tokens, 0, prefill=prefill))])
                sequence.commit(len(tokens))
            assert isinstance(sequence, BlockTable)
            assert sequence.shareable_length == shared


def test_a_package_has_only_the_requested_functions(llama: Path):
    artifact = read_artifact(llama)
    assert (artifact.rows, artifact.decode_rows, artifact.functions) == (64, 8, (8, 64))
    for shard in (*artifact.layer_shards, *artifact.head_shards):
        package = read_package(llama / shard.path)
        assert {*package.functions} == {"t8", "t64"}
        assert all(feature.is_static for feature in package.function().inputs)
