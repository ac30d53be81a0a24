"""Hidden states, embeddings and head of the mlx engine's model, for drafters."""

import gc
import importlib
import weakref
from contextlib import closing

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.errors import InvalidRequest
from support import mlx
from support.errors import raises
from support.mlx_rows import TEXT, step

pytestmark = pytest.mark.mlx


@pytest.mark.parametrize("family", mlx.FAMILIES)
def test_taps_are_the_hidden_states_of_transformers(
    family: str, opened: mlx.Opened, checkpoint_of: mlx.Checkpoints
):
    expected = mlx.reference_taps(checkpoint_of(family), family, TEXT)[0]
    engine = opened(family, taps=(0,), rules=mlx.rules(2, 8, prefill=16))
    for rows in (0, 1, 6, 40):
        with closing(engine.open()) as sequence:
            taps = engine.step([(sequence, Block(TEXT, rows))]).taps[0]
        assert list(taps) == ["tap.0"]
        assert taps["tap.0"].shape == (40, 64)
        assert np.abs(taps["tap.0"] - expected).max() < 1e-4 * np.abs(expected).max()
    with pytest.raises(KeyError):
        taps["tap.1"]


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_one_model_is_heard_and_it_goes_when_its_engine_goes(family: str, opened: mlx.Opened):
    before = opened(family)
    module = importlib.import_module(f"mlx_lm.models.{family}")
    kind = {"llama": "TransformerBlock", "lfm2": "Lfm2DecoderLayer"}[family]
    call = getattr(module, kind).__call__
    assert call.__module__ == module.__name__  # as it was written
    tapped = opened(family, taps=(1,))
    assert isinstance(tapped.model.module.layers[1], getattr(module, kind))
    assert getattr(module, kind).__call__ is call
    assert before.model._taps.take() == {}
    with closing(tapped.open()) as sequence:
        step(tapped, sequence, TEXT)
    gone = [weakref.ref(item) for item in (tapped, tapped.model.module)]
    del tapped, sequence
    gc.collect()
    assert [name() for name in gone] == [None, None]


@pytest.mark.parametrize("layers", [(2,), (0, 5), (-1,)])
def test_a_layer_that_is_not_there_cannot_be_tapped(opened: mlx.Opened, layers: tuple[int, ...]):
    with raises(InvalidRequest, "0 to 1"):
        opened("llama", taps=layers)


# -- for those who share the model -----------------------------------------------------------------


@pytest.mark.parametrize("family", [result for result in mlx.FAMILIES if result != "gemma3"])
def test_the_embeddings_and_the_head_can_be_shared(family: str, opened: mlx.Opened):
    import mlx.core as mx

    model = opened(family).model
    tokens = mx.array(TEXT)
    inner = model.module.model
    assert mx.array_equal(model.embed(tokens), inner.embed_tokens(tokens))
    assert mx.array_equal(model.head(inner(tokens[None])), model.module(tokens[None]))
