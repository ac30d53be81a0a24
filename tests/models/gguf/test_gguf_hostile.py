"""Harmful GGUF files: read or rejected, with memory in proportion to the file."""

import importlib
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ModelError
from paceline.models import gguf
from paceline.storage.gguf_file import NumberArray, read_gguf
from support.errors import raises
from support.tiny import write_tiny

STRING, ARRAY, UINT32 = 8, 9, 4

MEMORY = 16
"""Bytes of Python objects for each byte of a file, at most."""

LEAST_MEMORY = 2**20
"""What reading takes besides."""


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name.encode()) + struct.pack("<I", kind) + value


def array(name: str, kind: int, count: int, items: bytes) -> bytes:
    return field(name, ARRAY, struct.pack("<IQ", kind, count) + items)


def tensor(name: str, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name.encode()) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def packed(fields: list[bytes], tensors: list[bytes] | None = None, data: bytes = b"") -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors or ()), len(fields))
    head += b"".join(fields) + b"".join(tensors or ())
    return head + bytes(-len(head) % 32) + data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


@pytest.fixture
def bounded(path: Path) -> Iterator[None]:
    """Reading may take memory in proportion to the file."""
    importlib.import_module("gguf")  # its memory does not count as a file's
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < LEAST_MEMORY + MEMORY * path.stat().st_size


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize(("kind", "size"), [(0, 1), (UINT32, 4), (7, 1), (12, 8)])
def test_number_arrays_are_not_copied(kind: int, size: int, path: Path):
    count = 2_000_000 // size
    path.write_bytes(packed([array("a", kind, count, b"\x81" * (count * size))]))
    result = read_gguf(path).fields["a"]
    assert isinstance(result, NumberArray)
    assert len(result.values) == count


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("letters", [b"", "日".encode()])
def test_string_arrays_take_proportional_memory(letters: bytes, path: Path):
    path.write_bytes(packed([array("a", STRING, 100_000, text(letters) * 100_000)]))
    assert read_gguf(path).fields["a"] == [letters.decode()] * 100_000


def counting(count: int) -> list[bytes]:
    """Files with counts of items that they do not have."""
    number, none, one = (struct.pack("<Q", value) for value in (count, 0, 1))
    head = b"GGUF" + struct.pack("<I", 3)
    return [
        *(packed([array("a", kind, count, b"\0" * 64)]) for kind in (0, STRING, ARRAY, 12)),
        head + none + number + bytes(64),  # fields
        head + number + none + bytes(64),  # tensors
        head + none + one + text(b"a") + struct.pack("<I", STRING) + number,
        head + none + one + number + bytes(64),  # letters of a name
        head + one + none + text(b"a") + number[-4:] + bytes(64),  # dimensions
    ]


def nested(depth: int) -> bytes:
    inner = struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQI", UINT32, 1, 7)
    return field("a", ARRAY, inner)


METADATA = [
    [field("a", UINT32, bytes(4))] * 2,
    [field("a", 13, bytes(64))],
    [field("a", STRING, text(b"\xff\xfe"))],
    [array("a", STRING, 1, text(b"\x80"))],
    [text(b"\xc3") + struct.pack("<I", 0) + b"\0"],
    [field("general.alignment", UINT32, struct.pack("<I", 48))],
    [field("general.alignment", STRING, text(b"32"))],
]
TENSORS = [
    [tensor("a", (2**32, 2**32), 0, 0)],
    [tensor("a", (2, 2**64 - 1), 1, 0)],
    [tensor("a", (64,), 0, 2**64 - 1)],
    [tensor("a", (0, 5), 0, 0)],
    [tensor("a", (31,), 8, 0)],
    [tensor("a", (64,), 99, 0)],
    [tensor("a", (64,), 4, 0)],
    [tensor("a", (), 0, 0)],
    [tensor("a", (1,) * 1000, 0, 0)],
    [tensor("a", (1,), 0, 0)] * 2,
    [tensor(f"t{n}", (64,), 0, 0) for n in range(50)],  # all of them the same bytes
]
HOSTILE = [
    *((packed([nested(depth)]), "nested") for depth in (1, 100_000)),
    *(
        (content, "GGUF")
        for content in (
            *(content for count in (2**20, 2**31, 2**61, 2**64 - 1) for content in counting(count)),
            *(packed(fields, [], bytes(64)) for fields in METADATA),
            *(packed([], tensors, bytes(256)) for tensors in TENSORS),
        )
    ),
]


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize(("content", "words"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_self_contradictory_file_is_rejected(content: bytes, words: str, path: Path):
    path.write_bytes(content)
    with raises(ModelError, words):
        read_gguf(path)


def test_metadata_values_are_read_back(path: Path):
    content = packed(
        [
            field("i8", 1, b"\xff"),
            field("i16", 3, b"\xfe\xff"),
            field("u64", 10, struct.pack("<Q", 2**64 - 1)),
            field("f32", 6, struct.pack("<f", 0.5)),
            field("f64", 12, struct.pack("<d", 0.1)),
            field("yes", 7, b"\x02"),
            field("no", 7, b"\x00"),
            field("text", STRING, text("größe".encode())),
            array("shorts", 3, 3, struct.pack("<hhh", 1, -2, 3)),
            array("bools", 7, 3, b"\0\1\2"),
            array("texts", STRING, 2, text(b"") + text(b"b")),
            array("none", STRING, 0, b""),
            field("general.alignment", UINT32, struct.pack("<I", 64)),
        ],
        [tensor("a", (4, 2), 0, 64)],
    )
    path.write_bytes(content + bytes(-len(content) % 64 + 64) + struct.pack("<8f", *range(8)))
    file = read_gguf(path)
    arrays = {n: f.values.tolist() for n, f in file.fields.items() if isinstance(f, NumberArray)}
    assert arrays == {"shorts": [1, -2, 3], "bools": [False, True, True]}
    assert {name: value for name, value in file.fields.items() if name not in arrays} == {
        **{"i8": -1, "i16": -2, "u64": 2**64 - 1, "f32": 0.5, "f64": 0.1},
        **{"yes": True, "no": False, "text": "größe", "texts": ["", "b"], "none": []},
        "general.alignment": 64,
    }
    (only,) = file.tensors
    assert only.shape == (2, 4)
    assert only.data.view("<f4").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


STRANGE: list[Any] = [[1, 2], [True], ["a", "b"], "text", 0.5, True, 2**32 - 1, "x" * 10_000]


@pytest.mark.parametrize("strange", STRANGE, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize(
    "name",
    [
        *("general.license", "llama.context_length", "split.count", "tokenizer.chat_template"),
        *(f"tokenizer.ggml.{name}" for name in ("model", "pre", "tokens", "token_type", "merges")),
        *("tokenizer.ggml.eos_token_id", "tokenizer.ggml.add_bos_token"),
    ],
)
def test_a_field_with_an_unexpected_type_is_used_or_rejected(
    name: str, strange: Any, path: Path, tmp_path: Path
):
    write_tiny(path, fields={name: strange})
    try:
        facts = gguf.write_derived(path, read_gguf(path).fields, tmp_path)
    except ModelError as error:
        assert len(str(error)) < 600
        assert "\n" not in str(error)
    else:
        assert facts.context_length > 0
