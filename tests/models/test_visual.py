"""Models that also see images, in OpenVINO's format: text alone."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines import EngineSettings, open_engine
from paceline.errors import ModelError
from paceline.models import ModelFiles, list_models, resolve
from paceline.models.manifest import GRAPH, VISUAL
from paceline.storage.openvino import EMBEDDINGS, LANGUAGE
from support.errors import raises
from support.fake_hub import FakeHub, FakeRepository
from support.visual import split_graph


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
