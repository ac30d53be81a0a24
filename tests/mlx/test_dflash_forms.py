"""DFlash in the forms that others publish: DFlash 2 and DSpark.

The reference is numpy in float64 (`support/dflash.py`), written from z-lab/dflash and from
deepseek-ai/DeepSpec.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.sampling import Sampling
from paceline.drafters.draft_sampling import DraftSampler
from paceline.errors import ModelError
from paceline_mlx.heads.dflash.config_file import read_config
from support.dflash import LEFT_OUT, config_json, tiny_config, write_checkpoint, write_config
from support.errors import raises
from support.networks import CHAINED, Case, prefilled, without_prefill

pytestmark = pytest.mark.mlx

FIRST_TOKENS = range(0, 320, 40)


@pytest.fixture(scope="module", params=CHAINED)
def chained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case.make(tmp_path_factory.mktemp("form"), CHAINED[request.param])


def compare(case: Case, result: Any, rows: np.ndarray, token: int) -> int:
    """Compare a block with the reference until a near tie; how many drafts were compared."""
    drafts, chances = result
    assert len(drafts) == len(chances) == case.config.drafts
    expected = case.expected(rows, token)
    for at, margin in enumerate(expected.margins):
        np.testing.assert_allclose(chances[at], expected.chances[at], rtol=1e-3)
        if margin < 1e-3:
            return at
        assert drafts[at] == expected.tokens[at]
    return len(drafts)


@pytest.mark.parametrize("length", [0, 1, 60])
def test_a_draft_equals_the_reference(chained: Case, length: int):
    rows = chained.tapped(length)
    ways = (without_prefill, prefilled)
    compared = sum(
        compare(chained, way(chained.network, rows, token), rows, token)
        for way in ways
        for token in FIRST_TOKENS
    )
    assert compared > 0.9 * len(ways) * len(FIRST_TOKENS) * chained.config.drafts


def test_a_sampler_picks_each_draft_after_the_one_before(chained: Case):
    rows = chained.tapped(30)
    same = []
    for seed, token in enumerate(FIRST_TOKENS):
        sampler = DraftSampler(Sampling(temperature=(0.5, 0.8, 1.0)[seed % 3], seed=seed), 0, 320)
        cache = chained.network.new_cache()
        drafts, _ = chained.network.draft(cache, token, 30, rows, 0, sampler=sampler)
        logits = chained.expected(rows, token, chosen=tuple(drafts)).logits.astype(np.float32)
        expected, _ = sampler.pick_rows(logits, 31)
        same += [one == other for one, other in zip(drafts, expected, strict=True)]
    assert np.mean(same) > 0.98


def test_heads_and_convolutions_change_the_drafts(chained: Case):
    # Without this, a network that ignores them would pass the tests above.
    rows, plain = chained.tapped(30), replace(chained.config, chain=None, convolution=None)
    case = replace(chained, config=plain)
    changed = [
        case.expected(rows, token).tokens != chained.expected(rows, token).tokens
        for token in FIRST_TOKENS
    ]
    kind = chained.config.chain.kind if chained.config.chain else "none"
    assert np.mean(changed) > 0.5 if kind != "none" else not any(changed)


@pytest.fixture(params=CHAINED)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    config = tiny_config(**CHAINED[request.param])
    write_checkpoint(tmp_path, config)
    return config, tmp_path


def test_a_config_is_read_as_written(written: Any):
    config, folder = written
    assert read_config(folder) == config


@pytest.mark.parametrize(
    ("form", "change", "fault"),
    [
        ("dflash 2", {"conv_group_size": 7}, "conv_group_size 7 does not divide hidden_size"),
        ("dflash 2", {"conv_kernel_size": 9}, "conv_kernel_size is 9, block_size 8"),
        ("dflash 2", {"selector_top_k": 999}, "selector_top_k is 999, more than the vocabulary"),
        ("dflash 2", {"selector_rank": LEFT_OUT}, "dflash_config.selector_rank: "),
        ("dflash 2", {"block_size": 1}, "dflash_config.block_size: "),
        ("dspark, vanilla", {"markov_head_type": "trigram"}, "markov_head_type: "),
        ("dspark, vanilla", {"markov_head_type": LEFT_OUT}, "without a markov_head_type"),
        ("dspark, vanilla", {"markov_rank": 0}, "needs a markov_rank above 0"),
        ("dspark, vanilla", {"target_layer_ids": [-1, 1]}, "target_layer_ids"),
        ("dspark, vanilla", {"mask_token_id": LEFT_OUT}, "mask_token_id: "),
        ("dspark, no head", {"architectures": ["Gemma4DSparkModel"]}, "'Gemma4DSparkModel'"),
    ],
)
def test_an_invalid_config_gets_one_line(tmp_path: Path, form: str, change: Any, fault: str):
    config = config_json(tiny_config(**CHAINED[form]))
    where = config if "architectures" in change or "dspark" in form else config["dflash_config"]
    where |= change
    for name in [name for name, value in where.items() if value is LEFT_OUT]:
        del where[name]
    write_config(tmp_path, config)
    with pytest.raises(ModelError) as error:
        read_config(tmp_path)
    if "architectures" not in change:
        assert fault in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("dflash 2", "candidate_selector.successor_codebook"),
        ("dflash 2", "layers.1.mlp_conv.base_kernel"),
        ("dspark, vanilla", "markov_head.markov_w2.weight"),
        ("dspark, vanilla", "confidence_head.proj.bias"),
    ],
)
def test_a_head_without_one_of_its_tensors_is_rejected(tmp_path: Path, form: str, name: str):
    config = tiny_config(**CHAINED[form])
    write_checkpoint(tmp_path, config, tensors={name: LEFT_OUT})
    case = Case(config, tmp_path, {})
    with raises(ModelError, name):
        case.opened()
