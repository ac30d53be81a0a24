"""GGUF files in Ollama's own layouts: rejected with an alternative."""

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import ModelError
from paceline.models import resolve
from paceline.models.gguf.support import check_layout
from paceline.storage.gguf_file import GgufFile, read_gguf
from support.errors import raises
from support.families import write_gguf_of

EPSILON = "gemma3.attention.layer_norm_rms_epsilon"


@pytest.fixture
def gemma3(tmp_path: Path) -> GgufFile:
    return read_gguf(write_gguf_of("gemma3_text", tmp_path / "m.gguf"))


def refused(file: GgufFile, *names: str) -> None:
    with raises(ModelError, "m.gguf", *names):
        check_layout(Path("m.gguf"), file)


def test_gemma_3_with_ollama_metadata_or_an_image_encoder_is_rejected(gemma3: GgufFile):
    check_layout(Path("m.gguf"), gemma3)
    for name in ("mm.tokens_per_image", "rope.global.freq_base", "rope.local.freq_base"):
        refused(
            replace(gemma3, fields={**gemma3.fields, f"gemma3.{name}": 1e4}),
            f"layout of ollama's own converter, not llama.cpp's (it has gemma3.{name})",
            "use a gemma3 file from the Hugging Face Hub",
        )
    fields = {name: value for name, value in gemma3.fields.items() if name != EPSILON}
    refused(replace(gemma3, fields=fields), f"(it has no {EPSILON})")
    fields = {**gemma3.fields, "general.architecture": "gemma4", "tokenizer.ggml.model": "llama"}
    refused(replace(gemma3, fields=fields), "the tokenizer llama")
    encoder = gemma3.tensors[0]._replace(name="v.blk.0.attn_q.weight")
    refused(replace(gemma3, tensors=[encoder]), "it has the tensor v.blk.0.attn_q.weight")


def test_gpt_oss_under_its_ollama_name_is_rejected_with_a_working_name(
    tmp_path: Path, tiny_gguf: Path
):
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    path = tmp_path / "gptoss.gguf"
    path.write_bytes(tiny_gguf.read_bytes().replace(text("llama"), text("gptoss"), 1))
    with raises(ModelError, path, "use a gpt-oss file from the Hugging Face Hub"):
        resolve(str(path), tmp_path / "cache")


def gguf(version: int = 3, order: str = "<", count: int = 0) -> bytes:
    """Return the header of a GGUF file: version, and numbers of tensors and fields."""
    return b"GGUF" + struct.pack(f"{order}IQQ", version, count, count)


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            ("is a Git LFS pointer; download", "`git lfs pull`"),
        ),
        (b"\n<!DOCTYPE html><html>", ("is a web page, not a GGUF file", "/resolve/")),
        (b"<HTML>", ("is a web page",)),
        (b'<?xml version="1.0"?><net>', ("is XML",)),
        (b'{"error": "Not found"}', ("is JSON", "download the file again")),
        (b"Entry not found", ("not a GGUF file (it begins with b'Entry not found'",)),
        (b"PK\x03\x04 a zip", ("is a ZIP archive", "unpack it")),
        (b"\x1f\x8b\x08", ("is compressed", "decompress it")),
        (b"\x28\xb5\x2f\xfd ", ("is compressed",)),
        (b"\x80\x02}q", ("is a PyTorch checkpoint",)),
        (b"tjgg\x03\0\0\0", ("in GGML's old format",)),
        (struct.pack("<Q", 60) + b'{"__metadata__":{', ("is a safetensors file", "folder")),
        (b"", ("not a GGUF file",)),
        (bytes(40), ("not a GGUF file (it is empty)", "download it again")),
        (b"GGUF", ("version 0",)),
        (gguf(version=1), ("version 1; expected version 2 or 3",)),
        (gguf(), ("has no tokenizer",)),
        (gguf(count=2**40), ("truncated",)),
        (gguf(order=">"), ("is for big-endian computers",)),
    ],
)
def test_a_file_in_another_format_is_rejected_with_a_fix(
    content: bytes, names: tuple[str, ...], tmp_path: Path
):
    (path := tmp_path / "m.gguf").write_bytes(content)
    with raises(ModelError, path, *names):
        resolve(str(path), tmp_path / "cache")
    assert not [*(tmp_path / "cache" / "models").iterdir()], "nothing is made of it"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"general.type": "mmproj"}, "is a projector of images or audio, not a language model"),
        ({"general.architecture": "clip"}, "is a projector of images or audio"),
        ({"general.type": "adapter"}, "is a LoRA adapter"),
        ({"general.type": "imatrix"}, "is an importance matrix"),
        ({"general.type": ["a"]}, "is of the type ['a']"),
        ({"gemma3.decision.type": "policy"}, "(gemma3.decision.type is policy)"),
    ],
)
def test_a_gguf_file_that_is_not_a_language_model_is_reported(
    fields: dict[str, object], name: str, gemma3: GgufFile
):
    refused(replace(gemma3, fields={**gemma3.fields, **fields}), name, "use the GGUF file of")
    check_layout(Path("m.gguf"), replace(gemma3, fields={**gemma3.fields, "general.type": "model"}))
