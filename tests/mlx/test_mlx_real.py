"""The default model, converted by mlx-lm. MLX's CPU build takes seconds per sentence."""

import shutil
from pathlib import Path

import pytest

from paceline.decoding.policy import Fixed
from paceline.decoding.stopping import Stopping
from paceline.drafters import create
from paceline.models import DEFAULT_MODEL, QUIET, open_origin
from paceline.models.files import open_checkpoint
from paceline_coreml.conversion.source import checkpoint_from_gguf
from paceline_mlx.engine import MlxEngine
from paceline_mlx.rows import ANY
from support.driver import generation, run

pytestmark = [pytest.mark.mlx, pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(900)]


TOKENS = 8
TEXT = "red, green, blue, red, green, blue, red, green,"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    origin = open_origin(DEFAULT_MODEL, tmp_path, QUIET)
    checkpoint_from_gguf(origin.path, folder)
    shutil.copy(origin.folder / "tokenizer.json", folder / "tokenizer.json")
    return folder


def test_speculation_matches_the_plain_run(checkpoint: Path, tmp_path: Path):
    from mlx_lm.convert import convert

    convert(str(checkpoint), str(tmp_path / "converted"), quantize=True)
    files = open_checkpoint(tmp_path / "converted", DEFAULT_MODEL)
    # Which numbers of rows agree is asked of small models elsewhere: it takes a minute here.
    engine = MlxEngine(files.path, files.context_length, rules=ANY)
    prompt = files.tokenizer.encode(TEXT)
    stopping = Stopping(max_tokens=TOKENS)
    plain, copied = (
        generation(engine, prompt, stopping=stopping, drafters=create(spec), policy=Fixed(6))
        for spec in ("none", "ngram")
    )
    (expected,) = run(engine, [plain])
    assert len(plain.answer) == TOKENS
    assert run(engine, [copied]) == [expected]
    assert copied.counters.accepted > 0
    assert copied.counters.steps < plain.counters.steps == TOKENS - 1
    # It is the right model, as its continuation makes sense.
    assert files.tokenizer.decode(plain.answer).startswith(" blue, red")
