"""Checkpoints that mlx-lm quantized: their weights, and artifacts made from them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import ModelError
from paceline.models import QUIET
from paceline.storage.files import read_json, write_json
from paceline_coreml.conversion.checkpoint import FolderTensors
from paceline_coreml.conversion.families import open_family
from paceline_coreml.conversion.mlx_format import Stored, dequantize, packing_of
from paceline_coreml.golden import report
from support import mlx
from support.coreml_checkpoints import convert_tiny

pytestmark = [pytest.mark.coreml, pytest.mark.mlx]
mx: Any = pytest.importorskip("mlx.core")

AFFINE = [("affine", bits, group) for bits in (1, 2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FORMATS = [*AFFINE, ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
KINDS = {"uint32": "U32", "uint8": "U8", "float16": "F16", "bfloat16": "BF16", "float32": "F32"}


def in_torch(array: Any) -> torch.Tensor:
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.uint16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def stored(array: Any) -> Stored:
    return Stored(KINDS[str(array.dtype).rpartition(".")[2]], tuple(array.shape))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS)
def test_dequantized_weights_have_the_bits_of_mlx(mode: str, bits: int, group: int, dtype: str):
    rng = np.random.default_rng(bits)
    for columns in (128, 384):
        # From subnormal float16 to large numbers, whose differences overflow.
        sizes = 10.0 ** rng.integers(-6, 4, (37, 1))
        weights = mx.array(rng.normal(size=(37, columns)) * sizes).astype(getattr(mx, dtype))
        parts = mx.quantize(weights, group, bits, mode=mode)
        biases = stored(parts[2]) if parts[2:] else None
        packing = packing_of((37, columns), stored(parts[0]), stored(parts[1]), biases)
        assert packing == (bits, group)
        words, scales, added = [*map(in_torch, parts), None][:3]
        expected = mx.dequantize(*parts, group_size=group, bits=bits, mode=mode)
        found = dequantize(words, scales, added, packing)
        np.testing.assert_array_equal(found, np.array(expected.astype(mx.float32)))


def dequantized(folder: Path) -> Mapping[str, Any]:
    """Return the weights in mlx-lm, dequantized by MLX."""
    from mlx.utils import tree_flatten
    from mlx_lm.utils import dequantize_model, load_model

    model, _ = load_model(folder)
    return dict(tree_flatten(dequantize_model(model).parameters()))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"bits": 4}),
        ("llama", {"bits": 3, "recipe": "mixed_3_6"}),
        ("qwen3", {"bits": 8}),
        ("qwen3", {"bits": 4, "mode": "mxfp4"}),
        ("qwen3", {"bits": 4, "mode": "nvfp4", "group_size": 16}),
        ("lfm2", {"bits": 6}),
    ],
)
def test_weights_of_a_quantized_folder_are_those_of_mlx_lm(
    family: str, options: dict[str, Any], tmp_path: Path
):
    checkpoint = mlx.checkpoint(tmp_path / "checkpoint", family, dtype="bfloat16")
    folder = mlx.quantized(checkpoint, tmp_path / "quantized", **options)
    weights = open_family(folder, slots=64, conv_slots=64)._weights
    expected = dequantized(folder)
    assert isinstance(weights, FolderTensors)
    assert weights.quantized
    for name, weight in expected.items():
        # MLX stores the taps of a convolution before its input channels.
        array = np.array((weight.swapaxes(1, 2) if weight.ndim == 3 else weight).astype(mx.float32))
        np.testing.assert_array_equal(weights[name], array, name)


DAMAGE: dict[str, tuple[Any, str]] = {
    "words of another width": (
        lambda weights, name: weights | {f"{name}.weight": weights[f"{name}.weight"][:, 1:]},
        r"as \[96, 7\] U32 with scales \[96, 2\] F32; expected \[96, 64\] floats",
    ),
    "no scales": (
        lambda weights, name: {key: weights[key] for key in weights if key != f"{name}.scales"},
        r"as \[96, 8\] U32; expected",
    ),
    "scales of another type": (
        lambda weights, name: weights | {f"{name}.scales": weights[f"{name}.scales"].byte()},
        r"as \[96, 8\] U32 with scales \[96, 2\] U8; expected",
    ),
    "a factor of the whole matrix": (
        lambda weights, name: weights | {f"{name}.global_scale": torch.ones(1)},
        r"as \[96, 8\] U32 with scales \[96, 2\] F32 and a global_scale; expected",
    ),
    "another library's integers": (
        lambda weights, name: (
            weights | {f"{name}.weight": weights[f"{name}.weight"].view(torch.int32)}
        ),
        r"as \[96, 8\] I32 .*not weights quantized with 'gptq'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_format_that_cannot_be_read_is_named_with_the_tensor(damage: str, tmp_path: Path):
    folder = mlx.quantized(mlx.checkpoint(tmp_path / "c", "llama"), tmp_path / "quantized")
    change, message = DAMAGE[damage]
    name, path = "model.layers.1.mlp.up_proj", folder / "model.safetensors"
    save_file({key: w.contiguous() for key, w in change(load_file(path), name).items()}, path)
    if "gptq" in message:
        config = {
            **read_json(folder / "config.json"),
            "quantization_config": {"quant_method": "gptq"},
        }
        write_json(folder / "config.json", config)
    with pytest.raises(ModelError, match=rf"has {name}\.weight {message}"):
        open_family(folder, slots=64, conv_slots=64)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "bits"), [("llama", 4), ("lfm2", 0)])
def test_a_folder_of_mlx_lm_becomes_an_artifact_that_equals_its_network(
    family: str, bits: int, tmp_path: Path
):
    checkpoint = mlx.checkpoint(tmp_path / "checkpoint", family)
    folder = mlx.quantized(checkpoint, tmp_path / "in mlx", bits=bits)
    artifact = convert_tiny(folder, tmp_path / "artifact", weights="f16")
    checked = report(artifact, folder, progress=QUIET)
    assert checked.passed, checked.text
    assert report(artifact, checkpoint, progress=QUIET).passed is not bool(bits)
