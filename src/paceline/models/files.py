"""A model that is ready for an engine: a graph, its tokenizer, its template, its facts.

Knows two kinds of folder that can be used as they are: one that paceline prepared, for OpenVINO
or Core ML (it has a manifest), and one that others exported for OpenVINO; `checkpoint` knows a
third. Knows nothing about fetching or converting. The rule: everything that is missing from a
folder is named in one error.
"""

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from paceline.errors import ModelError
from paceline.models import hf_config as foreign
from paceline.models.generation_config import Settings, read_generation_config
from paceline.models.manifest import (
    GRAPH,
    REQUIRED,
    TOKENIZER,
    WEIGHTS,
    Facts,
    read_manifest,
)
from paceline.models.template import ChatTemplate
from paceline.models.thinking import Thinking
from paceline.models.tokenizer import Tokenizer
from paceline.storage.manifest import MANIFEST

_CONSTANT = re.compile(rb'offset="(\d+)" size="(\d+)"')
CONVERT_ADVICE = "convert it once with `paceline convert {} --to openvino --weights int8`"


@dataclass(frozen=True)
class ModelFiles:
    """A model on this disk that an engine can open."""

    name: str  # what the user asked for
    folder: Path
    facts: Facts
    fingerprint: str  # identity of graph and weights, hex; the same in every run
    chat_template: str | None
    source: str  # what it was made from, for people
    engine: str = "openvino"  # who can run it

    @property
    def context_length(self) -> int:
        """The most tokens that prompt and answer may have together."""
        return self.facts.context_length

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self.facts.stop_token_ids

    @property
    def path(self) -> Path:
        """What its engine opens: the OpenVINO graph, whose weights lie beside it, or the folder."""
        return self.folder / GRAPH if self.engine == "openvino" else self.folder

    @property
    def settings(self) -> Settings:
        """How its authors say it should be sampled. Raises ModelError when that is nonsense."""
        return read_generation_config(self.folder)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, read at the first call. Raises ModelError when it cannot be read."""
        return self._tokenizer

    def template(self) -> ChatTemplate:
        """The chat template, compiled at the first call. Raises ModelError when there is none."""
        return self._template

    def thinking(self) -> Thinking:
        """How the model marks its thoughts, and how they are turned off."""
        return self._thinking

    @cached_property
    def _thinking(self) -> Thinking:
        return Thinking(self.chat_template, self.tokenizer, self.name)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        path = self.folder / TOKENIZER
        return Tokenizer(path, bos_token_id=self.facts.bos_token_id, add_bos=self.facts.add_bos)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(
            self.chat_template,
            bos_token=self.facts.bos_token,
            eos_token=self.facts.eos_token,
            model=self.name,
        )


def open_folder(folder: Path, name: str) -> ModelFiles:
    """The model in `folder`, used where it is.

    Raises ModelError that names every missing piece, or says what to do with a folder that holds
    another kind of model.
    """
    if (folder / MANIFEST).exists():
        return _prepared(folder, name)
    missing = [piece for piece in (*REQUIRED, "config.json") if not (folder / piece).is_file()]
    if GRAPH in missing:
        raise ModelError(_no_graph(folder, missing))
    if missing:
        raise ModelError(
            f"{folder} is not a whole OpenVINO model: {', '.join(missing)} missing; "
            "export or download it again"
        )
    _check_weights(folder)
    facts = foreign.read_facts(folder)
    template = foreign.read_template(folder)
    return ModelFiles(name, folder, facts, _stat_fingerprint(folder), template, str(folder))


def _prepared(folder: Path, name: str) -> ModelFiles:
    manifest = read_manifest(folder)
    if manifest.engine == "openvino":
        _check_weights(folder)
    kind = manifest.source.get("kind", "unknown")
    rest = " ".join(text for key, text in manifest.source.items() if key not in ("kind", "sha256"))
    source = f"{kind}: {rest}"
    template = foreign.read_template(folder)
    return ModelFiles(
        name, folder, manifest.facts, manifest.fingerprint, template, source, manifest.engine
    )


def _no_graph(folder: Path, missing: list[str]) -> str:
    weights = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    if weights and "config.json" not in missing:
        return (
            f"{folder} holds a Hugging Face checkpoint, not an OpenVINO model; "
            + CONVERT_ADVICE.format(folder)
            + ", or run it as it is with --engine mlx"
        )
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return f"{folder} holds no OpenVINO model; for its GGUF file, give the path {ggufs[0]}"
    return f"{folder} is not an OpenVINO model: {', '.join(missing)} missing"


def _check_weights(folder: Path) -> None:
    """Raise ModelError when the graph is cut off or speaks of weights past the end of the file."""
    try:
        graph = (folder / GRAPH).read_bytes()
        size = (folder / WEIGHTS).stat().st_size
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {error.strerror or error}") from error
    if not graph.rstrip().endswith(b"</net>"):
        raise ModelError(f"{folder / GRAPH} is not a whole OpenVINO graph (truncated?)")
    end = max((int(at) + int(length) for at, length in _CONSTANT.findall(graph)), default=0)
    if end > size:
        raise ModelError(
            f"{folder / WEIGHTS} has {size} bytes but the graph needs {end} (truncated?); "
            "fetch or export it again"
        )


def _stat_fingerprint(folder: Path) -> str:
    # No checksums to go by and gigabytes to hash: names, sizes and times identify the weights.
    digest = hashlib.sha256()
    for name in (GRAPH, WEIGHTS):
        stat = (folder / name).stat()
        digest.update(f"{name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
