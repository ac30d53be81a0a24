"""DFlash in half precision, and quantized; the head of some tokens."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import ModelError
from paceline_mlx.heads.dflash.network import Network
from support import mlx
from support.dflash import ENDS, write_checkpoint
from support.errors import raises
from support.networks import MakeCase, MlxEnds, assert_close, assert_same, prefilled

pytestmark = pytest.mark.mlx


FIRST_TOKENS = range(0, 320, 53)


@pytest.mark.parametrize("kind", ["BF16", "F16"])
@pytest.mark.parametrize("target", ["float32", "bfloat16"])
def test_half_precision_weights_are_kept(make_case: MakeCase, kind: str, target: str):
    import mlx.core as mx

    case = make_case(kind=kind)
    network = Network(case.folder, MlxEnds(ENDS, target))
    rows = case.tapped(100)
    context = network.new_cache()
    tapped = network.tapped({"tap.0": rows[:, :64], "tap.1": rows[:, 64:]}, 100)
    network.prefill(context, tapped, 0)
    nothing = network.concat([])
    drafts = [network.draft(context, token, 100, nothing, 100) for token in FIRST_TOKENS]
    assert_close(drafts, [case.expected(rows, token) for token in FIRST_TOKENS])
    expected_kind = mx.bfloat16 if kind == "BF16" else mx.float16
    assert {cache.keys.dtype for cache in context.kv.caches} == {expected_kind}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width", [192, 96, 72], ids=["groups of 64", "of 32", "not all"])
def test_quantized_weights_equal_the_dequantized(make_case: MakeCase, bits: int, width: int):
    case = make_case({"intermediate_size": width})
    rows, small = case.tapped(100), case.opened(bits=bits)
    drafts = [prefilled(small, rows, token) for token in FIRST_TOKENS]
    whole = [prefilled(case.network, rows, token) for token in FIRST_TOKENS]
    rounded = {name: dequantized(weight, bits) for name, weight in case.weights.items()}
    few = replace(case, weights=rounded)
    assert_same(drafts, [few.expected(rows, token) for token in FIRST_TOKENS])
    assert not np.allclose([item[1] for item in whole], [item[1] for item in drafts])


def dequantized(weight: np.ndarray, bits: int) -> np.ndarray:
    """A matrix quantized to `bits` in groups of 64 or 32 columns, and back."""
    import mlx.core as mx

    size = next((size for size in (64, 32) if weight.shape[-1] % size == 0), None)
    if weight.ndim == 1 or size is None:
        return weight
    parts = mx.quantize(mx.array(weight), group_size=size, bits=bits)
    return np.array(mx.dequantize(*parts, group_size=size, bits=bits))


def test_weights_of_another_dtype_are_rejected(make_case: MakeCase, tmp_path: Path):
    import mlx.core as mx

    case = make_case()
    write_checkpoint(tmp_path, case.config)
    path = tmp_path / "model.safetensors"
    weights = dict(mx.load(str(path)))
    mx.save_safetensors(str(path), {**weights, "fc.weight": mx.zeros((64, 128), mx.int32)})
    with raises(ModelError, "fc.weight", "I32"):
        Network(tmp_path, MlxEnds())


@pytest.mark.parametrize("family", ["phi3", "llama", "lfm2"])
@pytest.mark.parametrize("bits", [None, 8, 4], ids=str)
def test_the_head_of_some_tokens_has_their_logits(family: str, bits: int | None, tmp_path: Path):
    import mlx.core as mx

    from paceline_mlx.model import LoadedModel, load

    folder = mlx.checkpoint(tmp_path / "made", family, num_hidden_layers=2)
    if bits is not None:
        folder = mlx.quantized(folder, tmp_path / "small", bits=bits)
    model = LoadedModel(load(folder))
    hidden = mx.random.normal((5, 64))
    tokens = mx.array([3, 77, 159])
    logits = model.head_of(tokens)(hidden)
    assert mx.allclose(logits, model.head(hidden)[:, tokens], rtol=1e-5, atol=1e-5)
    assert model.head(hidden).shape == (5, mlx.VOCAB)  # the head itself is unchanged
