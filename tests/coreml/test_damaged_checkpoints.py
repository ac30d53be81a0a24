"""Whatever is wrong with a checkpoint, conversion ends with an error of one line."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import PacelineError
from paceline.models import QUIET
from paceline.storage.files import read_json, write_json
from paceline_coreml.conversion.convert import convert
from paceline_coreml.options import ConversionOptions
from support import mlx
from support.coreml import tiny_source
from support.coreml_families import ONE_PER_FAMILY, SLOTS, TinyModel

pytestmark = [pytest.mark.coreml, pytest.mark.slow]

VALUES = [None, -1, 0, 1, 3, 1.5, "x", True, [], {}, [1, 2], float("nan"), "gpt2", "yarn"]
TYPES = [torch.int32, torch.uint8, torch.float64, torch.float8_e4m3fn]


def damage(folder: Path, rng: random.Random) -> str:
    """Change the folder's config, or a tensor; return a description."""
    kind = rng.choice(["value", "inner value", "no value", "no tensor", "shape", "type", "words"])
    if "value" in kind:
        config = read_json(folder / "config.json")
        inner = [value for value in config.values() if isinstance(value, dict) and value]
        where: Any = rng.choice(inner) if kind == "inner value" and inner else config
        name, value = rng.choice(sorted(where)), rng.choice(VALUES)
        where[name] = value
        if kind == "no value":
            del where[name]
        write_json(folder / "config.json", config)
        return f"{kind}: {name} {value}"
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = rng.choice(sorted(tensors))
    tensor = tensors.pop(name)
    if kind == "shape":
        shapes = [tensor[:-1], tensor.T, tensor[None], torch.zeros(0), torch.tensor(1.0)]
        tensors[name] = rng.choice(shapes).contiguous()
    elif kind == "type":
        tensors[name] = tensor.float().to(rng.choice(TYPES))
    elif kind == "words":  # as if mlx-lm had quantized it
        tensors[name] = torch.zeros(len(tensor), 8, dtype=torch.int32).view(torch.uint32)
        tensors[f"{name.removesuffix('weight')}scales"] = torch.ones(len(tensor), 2)
    save_file(tensors, path)
    return f"{kind}: {name}"


@pytest.mark.parametrize("form", [*ONE_PER_FAMILY, "quantized"])
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_checkpoint_is_one_line(form: str, tmp_path: Path):
    if form == "quantized":
        mlx.needs()
        whole = mlx.quantized(mlx.checkpoint(tmp_path / "base", "llama"), tmp_path / "whole")
    else:
        layers = {"layer_types": ["conv", "full_attention"]} if "lfm2" in form else {}
        whole = TinyModel(form, tmp_path / "whole", num_hidden_layers=2, **layers).folder
    rng, rejected = random.Random(form), 0
    for number in range(12):
        folder = Path(shutil.copytree(whole, tmp_path / f"case-{number}"))
        done = [damage(folder, rng) for _ in range(rng.choice([1, 1, 2]))]
        try:
            source = tiny_source(tmp_path, folder)
            convert(source, folder / "out", ConversionOptions(slots=SLOTS), progress=QUIET)
        except PacelineError as error:
            assert "\n" not in str(error), done
            rejected += 1
        except Exception as error:  # the seed of a failure is in its description
            pytest.fail(f"{done}: {error!r}")
    assert rejected > 3
