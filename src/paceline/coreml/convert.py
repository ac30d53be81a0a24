"""A model made into a Core ML artifact: shards, embeddings, rotary tables, tokenizer, manifest.

The rule: it can be stopped at any time and goes on where it was. A shard is made in a temporary
folder and then moved; `making.json` says what is being made, and the manifest is written last.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import paceline
from paceline.artifacts import MANIFEST, digest_of, read_json, sha256_of, write_json, writing
from paceline.coreml.checkpoint import CONFIG
from paceline.coreml.compress import FORMS, compress
from paceline.coreml.families import open_family
from paceline.coreml.family import Family
from paceline.coreml.shards import (
    Sizes,
    convert_head,
    convert_layers,
    shapes_of,
    static_functions,
)
from paceline.coreml.topology import Span, even_topology, parse_topology, split_evenly
from paceline.engines.coreml.artifact import (
    EMBEDDINGS,
    KIND,
    ROTARY,
    VERSION,
    Artifact,
    fingerprint_of,
    read_artifact,
)
from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.models.manifest import TEMPLATE, TOKENIZER, Facts

MAKING = "making.json"

RING = 64
"""Places for recent rows: a block may have up to 62 rows where a family looks back two."""

_BYTES = {"int8": 1.0, "int8-per-tensor": 1.0, "int4": 0.5, "f16": 2.0}
_MEGABYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is to be made of a model.

    Raises:
        InvalidRequest: a value is out of range.

    """

    weights: str = "int8"
    """One of `compress.FORMS`."""
    keep: tuple[str, ...] = ()
    """Patterns of weights that stay float16; see `compress`."""
    rows: int = 4
    """The most rows of a call."""
    functions: tuple[int, ...] = ()
    """Numbers of rows to make static functions for; empty: one for any number."""
    slots: int = 2048
    """The longest text, in tokens."""
    topology: str | None = None
    """As `20+4+6+2`; None: as few packages of layers as `megabytes` allows."""
    megabytes: int = 1500
    """The largest package."""
    head_rows: int = 16384
    """The most tokens in a package of the head."""
    taps: tuple[int, ...] = ()
    """Layers whose hidden states come out, for a drafter."""

    def __post_init__(self) -> None:
        if self.weights not in FORMS:
            raise InvalidRequest(f"weights is {self.weights!r}; expected one of {', '.join(FORMS)}")
        for name in ("rows", "slots", "megabytes", "head_rows"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; expected 1 or more")
        if self.functions and max(self.functions) != self.rows:
            raise InvalidRequest(
                f"functions are for {', '.join(map(str, self.functions))} rows; expected one for "
                f"{self.rows}, the most of a call, among them"
            )


class Source(NamedTuple):
    """What a model is made from."""

    name: str
    checkpoint: Path
    """Config and weights, as Hugging Face has them."""
    words: Path
    """The folder of the tokenizer and the chat template."""
    facts: Facts


def convert(
    source: Source,
    out: Path,
    recipe: Recipe,
    *,
    temporary: Path | None = None,
    progress: Progress,
) -> Artifact:
    """Make the artifact in the folder `out`, or what is missing of it.

    Args:
        source: the model.
        out: an artifact's folder, a new one, or one in which the same was begun.
        recipe: what to make.
        temporary: where shards are made before they are moved to `out`; None: the system's.
        progress: told how far it is.

    Raises:
        ModelError: the checkpoint cannot be read, or is of a family or form not known here.
        InvalidRequest: the folder holds something else or cannot be written, or the recipe does not
            fit the model.
    """
    family = open_family(source.checkpoint, slots=recipe.slots, ring=RING)
    parts = list(_parts(family, recipe))
    about = {
        "name": source.name,
        "weights_of": _identity(source.checkpoint),
        "recipe": asdict(recipe),
        "made_by": f"paceline {paceline.__version__}",
    }
    with writing(out):
        _begin(out, about)
        with progress.task(
            f"converting {source.name} to Core ML", len(parts), unit="packages"
        ) as on:
            for done, part in enumerate(parts):
                if not (out / part.path).exists():
                    _make(part, family, out, recipe, temporary)
                on(done + 1)
        np.save(out / EMBEDDINGS, family.embeddings().numpy().astype(np.float16))
        np.save(out / ROTARY, np.stack(family.tables()))
        for name in (TOKENIZER, TEMPLATE):
            if (source.words / name).is_file():
                shutil.copyfile(source.words / name, out / name)
        _describe(out, source, family, recipe, parts)
        (out / MAKING).unlink()
    return read_artifact(out)


class _Part(NamedTuple):
    """A package to be made."""

    path: str
    span: Span
    taps: tuple[int, ...] | None
    """Layers that are tapped; None: a part of the head."""

    def entry(self) -> dict[str, Any]:
        """As the manifest has it."""
        entry: dict[str, Any] = {"path": self.path, "start": self.span.start, "end": self.span.end}
        return {**entry, "taps": list(self.taps)} if self.taps else entry


def _parts(family: Family, recipe: Recipe) -> Iterator[_Part]:
    shape = family.shape
    unknown = [tap for tap in recipe.taps if not 0 <= tap < shape.layers]
    if unknown:
        raise InvalidRequest(f"layers {unknown} cannot be tapped; there are {shape.layers}")
    if recipe.topology is not None:
        spans = parse_topology(recipe.topology, shape.layers)
    else:
        spans = even_topology(_layer_bytes(family, recipe), recipe.megabytes * _MEGABYTE)
    for span in spans:
        taps = tuple(tap for tap in sorted(recipe.taps) if span.start <= tap < span.end)
        yield _Part(f"layers-{span.start:03}-{span.end:03}.mlpackage", span, taps)
    for span in split_evenly(shape.vocab_size, recipe.head_rows):
        yield _Part(f"head-{span.start:06}-{span.end:06}.mlpackage", span, None)


def _layer_bytes(family: Family, recipe: Recipe) -> list[int]:
    """What each layer will take, about."""
    return [
        int(
            sum(weight.numel() for weight in family.layer(index).parameters())
            * _BYTES[recipe.weights]
        )
        for index in range(family.shape.layers)
    ]


def _begin(out: Path, about: Mapping[str, Any]) -> None:
    """Take up what was begun, or begin.

    Raises:
        InvalidRequest: something else is there.
    """
    out.mkdir(parents=True, exist_ok=True)
    if not (out / MAKING).exists():
        if any(out.iterdir()):
            raise InvalidRequest(f"{out} is not empty; choose another folder, or remove it")
        write_json(out / MAKING, about)
    found, wanted = read_json(out / MAKING), json.loads(json.dumps(about))
    if found != wanted:
        differing = [key for key in wanted if found.get(key) != wanted[key]]
        raise InvalidRequest(
            f"{out} has parts of another conversion (another {', '.join(differing)}); choose "
            "another folder, or remove it"
        )


def _make(part: _Part, family: Family, out: Path, recipe: Recipe, temporary: Path | None) -> None:
    """One package, whole or not at all."""
    sizes = Sizes(recipe.rows, recipe.slots, RING)
    if part.taps is None:
        program = convert_head(family, *part.span, sizes=sizes)
    else:
        program = convert_layers(family, *part.span, sizes=sizes, taps=part.taps)
    program = compress(program, recipe.weights, recipe.keep)
    with tempfile.TemporaryDirectory(dir=temporary, prefix="paceline-coreml-") as work:
        made = Path(work) / part.path
        program.save(str(made))
        if recipe.functions:
            dynamic, made = made, Path(work) / f"static-{part.path}"
            shapes = {
                rows: shapes_of(family, sizes, rows, head=part.taps is None)
                for rows in recipe.functions
            }
            static_functions(dynamic, shapes, made)
        # It may come from another disk: moved to its place beside, and renamed there.
        beside = out / f".{part.path}"
        shutil.rmtree(beside, ignore_errors=True)
        shutil.move(made, beside)
        beside.rename(out / part.path)


def _describe(
    out: Path, source: Source, family: Family, recipe: Recipe, parts: Sequence[_Part]
) -> None:
    """Write the manifest."""
    shape = family.shape
    names = sorted(
        path.relative_to(out).as_posix()
        for path in out.rglob("*")
        if path.is_file() and path.name not in (MAKING, MANIFEST)
    )
    files = {
        name: {"bytes": (out / name).stat().st_size, "sha256": sha256_of(out / name)}
        for name in names
    }
    value = {
        "kind": KIND,
        "version": VERSION,
        "name": source.name,
        "made_by": f"paceline {paceline.__version__}",
        "family": shape.family,
        "layers": shape.layers,
        "hidden_size": shape.hidden_size,
        "stream_size": shape.stream_size,
        "vocab_size": shape.vocab_size,
        "slots": recipe.slots,
        "rows": recipe.rows,
        "functions": list(recipe.functions),
        "ring": RING if shape.lags else 0,
        "lags": shape.lags,
        "weights": {"form": recipe.weights, "float16": list(recipe.keep)},
        "layer_shards": [part.entry() for part in parts if part.taps is not None],
        "head_shards": [part.entry() for part in parts if part.taps is None],
        "facts": {**asdict(source.facts), "context_length": recipe.slots},
        "fingerprint": fingerprint_of(files),
        "files": files,
    }
    write_json(out / MANIFEST, value)


def _identity(checkpoint: Path) -> str:
    """A name for what a checkpoint holds."""
    paths = sorted([*checkpoint.glob("*.safetensors"), checkpoint / CONFIG])
    return digest_of([[path.name, sha256_of(path)] for path in paths])
