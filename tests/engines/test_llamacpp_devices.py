"""The engine llamacpp on devices: choice of a device, offloaded layers, and splits of passes.

Its devices are fake. With a library that has one, in LLAMA_CPP_LIB_PATH, `llamacpp-device` and
`llamacpp-part-device` run the conformance tests on it.
"""

import os
from contextlib import closing
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import paceline
from paceline.decoding.types import FINAL_NORM, Block
from paceline.engines.base import EngineSettings
from paceline.engines.llamacpp import engine as llamacpp_engine
from paceline.engines.llamacpp import libraries
from paceline.engines.llamacpp.binding import Binding, Device, Offload
from paceline.engines.llamacpp.engine import open_llamacpp
from paceline.engines.llamacpp.sequence import LlamaSequence
from paceline.engines.rows import RowRange
from paceline.errors import InvalidRequest, MissingExtra, ModelError
from paceline.storage.progress import Progress
from support.errors import raises
from support.llamacpp import library

UPSTREAM = "llama.cpp"
MUCH = 4 << 30


def device(name: str = "CUDA0", free: int = MUCH, about: str = "a card") -> Device:
    return Device(name, about, free, 0)


def chosen(path: Path, asked: str, *found: Device, **settings: Any) -> tuple[Offload | None, str]:
    said = StringIO()
    binding: Any = SimpleNamespace(name=UPSTREAM, version="1")
    asking = EngineSettings(device=asked, progress=Progress(said), **settings)
    return libraries.offload_for(binding, found, path, 512, asking), said.getvalue()


@pytest.mark.skipif("LLAMA_CPP_LIB_PATH" not in os.environ, reason="LLAMA_CPP_LIB_PATH has none")
def test_a_library_with_a_device_runs_the_conformance_tests_on_it():
    assert library(UPSTREAM).devices()


def test_the_largest_or_named_device_takes_all_layers(tiny_gguf: Path):
    found = [device(free=2 << 30), device("CUDA1"), device("Vulkan0", 8 << 30, "llvmpipe (LLVM)")]
    for asked, name in {"auto": "CUDA1", "CUDA0": "CUDA0", "gpu": "Vulkan0"}.items():
        offload, said = chosen(tiny_gguf, asked, *found)
        assert offload is not None
        assert (offload.device.name, offload.layers, offload.is_whole) == (name, 3, True)
        assert not said
    assert chosen(tiny_gguf, "auto", found[2]) == (None, "")  # the processor is faster
    assert chosen(tiny_gguf, "gpu", *found, taps=(FINAL_NORM,)) == (None, "")


def test_an_unknown_device_is_rejected_with_the_available_ones(tiny_gguf: Path):
    with raises(
        InvalidRequest, "CUDA7", "CUDA0 (a card, 4096 MiB free)", "--device cpu", "CUDA, ROCm"
    ):
        chosen(tiny_gguf, "CUDA7", device())
    with raises(InvalidRequest, "gpu", "has none", "--device cpu"):
        chosen(tiny_gguf, "gpu")
    assert chosen(tiny_gguf, "auto") == (None, "")


def test_a_named_device_takes_the_layers_that_fit_and_auto_reports_its_choice(tiny_gguf: Path):
    little = device(free=libraries._RESERVE + (300 << 10))
    offload, said = chosen(tiny_gguf, "gpu", little)
    assert offload is not None
    assert 1 <= offload.layers <= 2
    assert not offload.is_whole
    offload, said = chosen(tiny_gguf, "auto", little)
    assert offload is None
    for word in (tiny_gguf.name, "runs on the CPU", "CUDA0", "--device gpu puts"):
        assert word in said
    with raises(ModelError, tiny_gguf.name, "CUDA0", "--device cpu"):
        chosen(tiny_gguf, "gpu", device(free=1 << 20))
    assert "puts 0 layers" in chosen(tiny_gguf, "auto", device(free=1 << 20))[1]


def test_the_default_cache_takes_the_devices_free_memory(tiny_gguf: Path):
    few = device(free=libraries._RESERVE + (1 << 20))
    offload, _ = chosen(tiny_gguf, "auto", few, contexts=1000)
    assert offload is not None
    assert 512 <= offload.slots < 1000 * 512
    assert chosen(tiny_gguf, "auto", few, cache_tokens=1000 * 512)[0] is None


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Binding:
    binding = library(UPSTREAM)
    load = binding.load
    monkeypatch.setattr(binding, "devices", lambda: [device()])
    monkeypatch.setattr(
        binding, "load", lambda path, offload=None, _mtp=False: None if offload else load(path)
    )
    return binding


def test_a_listed_file_shows_the_device_that_auto_picks(
    tiny_gguf: Path, failing: Binding, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(libraries, "library_with_devices", lambda _: failing)
    assert libraries.device_for(tiny_gguf) == "all layers on CUDA0 (a card)"
    monkeypatch.setattr(failing, "devices", lambda: [device(free=0)])
    assert libraries.device_for(tiny_gguf) == "the CPU"
    monkeypatch.setattr(failing, "devices", list)
    assert libraries.device_for(tiny_gguf) is None


@pytest.mark.parametrize("free", [MUCH, 0], ids=["fails", "too small"])
def test_auto_falls_back_to_the_cpu_if_a_device_fails_or_is_too_small(
    tiny_gguf: Path, failing: Binding, monkeypatch: pytest.MonkeyPatch, free: int
):
    monkeypatch.setattr(failing, "devices", lambda: [device(free=free)])
    said = StringIO()
    settings = EngineSettings(threads=1, progress=Progress(said))
    with closing(open_llamacpp(tiny_gguf, 512, settings, failing)) as engine:
        assert "device" not in engine.describe()
        assert engine.remark.startswith("all layers on the CPU; devices: CUDA0")
    assert said.getvalue().count("runs on the CPU") == 1
    with raises(ModelError, tiny_gguf.name, "--device cpu"):
        settings = EngineSettings(threads=1, device="gpu")
        open_llamacpp(tiny_gguf, 512, settings, failing)


def test_the_remark_names_the_layers_on_a_device(
    tiny_gguf: Path, failing: Binding, monkeypatch: pytest.MonkeyPatch
):
    opened = SimpleNamespace(remark="")
    monkeypatch.setattr(llamacpp_engine, "LlamaCppEngine", lambda *_, **__: opened)
    open_llamacpp(tiny_gguf, 512, EngineSettings(), failing)
    assert opened.remark.startswith("all layers on CUDA0 (a card); devices: CUDA0")


def test_a_named_device_requires_its_library(monkeypatch: pytest.MonkeyPatch):
    def load(name: str) -> Binding:
        raise OSError(f"no {name}")

    monkeypatch.setattr(libraries, "load", load)
    for asked in ("gpu", "CUDA0"):
        with raises(MissingExtra, asked, "no llama.cpp", "LLAMA_CPP_LIB_PATH"):
            libraries.library_with_devices(asked)
    for asked in ("auto", "cpu"):
        assert libraries.library_with_devices(asked) is None
    monkeypatch.setenv("PACELINE_LLAMACPP", "ik_llama.cpp")
    with raises(MissingExtra, "PACELINE_LLAMACPP"):
        libraries.library_with_devices("gpu")


def test_the_device_setting_requires_the_llamacpp_engine():
    with raises(InvalidRequest, "device", "gpu", "llamacpp", "mlx"):
        paceline.engines.check_settings("mlx", EngineSettings(device="gpu"))


@pytest.mark.parametrize("rows", [RowRange(2, 16), RowRange(3, 4), RowRange(128, 128)])
def test_padded_key_counts_on_a_device_depend_only_on_the_position(rows: RowRange):
    """A library pads keys to a multiple of 256 after the call's last row, padding included."""
    contexts: Any = SimpleNamespace(span=256, counts_padding=True)
    sequence = LlamaSequence.__new__(LlamaSequence)
    sequence._contexts = contexts
    keys: dict[int, int] = {}
    for start in range(0, 600, 7):
        for count in (1, 2, 5, 16, 300):
            for part in sequence.parts(Block([0] * count, 0), start, rows, 16):
                end = start + max(part.stop, part.start + rows.min_rows)
                for row in range(part.start, part.stop):
                    assert keys.setdefault(start + row, -(-end // 256)) == -(-end // 256)
    assert len(set(keys.values())) > 2
