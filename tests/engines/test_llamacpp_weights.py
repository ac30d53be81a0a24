"""Right rows: logits of every type of weights, against the same weights as F32."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from paceline.decoding.types import Block, Logits
from paceline.engines.base import EngineSettings
from paceline.engines.llamacpp.engine import LlamaCppEngine
from paceline.engines.llamacpp.weights import COMPARED, most_rows
from paceline.errors import ModelError
from paceline.storage.gguf_file import read_gguf
from support import tiny
from support.ggml import quantize

pytestmark = pytest.mark.slow
pytest.importorskip("ik_llama_cpp")

# Inputs of matrices that published models have: SmolLM2 135M and 360M, Gemma 3 270M, Qwen.
WIDTHS = [(576, 1536), (640, 2048), (960, 2560), (1024, 3072), (896, 4864), (256, 9728)]
K_TYPES = 256


def logits(path: Path, tokens: list[int]) -> Logits:
    """Rows of a prompt of 64 tokens, and of an answer in blocks of 1, 2 and 8."""
    engine = LlamaCppEngine(path, 256, EngineSettings(threads=1))
    with closing(engine), closing(engine.open()) as sequence:
        rows = [engine.step([(sequence, Block(tokens[:64], 1, prefill=True))]).logits[0].copy()]
        sequence.commit(64)
        for count in (1, 2, 8):
            block = Block(tokens[sequence.length :][:count], count)
            rows.append(engine.step([(sequence, block)]).logits[0].copy())
            sequence.commit(count)
    return np.concatenate(rows)


def divergence(expected: Logits, computed: Logits) -> float:
    """Largest KL divergence of a row's distribution from the expected one."""
    first, second = (
        rows
        - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True))
        - rows.max(1, keepdims=True)
        for rows in (expected.astype(np.float64), computed.astype(np.float64))
    )
    return float((np.exp(first) * (first - second)).sum(1).max())


@pytest.mark.parametrize("kind", [kind for kind in COMPARED if kind != "F32"])
@pytest.mark.parametrize(("width", "inner"), WIDTHS)
def test_weights_of_each_type_and_width_give_the_logits_of_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, width: int, inner: int
):
    if kind.endswith("_K") and (width % K_TYPES or inner % K_TYPES):
        pytest.skip("K types have groups of 256")
    sizes = {
        **tiny.SIZES,
        "d": width,
        "heads": width // 64,
        "kv_heads": 1,
        "ff": inner,
        "layers": 1,
    }
    monkeypatch.setattr(tiny, "quantize", quantize)  # gguf-py only reads some types
    stored = tiny.write_tiny(tmp_path / "stored.gguf", weights=Type[kind], sizes=sizes)
    exact = tiny.write_tiny(tmp_path / "exact.gguf", weights=Type[kind], sizes=sizes, exact=True)
    tokens = np.random.default_rng(1).integers(3, 250, 80).tolist()
    assert divergence(logits(exact, tokens), logits(stored, tokens)) < 0.02


def test_a_type_that_was_not_compared_is_refused_by_name(tmp_path: Path):
    path = tiny.write_tiny(tmp_path / "m.gguf", weights=Type.Q8_0)
    tensor = read_gguf(path).tensors[0]._replace(kind=int(Type.IQ1_S))
    with pytest.raises(ModelError, match="IQ1_S"):
        most_rows("m.gguf", [tensor])
