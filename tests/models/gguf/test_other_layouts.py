"""GGUF files of ollama's own converters, made of llama.cpp's: refused with what works instead."""

import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.errors import ModelError
from paceline.models import resolve
from paceline.storage.gguf_file import read_gguf
from support.errors import raises
from support.families import write_gguf_of

FLOAT32 = 6


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def rewritten(
    path: Path,
    *,
    fields: Mapping[str, float] = {},
    without: str = "",
    names: Mapping[str, str] = {},
) -> Path:
    """Write the file again: with further fields, without one, and with other names.

    A name has as many letters as the one before, so that no offset changes.
    """
    read = read_gguf(path)
    data = [item.data for item in read.tensors]
    raw = {name: bytes(value) for name, value in read.raw.items() if name != without}
    for name, number in fields.items():
        raw[name] = text(name) + struct.pack("<If", FLOAT32, number)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(data), len(raw)) + b"".join(raw.values())
    offset = 0
    for tensor in read.tensors:
        sizes, name = tensor.shape[::-1], names.get(tensor.name, tensor.name)
        head += text(name) + struct.pack(
            f"<I{len(sizes)}QIQ", len(sizes), *sizes, tensor.kind, offset
        )
        offset += -(-tensor.data.nbytes // 32) * 32
    padded = [item.tobytes() + bytes(-item.nbytes % 32) for item in data]
    result = path.with_name("rewritten.gguf")
    result.write_bytes(head + bytes(-len(head) % 32) + b"".join(padded))
    return result


@pytest.fixture
def gemma3(tmp_path: Path) -> Path:
    return write_gguf_of("gemma3_text", tmp_path / "m.gguf")


def refusal(path: Path, tmp_path: Path) -> str:
    with raises(ModelError) as caught:
        resolve(str(path), tmp_path / "cache")
    return str(caught.value)


def test_a_file_that_is_written_again_is_opened(gemma3: Path, tmp_path: Path):
    assert resolve(str(rewritten(gemma3)), tmp_path / "cache").weights is not None


@pytest.mark.parametrize(
    "field", ["mm.tokens_per_image", "rope.global.freq_base", "rope.local.freq_base"]
)
def test_gemma_3_with_ollamas_own_metadata_is_refused(field: str, gemma3: Path, tmp_path: Path):
    message = refusal(rewritten(gemma3, fields={f"gemma3.{field}": 1e4}), tmp_path)
    assert (
        f"layout of ollama's own converter, not in llama.cpp's (it has gemma3.{field})" in message
    )
    assert "use a gemma3 file of the hub" in message


def test_gemma_3_without_the_epsilon_of_its_norms_is_refused(gemma3: Path, tmp_path: Path):
    name = "gemma3.attention.layer_norm_rms_epsilon"
    assert f"(it has no {name})" in refusal(rewritten(gemma3, without=name), tmp_path)


@pytest.mark.parametrize("form", ["gemma3_text", "ministral3"])
def test_a_file_with_an_image_encoder_inside_is_refused(form: str, tmp_path: Path):
    path = write_gguf_of(form, tmp_path / "m.gguf")
    renamed = {"blk.1.attn_norm.weight": "v.1.attention_norm.wei"}
    message = refusal(rewritten(path, names=renamed), tmp_path)
    assert "it has the tensor v.1.attention_norm.wei" in message


def test_gpt_oss_under_ollamas_name_is_refused_with_the_name_that_works(
    tmp_path: Path, tiny_gguf: Path
):
    content = tiny_gguf.read_bytes()
    path = tmp_path / "gptoss.gguf"
    path.write_bytes(content.replace(text("llama"), text("gptoss"), 1))
    assert "use a gpt-oss file of the hub" in refusal(path, tmp_path)
