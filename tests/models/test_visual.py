"""Models that also see images, in OpenVINO's format: text alone."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines import EngineSettings, open_engine
from paceline.errors import ModelError
from paceline.models import ModelFiles, list_models, resolve
from paceline.models.manifest import GRAPH, VISUAL
from paceline.storage.openvino import EMBEDDINGS, LANGUAGE, core
from support.errors import raises
from support.fake_hub import FakeHub, FakeRepository


def split_graph(path: Path, folder: Path, *, sections: bool = False, kinds: bool = False) -> Path:
    """Write a language model's graph as embeddings and decoder into `folder`; return `folder`.

    `sections`: the decoder takes positions in three sections (of Qwen2-VL). `kinds`: it takes a
    kind of each token (of Gemma 3).
    """
    import openvino as ov
    from openvino import opset13

    table = core().read_model(path)
    lookup = _table(table)
    ids = table.input("input_ids").get_node()
    result = opset13.result(lookup.output(0))
    ov.save_model(ov.Model([result], [ids]), folder / EMBEDDINGS, compress_to_fp16=False)

    model = core().read_model(path)
    lookup = _table(model)
    width = lookup.get_output_partial_shape(0)[2].get_length()
    embeds = _parameter([-1, -1, width], np.float32, "inputs_embeds")
    ids = model.input("input_ids").get_node()
    _feed(lookup, embeds.output(0))
    for reader in ids.output(0).get_target_inputs():
        reader.replace_source_output(embeds.output(0))  # its shape
    new = [embeds]
    gone = {"input_ids"}
    if sections:
        places = _parameter([3, -1, -1], np.int64, "position_ids")
        first = opset13.gather(places, opset13.constant(0), opset13.constant(0))
        _feed(model.input("position_ids").get_node(), first.output(0))
        new.append(places)
        gone.add("position_ids")
    if kinds:
        # What is not text gets other positions, so that the kinds have an effect.
        kind = _parameter([-1, -1], np.int64, "token_type_ids")
        places = model.input("position_ids").get_node() if not sections else new[1]
        del places
        shifted = opset13.multiply(
            opset13.convert(opset13.unsqueeze(kind, -1), np.float32),
            opset13.constant(np.float32(9)),
        )
        readers = list(embeds.output(0).get_target_inputs())
        total = opset13.add(embeds, shifted)
        for reader in readers:
            reader.replace_source_output(total.output(0))
        new.append(kind)
    kept = [port.get_node() for port in model.inputs if port.any_name not in gone]
    rest = ov.Model(model.get_results(), model.get_sinks(), [*kept, *new])
    ov.save_model(rest, folder / LANGUAGE, compress_to_fp16=False)
    return folder


def _table(model: Any) -> Any:
    """The Gather of embeddings, [batch, tokens, width]."""
    return next(
        node
        for node in model.get_ordered_ops()
        if node.get_type_name() == "Gather" and node.get_output_partial_shape(0).rank == 3
    )


def _parameter(shape: list[int], dtype: Any, name: str) -> Any:
    from openvino import opset13

    parameter = opset13.parameter(shape, dtype, name=name)
    parameter.output(0).set_names({name})
    return parameter


def _feed(node: Any, value: Any) -> None:
    for reader in node.output(0).get_target_inputs():
        reader.replace_source_output(value)


def rows(files: ModelFiles) -> np.ndarray:
    """Logits [7, vocab] of a prompt, and of a block after it."""
    engine = open_engine("openvino", files.path, files.context_length, EngineSettings())
    sequence = engine.open()
    items = [*engine.step([(sequence, Block([5, 9, 2, 14, 7], 5))]).logits[0].copy()]
    sequence.commit(5)
    return np.array([*items, *engine.step([(sequence, Block([11, 30], 2))]).logits[0]])


@pytest.fixture
def visual(exported: Path, tmp_path: Path) -> Path:
    """The tiny model in two graphs."""
    folder = tmp_path / "visual"
    shutil.copytree(exported, folder, ignore=shutil.ignore_patterns("openvino_model.*"))
    return split_graph(exported / GRAPH, folder)


@pytest.mark.parametrize("sections", [False, True])
@pytest.mark.parametrize("kinds", [False, True])
def test_text_is_answered_as_by_the_model_in_one_graph(
    sections: bool, kinds: bool, exported: Path, tmp_path: Path
):
    folder = tmp_path / "visual"
    shutil.copytree(exported, folder, ignore=shutil.ignore_patterns("openvino_model.*"))
    split_graph(exported / GRAPH, folder, sections=sections, kinds=kinds)
    files = resolve(str(folder), tmp_path / "cache")
    assert files.path == folder / LANGUAGE
    assert np.array_equal(rows(files), rows(resolve(str(exported), tmp_path / "cache")))


def test_a_decoder_that_needs_more_of_an_image_is_refused(visual: Path, tmp_path: Path):
    path = visual / LANGUAGE
    path.write_text(path.read_text().replace("attention_mask", "visual_pos_masks"))
    with raises(ModelError, "visual_pos_masks"):
        rows(resolve(str(visual), tmp_path / "cache"))


@pytest.mark.parametrize("name", VISUAL)
def test_a_missing_part_is_named(name: str, visual: Path, tmp_path: Path):
    (visual / name).unlink()
    with raises(ModelError, GRAPH if name == LANGUAGE else name):
        resolve(str(visual), tmp_path / "cache")


@pytest.mark.parametrize("name", [LANGUAGE, EMBEDDINGS])
def test_a_truncated_part_is_refused(name: str, visual: Path, tmp_path: Path):
    path = visual / name
    path.write_bytes(path.read_bytes()[:-20])
    with raises(ModelError, name):
        resolve(str(visual), tmp_path / "cache")


def test_its_text_part_is_fetched_from_the_hub_and_no_other(
    visual: Path, fake: FakeHub, tmp_path: Path
):
    files = {path.name: path.read_bytes() for path in visual.iterdir()}
    more = {"openvino_vision_embeddings_model.bin": bytes(5000)}
    fake.repositories["owner/visual"] = FakeRepository({**files, **more})
    result = resolve("owner/visual", tmp_path / "cache")
    assert result.path.name == LANGUAGE
    assert not any("vision" in download.path for download in fake.downloads())
    fake.asked.clear()
    assert resolve("owner/visual", tmp_path / "cache").folder == result.folder
    assert fake.asked == []
    assert "owner/visual" in [model.name for model in list_models(tmp_path / "cache")]
