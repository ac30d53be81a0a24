"""benchmarks/random_gguf.py: files of real shapes are whole, and their weights are sane."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from paceline.models import ModelFiles, resolve
from support.scripts import script

random_gguf: Any = script("random_gguf")
SMALL = random_gguf.Shape(8, 256, 512, 4, 2, 64, 700, 512)


def parameters(shape: Any) -> int:
    return sum(int(np.prod(sizes)) for _, sizes, _ in random_gguf._tensors(shape, "Q4_0"))


def test_the_shapes_are_those_of_the_models():
    # As their authors count them: https://huggingface.co/Qwen
    found = {name: parameters(shape) / 1e9 for name, shape in random_gguf.SHAPES.items()}
    assert {name: round(count, 1) for name, count in found.items()} == {
        "0.6B": 0.6,
        "1.7B": 1.7,
        "4B": 4.0,
        "8B": 7.6,  # 8.2 with the head of its own, which these files do not have
    }


@pytest.mark.parametrize("weights", random_gguf.FILE_TYPES)
def test_weights_have_a_mean_near_zero_and_the_usual_deviation(weights: str, tmp_path: Path):
    path = tmp_path / "random.gguf"
    random_gguf.write_random(path, SMALL, weights)
    kinds = set()
    for tensor in GGUFReader(path).tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) == 1:
            assert (values == 1).all()
            continue
        kinds.add(tensor.tensor_type)
        usual = values.shape[1] ** -0.5
        assert abs(values.mean()) < 0.15 * usual, tensor.name
        assert 0.8 * usual < values.std() < 1.3 * usual, tensor.name
    four = {"Q4_0": GGMLQuantizationType.Q4_0, "Q4_K_M": GGMLQuantizationType.Q4_K}
    six = GGMLQuantizationType.Q6_K
    expected = {four[weights], six} if weights in four else {GGMLQuantizationType[weights]}
    assert kinds == expected


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = tmp_path_factory.mktemp("random")
    random_gguf.write_random(folder / "random.gguf", SMALL, "Q4_0")
    return resolve(str(folder / "random.gguf"), folder / "cache")


def test_its_tokenizer_joins_letters_and_keeps_any_text(files: ModelFiles):
    tokenizer = files.tokenizer()
    for text in ("the model", "Grüße, 世界!", "a b  c\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("is it of us")) < len("is it of us")


def test_the_tokenizer_of_another_file_encodes_as_it_does_there(tmp_path: Path, tiny_gguf: Path):
    path = tmp_path / "random.gguf"
    random_gguf.write_random(path, SMALL, "Q4_0", tokenizer=tiny_gguf)
    files, other = (resolve(str(one), tmp_path / "cache") for one in (path, tiny_gguf))
    text = "this is one and the user"
    assert files.tokenizer().encode(text) == other.tokenizer().encode(text)
    assert files.stop_token_ids == other.stop_token_ids
