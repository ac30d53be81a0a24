"""Every family of GGUF files that is opened as it is: exact, and equal to transformers.

Each is a tiny random checkpoint, converted to a GGUF file. Windows are of 16 tokens and scaled
positions begin at 64 or 128, so that the texts here pass both.
"""

from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.engines.invariance import CONDITIONS, measure_invariance
from paceline.errors import ModelError
from paceline.models import resolve
from paceline.models.checkpoints.convert import plan, write
from paceline.models.gguf.support import FAMILIES
from paceline.storage.gguf import read_gguf_graph
from support.divergence import apart
from support.engine_rows import random_text, run
from support.errors import raises
from support.tiny_checkpoints import FORMS, write_checkpoint, write_gguf_of, write_safetensors

pytestmark = pytest.mark.slow

REFUSED = {"gemma2"}
"""Forms that OpenVINO 2026.4 opens and computes otherwise than transformers, or does not open."""
SEEDS = {"gpt_oss": 1}
"""Of weights, where those of seed 0 have a near tie of two experts, which 16-bit keys decide."""
CONTEXT = 512
OPENVINO = "paceline.engines.openvino"
EXACT = sorted(FORMS.keys() - REFUSED)


def opened(path: Path) -> Engine:
    settings = EngineSettings(cache_tokens=3 * CONTEXT)
    return open_engine("openvino", path, CONTEXT, settings)


class Family(NamedTuple):
    """A file of a form, opened once for all tests of the form."""

    form: str
    path: Path
    """Its checkpoint is beside it."""
    engine: Engine


@pytest.fixture(scope="module", params=EXACT)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    path = tmp_path_factory.mktemp("family") / "m.gguf"
    write_gguf_of(request.param, path, SEEDS.get(request.param, 0))
    return Family(request.param, path, opened(path))


def logits_of(engine: Engine, text: list[int]) -> np.ndarray:
    """[tokens, vocab]: the text as a prompt."""
    with closing(engine.open()) as sequence:
        (logits,) = run(engine, prompts=[(sequence, text, len(text))])
    return logits


def test_rows_are_the_same_however_they_are_computed(family: Family):
    engine = family.engine
    conditions = measure_invariance(engine)
    differing = {name: compared.differing for name, compared in conditions.items()}
    assert differing == dict.fromkeys(CONDITIONS, 0)
    text = random_text(engine, 160)
    sequence = engine.open()
    run(engine, prompts=[(sequence, text[:100], 1)])
    sequence.commit(100)
    whole = engine.step([(sequence, Block(text[100:], 60))]).logits[0].copy()
    for rows in (3, 7, 16):
        for at in range(100, 160 - rows, rows):
            part = engine.step([(sequence, Block(text[at : at + rows], rows))]).logits[0]
            assert np.array_equal(part, whole[at - 100 : at - 100 + rows]), (rows, at)
            sequence.commit(rows)
        sequence.rewind(100)
    sequence.close()


def test_taps_are_as_wide_as_the_model_and_change_nothing(family: Family):
    text = random_text(family.engine, 20)
    layers = (0, 1)
    tapped = open_engine("openvino", family.path, CONTEXT, EngineSettings(taps=layers))
    result = tapped.step([(tapped.open(), Block(text, 3, prefill=True))])
    assert np.array_equal(result.logits[0], logits_of(family.engine, text)[-3:])
    assert {name: array.shape[0] for name, array in result.taps[0].items()} == {
        f"tap.{layer}": 20 for layer in layers
    }


@pytest.mark.parametrize(
    "form",
    [
        *("exaone4-window", "gemma3_text", "gemma4_text", "glm4_moe", "hunyuan_v1_dense"),
        *("llama", "qwen2", "qwen3_5_text", "qwen3_moe", "smollm3"),
    ],
)
def test_one_kv_head_computes_what_two_equal_ones_do(form: str, tmp_path: Path):
    """OpenVINO's frontend makes another graph for one."""
    from safetensors.numpy import load_file

    one = opened(write_gguf_of(form, tmp_path / "m.gguf", num_key_value_heads=1))
    tensors = {
        name: np.concatenate([rows] * 2) if ".k_proj." in name or ".v_proj." in name else rows
        for name, rows in load_file(tmp_path / "m-checkpoint" / "model.safetensors").items()
    }
    checkpoint = write_checkpoint(form, tmp_path / "two", num_key_value_heads=2)
    write_safetensors(checkpoint / "model.safetensors", tensors)
    two = opened(converted(checkpoint))
    text = random_text(one, 100)
    assert apart(logits_of(one, text), logits_of(two, text)) < 1e-4


def test_a_graph_that_is_not_recognised_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_gguf_of("hunyuan_v1_dense", tmp_path / "m.gguf")

    def renamed(path: Path) -> Any:
        graph = read_gguf_graph(path)
        for node in graph.get_ordered_ops():
            if (name := node.get_friendly_name()).endswith("Kcur_normed"):
                node.set_friendly_name(f"{name}_anew")
        return graph

    monkeypatch.setattr(f"{OPENVINO}.gguf_graph.read_gguf_graph", renamed)
    with raises(ModelError, "blk.0.Kcur_normed") as caught:
        opened(path)
    assert_says_what_to_do(str(caught.value), path, "hunyuan-dense")


def test_a_graph_that_does_not_compile_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def compiled(*_: object) -> None:
        raise RuntimeError("Check failed:\nm_dims=[4,256,] expect_dims=[2,256,]")

    monkeypatch.setattr(f"{OPENVINO}.engine.CompiledGraph", compiled)
    path = write_gguf_of("gemma3_text", tmp_path / "m.gguf")
    with raises(ModelError, "[2,256,]") as caught:
        opened(path)
    assert_says_what_to_do(str(caught.value), path, "gemma3")


def assert_says_what_to_do(message: str, path: Path, family: str) -> None:
    """The file is complete: fetching it again would not help."""
    assert message.startswith(f"{path}, of the family '{family}', cannot be opened by OpenVINO")
    assert "report it" in message
    assert "--engine llamacpp" in message
    assert "again" not in message


@pytest.mark.parametrize("form", sorted(REFUSED))
def test_a_family_that_is_not_proven_is_refused_by_name(form: str, tmp_path: Path):
    path = write_gguf_of(form, tmp_path / "m.gguf")
    with raises(ModelError, "architecture", path):
        resolve(str(path), tmp_path / "cache")


def test_an_attention_that_pagedattention_does_not_compute_is_refused(tmp_path: Path):
    with raises(ModelError, "capped"):
        opened(write_gguf_of("gemma2", tmp_path / "m.gguf"))


def test_layers_that_predict_further_tokens_are_refused(tmp_path: Path):
    more = {"glm4moe.nextn_predict_layers": 1}
    path = write_gguf_of("glm4_moe", tmp_path / "m.gguf", fields=more)
    with raises(ModelError, "predict"):
        resolve(str(path), tmp_path / "cache")


def test_a_window_in_unknown_layers_is_refused(tmp_path: Path):
    key = "exaone4.attention.sliding_window_pattern"
    path = write_gguf_of("exaone4-window", tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(key.encode(), key.upper().encode()))
    with raises(ModelError, key):
        opened(path)


def test_every_family_that_is_opened_is_tested_here(tmp_path: Path):
    from gguf import GGUFReader

    proven = set()
    for form in EXACT:
        fields = GGUFReader(write_gguf_of(form, tmp_path / f"{form}.gguf")).fields
        proven.add(fields["general.architecture"].contents())
    assert {*FAMILIES} == proven


def test_llama_3_positions_need_the_factors_in_the_file(tmp_path: Path):
    """With the tensor `rope_freqs` left out, the positions are others."""
    with_factors = opened(write_gguf_of("llama3", tmp_path / "a.gguf"))
    plain = {"rope_type": "default", "rope_theta": 500000.0}
    without = opened(write_gguf_of("llama3", tmp_path / "b.gguf", rope_parameters=plain))
    text = random_text(with_factors, 200)
    assert apart(logits_of(without, text)[150:], logits_of(with_factors, text)[150:]) > 0.1


def test_minicpm_is_a_llama_with_scaled_weights(tmp_path: Path):
    """Transformers does not have it, but its scales can be put into the weights of a llama."""
    from safetensors.numpy import load_file

    scaled = opened(write_gguf_of("minicpm", tmp_path / "m.gguf"))
    tensors = load_file(tmp_path / "m-checkpoint" / "model.safetensors")
    factors = {
        "embed_tokens": 12,
        "o_proj": 1.4 / 2**0.5,
        "down_proj": 1.4 / 2**0.5,
        "lm_head": 0.5,
    }
    for name in tensors:
        for part, factor in factors.items():
            if part in name:
                tensors[name] = tensors[name] * np.float32(factor)
    config = {**FORMS["minicpm"], "model_type": "llama"}
    checkpoint = write_checkpoint("llama", tmp_path / "l-checkpoint", **config)
    write_safetensors(checkpoint / "model.safetensors", tensors)
    plain = opened(converted(checkpoint))
    text = random_text(scaled, 100)
    assert apart(logits_of(scaled, text), logits_of(plain, text)) < 1e-4


def test_experts_in_mxfp4_compute_what_their_values_in_float_do(tmp_path: Path):
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.numpy import load_file

    path = write_gguf_of("gpt_oss-mxfp4", tmp_path / "m.gguf")
    values = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    kept = load_file(tmp_path / "m-checkpoint" / "model.safetensors")
    tensors = {
        name: value for name, value in kept.items() if not name.endswith(("_blocks", "_scales"))
    }
    for layer in range(2):
        gate, up, down = (
            dequantize(item.data, item.tensor_type).swapaxes(1, 2)
            for part in ("gate", "up", "down")
            for item in [values[f"blk.{layer}.ffn_{part}_exps.weight"]]
        )
        prefix = f"model.layers.{layer}.mlp.experts."
        both = np.stack([gate, up], axis=-1)
        tensors[f"{prefix}gate_up_proj"] = both.reshape(*gate.shape[:2], -1)
        tensors[f"{prefix}down_proj"] = np.ascontiguousarray(down)
    checkpoint = write_checkpoint("gpt_oss", tmp_path / "f-checkpoint")
    write_safetensors(checkpoint / "model.safetensors", tensors)
    packed, plain = opened(path), opened(converted(checkpoint))
    text = random_text(packed, 100)
    assert apart(logits_of(packed, text), logits_of(plain, text)) < 5e-3


def converted(checkpoint: Path) -> Path:
    path = checkpoint / "model.gguf"
    write(plan(checkpoint, "f32"), path, lambda _done: None)
    return path


@pytest.mark.reference
def test_logits_are_those_of_transformers(family: Family):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    form, path, engine = family
    if "mxfp4" in form:
        pytest.skip("it is compared with the form whose values are in float")
    checkpoint = path.with_name("m-checkpoint")
    text = random_text(engine, 410)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    except (KeyError, ValueError) as error:
        pytest.skip(f"this transformers has no {form}: {error}")
    with torch.no_grad():
        expected = model(torch.tensor([text])).logits[0].numpy()
    assert apart(logits_of(engine, text), expected) < 5e-3
