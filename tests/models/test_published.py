"""Published drafters on a fake hub: the registry, `pull --drafter`, lists, and `auto`."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import drafters, load
from paceline.cli.app import main
from paceline.drafters import Sizes
from paceline.models import ModelFiles, Progress, published, resolve_drafter
from paceline.models.names import hub_names
from paceline.models.published import Published, published_for, registry
from support.dflash import tiny_config, write_checkpoint
from support.fake_hub import FakeHub, FakeRepository, serving, use_hub
from support.native_drafters import COUNT, write_cycles, write_dflash, write_eagle3, write_mtp_model

GGUF, FOLDER = "maker/cycles-GGUF", "maker/cycles-dspark"
SIZES = Sizes("llama", 4, 64, COUNT)
PROMPT = "ab" * 12


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A fake hub with a perfect drafter for the cyclic target, the only published one."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "no-ollama"))
    known = [
        Published("Cycles", "DFlash", "gguf", GGUF, "https://example.org"),
        Published("Cycles", "DSpark", "safetensors", FOLDER, "https://example.org"),
    ]
    entries = published._Registry({"Cycles": SIZES}, known)
    monkeypatch.setattr(published, "registry", lambda: entries)
    with serving() as hub:
        use_hub(hub, tmp_path / "hub", monkeypatch)
        put(hub, write_dflash(tmp_path / "perfect.gguf", perfect=True))
        yield hub


def put(hub: FakeHub, path: Path) -> None:
    hub.repositories[GGUF] = FakeRepository({"cycles-DFlash-Q8_0.gguf": path.read_bytes()})


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_cycles(tmp_path / "cycles.gguf")


def said(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    """Return a command's output, or its standard error if it fails."""
    capsys.readouterr()
    assert main([*map(str, words)]) == code
    written = capsys.readouterr()
    return written.err if code else written.out


# -- the registry ----------------------------------------------------------------------------------


def test_every_registry_entry_has_a_target_a_name_and_sources():
    entries = registry()
    names = [drafter.name for drafter in entries.drafters]
    assert len({*names}) == len(names)
    assert {drafter.target for drafter in entries.drafters} == {*entries.targets}
    for drafter in entries.drafters:
        name = hub_names.parse_hub_name(drafter.name)
        assert name is not None
        assert not name.file
        assert (drafter.format == "gguf") or hub_names.is_hub_name(drafter.name)
        gain = [drafter.gain.source] if drafter.gain else []
        assert all(source.startswith("https://") for source in [drafter.source, *gain])


def of(files: ModelFiles, sizes: Sizes, said: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the targets of the drafters found for a model."""
    monkeypatch.setattr(drafters, "sizes_of", lambda _: (sizes, said))
    return {drafter.target for drafter in published_for(files)}


def test_a_model_is_recognized_by_size_and_then_by_name(
    tiny_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
):
    large = Sizes("qwen35", 64, 5120, 248320)
    assert of(tiny_files, large, "Qwen3.8 27B", monkeypatch) == {"Qwen3.8-27B"}
    named = replace(tiny_files, name="somebody/Qwen3.6-27B-tuned-GGUF:Q4_K_M")
    assert of(named, large, "", monkeypatch) == {"Qwen3.6-27B"}
    every = {"Qwen3.5-27B", "Qwen3.6-27B", "Qwen3.8-27B"}
    assert of(tiny_files, large, "mine", monkeypatch) == every
    assert of(tiny_files, large._replace(layers=63), "Qwen3.8 27B", monkeypatch) == set()
    assert of(tiny_files, large._replace(architecture="qwen3"), "", monkeypatch) == set()


def test_a_checkpoint_is_recognized_by_its_config(tiny_files: ModelFiles, tmp_path: Path):
    config = {"model_type": "qwen3_5_text", "num_hidden_layers": 32, "hidden_size": 2560}
    text = json.dumps({"text_config": {**config, "vocab_size": 248320}})
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    files = replace(tiny_files, folder=tmp_path, weights=None, engine="mlx")
    assert [drafter.name for drafter in published_for(files)] == ["z-lab/Qwen3.5-4B-DFlash"]


def test_draft_layers_are_not_counted(tmp_path: Path):
    sizes, _ = drafters.sizes_of(write_mtp_model(tmp_path / "model.gguf", perfect=True))
    assert sizes.layers == 4


# -- pull, models, rm ------------------------------------------------------------------------------


def test_a_published_drafter_is_suggested_downloaded_listed_and_removed(
    hub: FakeHub, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    line = said(capsys, "pull", target).splitlines()[1]
    way = f"is published: `paceline pull {target} --drafter` downloads it"
    assert line == f"a drafter for Cycles (DFlash) {way}"
    assert hub.downloads() == []
    assert "is installed" in said(capsys, "pull", target, "--drafter").splitlines()[1]
    asked = len(hub.downloads())
    value = json.loads(said(capsys, "pull", target, "--drafter", "--offline", "--json"))
    assert value["drafter"] == {"name": GGUF, "form": "DFlash", "bytes": None, "here": True}
    assert len(hub.downloads()) == asked, "an installed drafter is not downloaded again"
    listed = json.loads(said(capsys, "models", "--json"))
    (head,) = (model for model in listed if model["head"])
    assert head["head"]["models"] == [str(target)]
    assert [model["name"] for model in listed if model["here"]] == [str(target), head["name"]]
    assert f"  + {head['name']}" in said(capsys, "models")
    shown = json.loads(said(capsys, "show", str(target), "--json"))
    assert shown["drafters"] == [head["about"]]
    said(capsys, "rm", head["name"])
    assert not [*(tmp_path / "hub").rglob("*.gguf")]
    assert "is published" in said(capsys, "pull", target)
    folder = published.registry().drafters[1]
    hub.repositories[FOLDER] = FakeRepository({"model.safetensors": bytes(2_000_000)})
    assert "(DSpark, 2.0 MB) is published" in folder.line("model", folder.size())


def full_disk(monkeypatch: pytest.MonkeyPatch, **_: Any) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())


def offline(monkeypatch: pytest.MonkeyPatch, **_: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def unknown(monkeypatch: pytest.MonkeyPatch, **_: Any) -> None:
    monkeypatch.setattr(published, "registry", lambda: published._Registry({}, []))


def of_another(hub: FakeHub, tmp_path: Path, **_: Any) -> None:
    fields = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(COUNT - 1)]}
    put(hub, write_dflash(tmp_path / "other.gguf", perfect=False, **fields))


def truncated(hub: FakeHub, tmp_path: Path, **_: Any) -> None:
    path = tmp_path / "perfect.gguf"
    path.write_bytes(path.read_bytes()[:-1000])
    put(hub, path)


def of_another_kind(hub: FakeHub, tmp_path: Path, **_: Any) -> None:
    put(hub, write_eagle3(tmp_path / "eagle.gguf", perfect=False))


FAULTS: list[tuple[Callable[..., None], str]] = [
    (full_disk, "the disk is full"),
    (offline, f"cannot download {GGUF}"),
    (unknown, "no published drafter for"),
    (of_another, "a drafter for another target"),
    (truncated, f"is truncated; download it again; `paceline rm {GGUF}:Q8_0` removes it"),
    (of_another_kind, "does not contain a dflash drafter"),
]


@pytest.mark.parametrize(("fault", "expected"), FAULTS)
def test_an_unavailable_or_unusable_drafter_is_a_one_line_error(
    fault: Callable[..., None],
    expected: str,
    hub: FakeHub,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    said(capsys, "pull", target)
    fault(hub=hub, tmp_path=tmp_path, monkeypatch=monkeypatch)
    written = said(capsys, "pull", target, "--drafter", "--quiet", code=2)
    assert expected in written
    assert written.count("\n") == 1
    assert not [*(tmp_path / "hub").rglob("*.incomplete")]


def test_a_drafter_is_not_a_model(hub: FakeHub, capsys: pytest.CaptureFixture[str]):
    assert "use it with --drafter dflash:NAME" in said(capsys, "pull", GGUF, "--quiet", code=2)


# -- auto ------------------------------------------------------------------------------------------


def test_auto_uses_an_installed_drafter(
    hub: FakeHub, target: Path, capsys: pytest.CaptureFixture[str]
):
    said(capsys, "pull", target, "--drafter")
    with load(str(target), cache_tokens=256) as model:
        plain = model.generate(PROMPT, raw=True, max_tokens=60, drafter="none")
        found = model.generate(PROMPT, raw=True, max_tokens=60)
        assert found.drafter == f"suffix+dflash:{GGUF}"
        assert found.token_ids == plain.token_ids
        assert f"drafter suffix+dflash:{GGUF}" in found.line()
        named = {"policy": "fixed", "drafter": f"dflash:{GGUF}"}
        fixed = model.generate(PROMPT, raw=True, max_tokens=60, **named)
        assert fixed.stats.accepted_by.keys() == {"dflash"}
        assert "(dflash " in fixed.line()


def test_auto_skips_an_incompatible_drafter_with_one_warning(
    hub: FakeHub, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    of_another(hub, tmp_path)
    said(capsys, "pull", target, "--drafter", code=2)
    with load(str(target), cache_tokens=256, progress=Progress()) as model:
        for _ in range(2):
            assert model.generate(PROMPT, raw=True, max_tokens=4).drafter == "suffix"
    written = capsys.readouterr().err
    assert written.count("a drafter for another target") == written.count("continues without") == 1


@pytest.mark.mlx
def test_auto_uses_a_safetensors_checkpoints_head(
    hub: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    from support import mlx

    mlx.needs()
    checkpoint = mlx.checkpoint(tmp_path / "cycles", "llama", num_hidden_layers=4)
    config = {"num_target_layers": 4, "vocab_size": mlx.VOCAB, "mask_token_id": mlx.VOCAB - 1}
    write_checkpoint(tmp_path / "head", tiny_config(**config, taps=(1, 2)))
    files = {path.name: path.read_bytes() for path in (tmp_path / "head").iterdir()}
    hub.repositories[FOLDER] = FakeRepository(files)
    sizes = SIZES._replace(vocabulary=mlx.VOCAB)
    known = published._Registry({"Cycles": sizes}, published.registry().drafters)
    monkeypatch.setattr(published, "registry", lambda: known)
    resolve_drafter(FOLDER)
    with mlx.model(checkpoint, tmp_path / "cache", cache_tokens=512) as model:
        plain = model.generate("a b", raw=True, max_tokens=20, drafter="none")
        found = model.generate("a b", raw=True, max_tokens=20)
        assert found.drafter == f"suffix+dflash:{FOLDER}"
        assert found.token_ids == plain.token_ids
    said(capsys, "rm", FOLDER)
    assert all(drafter.find() is None for drafter in known.drafters)
