"""The default model itself, as mlx-lm converts it. MLX's CPU build takes seconds for a sentence."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.decoding.policy import Fixed
from paceline.decoding.stopping import Stopping
from paceline.drafters import DrafterResources, create, taps
from paceline.engines import EngineSettings
from paceline.models import DEFAULT_MODEL, QUIET, open_origin
from paceline.models.files import open_checkpoint
from paceline_coreml.conversion.source import checkpoint_from_gguf
from paceline_mlx.engine import MlxEngine
from paceline_mlx.heads.dflash.checkpoint import Config
from paceline_mlx.rows import ANY
from support.dflash import write_checkpoint
from support.driver import generation, run

pytestmark = [pytest.mark.mlx, pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(900)]

NETWORK = Config(
    hidden_size=576,
    intermediate_size=192,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=49152,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
    block_size=8,
    num_target_layers=30,
    taps=(1, 14, 27),
    mask_token_id=16,
    windows=(None,),
)
"""A drafter that fits the default model."""

TOKENS = 8
TEXT = "red, green, blue, red, green, blue, red, green,"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Hugging Face form of the GGUF file."""
    folder = tmp_path_factory.mktemp("real")
    origin = open_origin(DEFAULT_MODEL, folder, QUIET)
    checkpoint_from_gguf(origin.path, folder / "checkpoint")
    shutil.copy(origin.folder / "tokenizer.json", folder / "checkpoint" / "tokenizer.json")
    return folder / "checkpoint"


@pytest.mark.parametrize("weights", [{"dtype": "bfloat16"}, {"quantize": True}], ids=["16", "4"])
def test_speculation_gives_the_tokens_of_the_plain_run(
    weights: dict[str, Any], checkpoint: Path, tmp_path: Path
):
    from mlx_lm.convert import convert

    convert(str(checkpoint), str(tmp_path / "converted"), **weights)
    files = open_checkpoint(tmp_path / "converted", DEFAULT_MODEL)
    # Its drafts are random: what is tested are the hidden states that it reads, and rejections.
    network = f"dflash:{tmp_path / 'network'}"
    write_checkpoint(tmp_path / "network", NETWORK)
    needed = taps(network, DrafterResources(engine="mlx"))
    # Which numbers of rows agree is asked of small models elsewhere: it takes a minute here.
    settings = EngineSettings(taps=needed)
    engine = MlxEngine(files.path, files.context_length, settings, rules=ANY)
    shared = DrafterResources(engine="mlx", opened=engine)
    prompt = files.tokenizer().encode(TEXT)
    stopping = Stopping(max_tokens=TOKENS)
    plain, copied, guessed = (
        generation(
            engine, prompt, stopping=stopping, drafters=create(spec, shared), policy=Fixed(6)
        )
        for spec in ("none", "ngram", network)
    )
    (expected,) = run(engine, [plain])
    assert len(plain.answer) == TOKENS
    assert run(engine, [copied]) == run(engine, [guessed]) == [expected]
    assert copied.counters.accepted > 0
    assert copied.counters.steps < plain.counters.steps == TOKENS - 1
    assert guessed.counters.drafted > 0
    # It is that model, and goes on as a model does that can read.
    assert files.tokenizer().decode(plain.answer).startswith(" blue, red")
