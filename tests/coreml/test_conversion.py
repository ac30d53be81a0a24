"""Conversion of checkpoints to Core ML artifacts: results, resumption, errors."""

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.errors import InvalidRequest, ModelError
from paceline.models import QUIET
from paceline.models.files import open_folder
from paceline.models.manifest import GENERATION
from paceline.storage.files import read_json
from paceline.storage.manifest import MANIFEST
from paceline_coreml.conversion import convert as conversion
from paceline_coreml.conversion.compress import compress
from paceline_coreml.conversion.convert import convert
from paceline_coreml.conversion.family import Family
from paceline_coreml.conversion.scratch import scratch
from paceline_coreml.conversion.shards import convert_head, convert_layers
from paceline_coreml.conversion.source import Source
from paceline_coreml.conversion.topology import LayerSize, even_topology
from paceline_coreml.engine.artifact import MAX_STATES, Artifact, read_artifact
from paceline_coreml.engine.engine import CoreMlEngine
from paceline_coreml.options import ConversionOptions, with_defaults
from paceline_coreml.rehearsal import RehearsalModel
from paceline_coreml.rehearsal.program import read_package
from paceline_coreml.rehearsal.weights import Constant
from support import mil
from support.coreml import tiny_llama, tiny_source
from support.coreml_checkpoints import zaya_artifact
from support.errors import raises

pytestmark = pytest.mark.coreml

SAMPLING = {"temperature": 0.6, "top_k": 20}
TEXT = [(7 * i + i * i) % 160 for i in range(12)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    source = tiny_source(tmp_path_factory.mktemp("checkpoint"))
    source.tokenizer.with_name(GENERATION).write_text(json.dumps(SAMPLING), encoding="utf-8")
    return source


@contextlib.contextmanager
def lasting() -> Iterator[Path]:
    """Replace `scratch`: the packages of `PROGRAMS` stay."""
    with tempfile.TemporaryDirectory() as work:
        yield Path(work)


PROGRAMS: dict[tuple[Any, ...], Any] = {}
"""Programs before compression, which many artifacts here have in common."""


def made(source: Source, out: Path, **recipe: Any) -> Artifact:
    common = {"slots": 64, "topology": "3", "head_rows": 160, "weights": "f16"}

    def once(convert_part: Callable[..., Any]) -> Callable[..., Any]:
        def converted(family: Family, *span: int, **sizes: Any) -> Any:
            key = (source.checkpoint, convert_part.__name__, span, str(sizes))
            if key not in PROGRAMS:
                PROGRAMS[key] = convert_part(family, *span, **sizes)
            return PROGRAMS[key]

        return converted

    with pytest.MonkeyPatch.context() as patch:
        for part in (convert_layers, convert_head):
            patch.setattr(conversion, part.__name__, once(part))
        patch.setattr(conversion, "scratch", lasting)
        return convert(source, out, ConversionOptions(**(common | recipe)), progress=QUIET)


def logits(artifact: Artifact) -> np.ndarray:
    engine = CoreMlEngine(artifact.folder, rounding="f32")
    sequence = engine.open()
    rows: np.ndarray = engine.step([(sequence, Block(TEXT, len(TEXT)))]).logits[0]
    return rows


def cosine(found: np.ndarray, expected: np.ndarray) -> float:
    size = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return float(((found * expected).sum(1) / size).min())


def stored(package: Path) -> dict[str, set[str]]:
    """The stored types of a package's weights, by module name."""
    found: dict[str, set[str]] = {}
    for op in read_package(package).function().block.walk():
        if op.type.startswith("const") and "_weight" in op.outputs[0].name:
            name = op.outputs[0].name.partition("_weight")[0]
            kept = next(op.inputs[key][0] for key in ("data", "indices", "val") if key in op.inputs)
            assert isinstance(kept, Constant)
            found.setdefault(name, set()).add(kept.dtype)
    return found


@pytest.fixture(scope="module")
def finished(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Treat it as read-only."""
    return made(source, tmp_path_factory.mktemp("f16") / "out", keep=("head",))


@pytest.fixture(scope="module")
def exact(finished: Artifact) -> np.ndarray:
    return logits(finished)


@pytest.mark.parametrize(
    ("weights", "least", "kept"),
    [("int8", 0.9995, "int8"), ("int8-per-tensor", 0.999, "int8"), ("int4", 0.95, "uint4")],
)
def test_weights_are_compressed(
    source: Source, exact: np.ndarray, tmp_path: Path, weights: str, least: float, kept: str
):
    artifact = made(source, tmp_path / "out", weights=weights)
    assert cosine(logits(artifact), exact) > least
    assert kept in stored(artifact.folder / artifact.layer_shards[0].path)["layers_1_mix_q"]


def test_a_row_of_zeros_is_compressed_without_a_warning(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
):
    weight = np.ones((64, 64, 1, 1), np.float16)
    weight[3] = 0
    path = mil.save_program(
        tmp_path / "model.mlpackage",
        lambda mb, x: mb.conv(x=x, weight=weight, pad_type="valid"),
        {"x": np.zeros((1, 64, 1, 1), np.float16)},
    )
    model = ct.models.MLModel(str(path), skip_model_load=True)
    recwarn.clear()
    compress(model, "int8").save(str(path))
    assert [one for one in recwarn if one.category is RuntimeWarning] == []
    rows = RehearsalModel(path).predict({"x": np.ones((1, 64, 1, 1), np.float32)})
    (out,) = rows.values()
    assert (out[0, 3], out[0, 4]) == (0, 64)


def test_excluded_weights_stay_float16(source: Source, tmp_path: Path):
    artifact = made(source, tmp_path / "out", weights="int8", keep=("layers.1.*", "head"))
    layers = stored(artifact.folder / artifact.layer_shards[0].path)
    assert layers["layers_0_mix_q"] == {"int8"}
    assert layers["layers_1_mix_q"] == {"fp16"}
    assert stored(artifact.folder / artifact.head_shards[0].path)["head"] == {"fp16"}


@pytest.mark.parametrize(
    ("task", "chosen", "rows", "functions", "slots"),
    [
        ("causal-lm", {}, 8, (1, 8), 0),
        ("causal-lm", {"rows": 128}, 128, (1, 8, 128), 0),
        ("causal-lm", {"stateless": True}, 8, (8,), 0),
        ("causal-lm", {"functions": (64, 8)}, 64, (8, 64), 0),
        ("causal-lm", {"flexible": True, "rows": 12}, 12, (), 0),
        ("token-classification", {}, 128, (1, 128), 128),
    ],
)
def test_a_model_has_functions_for_single_rows_and_for_exact_passes(
    task: str, chosen: dict[str, Any], rows: int, functions: tuple[int, ...], slots: int
):
    options = with_defaults(ConversionOptions(**chosen), task)
    assert (options.rows, options.functions, options.slots) == (rows, functions, slots)
    assert with_defaults(ConversionOptions(), "causal-lm", single=False).functions == (8,)
    with pytest.raises(InvalidRequest):
        with_defaults(ConversionOptions(flexible=True), "token-classification")


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ({"topology": "2+2"}, "2+2 is 4 layers; the model has 3"),
        ({"topology": "a+b"}, "is not a topology; expected layers per package"),
        ({"taps": (1, 3)}, r"cannot tap layers \[3\]; the model has 3"),
        ({"keep": ("layers.0.*", "layer.1.*")}, r"no weight matches layer\.1\.\*"),
        ({"functions": (1, 2), "rows": 4}, "functions 1, 2 do not match rows 4"),
        ({"weights": "int3"}, "weights is 'int3'; expected one of int8"),
    ],
)
def test_conversion_options_unsupported_by_the_model_are_rejected(
    source: Source, tmp_path: Path, recipe: dict[str, Any], said: str
):
    with pytest.raises(InvalidRequest, match=said.replace("+", r"\+")):
        made(source, tmp_path / "out", **recipe)
    assert not (tmp_path / "out").exists()


# --- resumption


def test_conversion_reuses_finished_packages(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out, parts = tmp_path / "out", []
    whole = conversion._make

    def interrupted(part: Any, *rest: Any) -> None:
        if len(parts) == 2:
            raise KeyboardInterrupt
        parts.append(part.path)
        whole(part, *rest)

    monkeypatch.setattr(conversion, "_make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made(source, out, topology="1+1+1")
    assert not (out / MANIFEST).exists()
    assert sorted(path.name for path in out.glob("*.mlpackage")) == parts
    with pytest.raises(ModelError):
        read_artifact(out)
    with raises(ModelError, "an unfinished conversion", "paceline convert"):
        open_folder(out, "mine")
    # An incomplete package, as after a crash during the move.
    (out / ".layers-002-003.mlpackage").mkdir()
    (out / ".layers-002-003.mlpackage" / "junk").write_text("x")
    again: list[str] = []
    monkeypatch.setattr(
        conversion, "_make", lambda part, *rest: (again.append(part.path), whole(part, *rest))
    )
    artifact = made(source, out, topology="1+1+1")
    assert again == ["layers-002-003.mlpackage", "head-000000-000160.mlpackage"]
    assert not any(path.name.startswith(".") for path in out.iterdir())
    assert len(artifact.layer_shards) == 3
    monkeypatch.setattr(conversion, "_make", lambda *_: pytest.fail("made again"))
    assert made(source, out, topology="1+1+1") == artifact


@pytest.mark.parametrize(
    ("states", "megabytes", "spans"),
    [
        (2, 10, [(0, 15), (15, 30)]),
        (1, 10, [(0, 30)]),
        (2, 3, [(0, 10), (10, 20), (20, 30)]),
        (50, 10, [(layer, layer + 1) for layer in range(30)]),
    ],
    ids=["states", "all fit", "size", "more than fit in a package"],
)
def test_packages_are_split_by_size_and_number_of_states(
    states: int, megabytes: int, spans: list[tuple[int, int]]
):
    layers = [LayerSize(300_000, states)] * 30
    assert even_topology(layers, LayerSize(megabytes * 10**6, MAX_STATES)) == spans


def test_conversion_rejects_a_folder_in_use_or_with_other_files(
    source: Source, finished: Artifact, tmp_path: Path
):
    out = finished.folder
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with pytest.raises(InvalidRequest, match="another recipe"):
        made(source, out, weights="int8")
    with pytest.raises(InvalidRequest, match="another weights_of"):
        made(source._replace(identity="other"), out, keep=("head",))
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InvalidRequest, match="is not empty; choose another folder"):
        made(source, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_all_that_coremltools_writes_is_in_the_temporary_folder(tmp_path: Path, monkeypatch: Any):
    source = tiny_source(tmp_path, num_hidden_layers=1)
    place = tmp_path / "scratch"
    (mine := place / "paceline-coreml-mine").mkdir(parents=True)
    seen: list[Path] = []
    whole = tempfile.mkdtemp

    def made(*args: Any, **options: Any) -> str:
        seen.append(Path(whole(*args, **options)))
        return str(seen[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", made)
    recipe = ConversionOptions(slots=64, head_rows=160, functions=(2, 4))
    with scratch(place):
        convert(source, tmp_path / "out", recipe, progress=QUIET)
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tmp")] == []
    assert len(seen) > 8
    assert all(path.is_relative_to(place) for path in seen)
    assert list(place.iterdir()) == [mine]


HELD = """
import sys
from pathlib import Path
from paceline_coreml.conversion.scratch import scratch
with scratch(Path(sys.argv[1])) as work:
    (work / "tmp1.mlpackage").mkdir()
    print(work, flush=True)
    sys.stdin.readline()
"""


def test_what_a_killed_conversion_left_is_removed_and_not_what_others_use(tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", HELD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        with scratch(tmp_path) as work:
            assert {*tmp_path.iterdir()} == {left, work}
        other.kill()
    assert [*left.iterdir()] == [left / "tmp1.mlpackage"]
    with scratch(tmp_path) as work:
        assert [*tmp_path.iterdir()] == [work]


def test_a_full_disk_is_one_line_before_the_conversion_and_during_it(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(9, 9, 60_000))
    with raises(ModelError, "the disk is full", "which has 0.1 MB", "--temporary"):
        made(source, tmp_path / "out")
    assert [*tmp_path.iterdir()] == []
    with raises(ModelError, "the disk is full", "has 0.1 MB", "--temporary"), scratch(tmp_path):
        raise RuntimeError("MIL FileWriter: Unknown error")


# --- invalid checkpoints


def changed_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def without(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        path = folder / "model.safetensors"
        weights = load_file(path)
        del weights[name]
        save_file(weights, path)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: changed_config(folder, model_type="gpt2"), "gpt2"),
        (
            without("model.layers.2.mlp.up_proj.weight"),
            r"has no tensor model\.layers\.2\.mlp\.up_proj\.weight",
        ),
        (
            lambda folder: changed_config(folder, num_attention_heads=8, head_dim=16),
            r"layers\.0\.self_attn\.\w_proj\.weight as \[64, 64\] F32; expected \[64, 128\]",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"nonsense"),
            r"cannot read .*model\.safetensors as safetensors",
        ),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    ],
    ids=["family", "layer", "shape", "damaged", "config"],
)
def test_an_incomplete_checkpoint_is_rejected_before_conversion(
    tmp_path: Path, change: Callable[[Path], Any], said: str
):
    folder = tiny_llama(tmp_path / "checkpoint")
    source = tiny_source(tmp_path, folder)
    change(folder)
    with pytest.raises(ModelError, match=said) as raised:
        made(source, tmp_path / "out")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_the_manifest_has_source_options_and_sampling_settings(source: Source, finished: Artifact):
    value = read_json(finished.folder / MANIFEST)
    assert value["source"] == source.about
    assert value["recipe"]["keep"] == ["head"]
    assert value["facts"]["context_length"] == 64
    assert value["made_by"].startswith("paceline ")
    assert not (finished.folder / "making.json").exists()
    assert open_folder(finished.folder, "mine").settings == SAMPLING


def test_an_empty_name_of_an_excluded_weight_is_rejected(tmp_path: Path):
    """The converter merges ZAYA's projections with the scale after them, under a new name."""
    with pytest.raises(InvalidRequest, match=r"layers\.0\..*cannot stay float16"):
        zaya_artifact(tmp_path, keep=("layers.0.*downs*",))
