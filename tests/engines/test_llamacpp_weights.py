"""Correct rows: logits of every weight type, compared with the same weights in F32."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from paceline.decoding.types import Block, Logits
from paceline.engines.base import EngineSettings
from paceline.engines.llamacpp import ik, packed, upstream
from paceline.engines.llamacpp.binding import Binding
from paceline.engines.llamacpp.engine import LlamaCppEngine
from paceline.errors import ModelError
from paceline.storage.gguf_file import read_gguf
from support import tiny
from support.divergence import divergence
from support.errors import raises
from support.ggml import quantize
from support.llamacpp import library
from support.packages import missing

pytestmark = pytest.mark.slow

# Inputs of matrices that published models have: SmolLM2 135M and 360M, Gemma 3 270M, Qwen.
WIDTHS = [(576, 1536), (640, 2048), (960, 2560), (1024, 3072), (896, 4864), (256, 9728)]
WIDTHS_OF_256 = [(1024, 3072), (256, 9728)]
"""For types with groups of 256."""
COMPARED = {"ik_llama.cpp": ik.COMPARED, "llama.cpp": upstream.COMPARED}


def cases() -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Each type with two widths; each width with several types of every library."""
    for name, kinds in COMPARED.items():
        for number, kind in enumerate(() if missing(name) else sorted({*kinds} - {"F32"})):
            groups_of_256 = GGML_QUANT_SIZES[Type[kind]][0] == 256
            widths = WIDTHS_OF_256 if groups_of_256 else WIDTHS
            for at in (number, number + 3):
                yield name, kind, widths[at % len(widths)]


def logits(binding: Binding, path: Path, tokens: list[int], copies: Path | None = None) -> Logits:
    """Return rows of a 64-token prompt, and of a response in blocks of 1, 2 and 8.

    With a folder for `copies`, of the packed weights, which must be used.
    """
    settings = EngineSettings(threads=1, packed=copies)
    engine = LlamaCppEngine(path, 256, settings, binding=binding)
    assert ("packed" in engine.describe()["rows"]) is (copies is not None)
    with closing(engine), closing(engine.open()) as sequence:
        rows = [engine.step([(sequence, Block(tokens[:64], 1, prefill=True))]).logits[0].copy()]
        sequence.commit(64)
        for count in (1, 2, 8):
            block = Block(tokens[sequence.length :][:count], count)
            rows.append(engine.step([(sequence, block)]).logits[0].copy())
            sequence.commit(count)
    return np.concatenate(rows)


@pytest.mark.parametrize(("name", "kind", "width"), [*cases()], ids=str)
def test_weights_of_each_type_and_width_match_their_dequantized_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, width: tuple[int, int]
):
    binding = library(name)
    sizes = {
        **tiny.SIZES,
        "d": width[0],
        "heads": width[0] // 64,
        "kv_heads": 1,
        "ff": width[1],
        "layers": 1,
    }
    # gguf-py only reads some types.
    monkeypatch.setattr(tiny, "quantize", partial(quantize, binding))
    stored = tiny.write_tiny(tmp_path / "stored.gguf", weights=Type[kind], sizes=sizes)
    exact = tiny.write_tiny(tmp_path / "exact.gguf", weights=Type[kind], sizes=sizes, exact=True)
    tokens = np.random.default_rng(1).integers(3, 250, 80).tolist()
    expected = logits(binding, exact, tokens)
    assert divergence(expected, logits(binding, stored, tokens)) < 0.02
    if isinstance(binding, ik.IkLlama) and kind in ik.PACKED:
        monkeypatch.setattr(packed, "_MIN_BYTES", 0)
        assert divergence(expected, logits(binding, stored, tokens, tmp_path)) < 0.02


@pytest.mark.parametrize(("name", "kind"), [("ik_llama.cpp", "IQ2_XS"), ("llama.cpp", "TQ1_0")])
def test_an_untested_weight_type_is_rejected_by_name(tmp_path: Path, name: str, kind: str):
    content = read_gguf(tiny.write_tiny(tmp_path / "m.gguf", weights=Type.Q8_0))
    tensor = content.tensors[0]._replace(kind=int(Type[kind]))
    with raises(ModelError, kind):
        library(name).check("m.gguf", replace(content, tensors=[tensor]))
