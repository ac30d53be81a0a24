"""benchmarks/gpu_rows.py on the processor, whose classes are known."""

from pathlib import Path
from typing import Any

from paceline.engines.llamacpp.native import NativeModel
from support.llamacpp import library
from support.scripts import script

gpu_rows: Any = script("gpu_rows")
random_gguf: Any = script("random_gguf")


def test_q8_rows_are_one_class_on_the_cpu_alone_and_batched(tmp_path: Path):
    library("llama.cpp")
    path = tmp_path / "random.gguf"
    shape = random_gguf.Shape(2, 256, 512, 4, 2, 64, 700, 512)
    random_gguf.write_random(path, shape, "Q8_0")
    device = gpu_rows.Device(0)
    model = NativeModel(device, path)
    alone, together = gpu_rows.measure(device, model, "q8_0:f16", [40])
    model.close()
    assert device.names()
    assert alone["classes"] == ["1-16, 32"]
    assert alone["by_position"] == {40: ["1-16, 32"]}
    assert alone["repeats"] == []
    assert alone["mixed"] == {"1-16, 32": 0}
    for result in together["together"]:
        differences = {name: count for name, count in result.items() if "differ" in name}
        assert not any(differences.values()), result
