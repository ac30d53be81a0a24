"""A model made into a Core ML artifact: shards, embeddings, rotary tables, tokenizer, manifest.

The rule: it can be stopped at any time and goes on where it was. A shard is made in a temporary
folder and then moved; `making.json` says what is being made, and the manifest is written last.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import paceline
from paceline.engines.coreml.artifact import (
    KIND,
    ROTARY,
    VERSION,
    Artifact,
    fingerprint_of,
    read_artifact,
)
from paceline.errors import InvalidRequest, ModelError
from paceline.models import Progress
from paceline.models.generation_config import GENERATION
from paceline.models.manifest import TEMPLATE, TOKENIZER
from paceline.storage.coreml import EMBEDDINGS, HEAD
from paceline.storage.files import read_json, sha256_of, write_json, writing
from paceline.storage.manifest import MANIFEST
from paceline.tools.coreml.compress import check_patterns, compress
from paceline.tools.coreml.families import open_family
from paceline.tools.coreml.family import Family
from paceline.tools.coreml.recipe import BYTES, Recipe, suited
from paceline.tools.coreml.shards import (
    Sizes,
    convert_head,
    convert_layers,
    shapes_of,
    static_functions,
)
from paceline.tools.coreml.source import Source
from paceline.tools.coreml.topology import Span, even_topology, parse_topology, split_evenly

MAKING = "making.json"

RING = 64
"""Places for recent rows: a block may have up to 62 rows where a family looks back two."""

_MEGABYTE = 1 << 20


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

    def opened(slots: int) -> Family:
        return open_family(source.checkpoint, slots=slots, ring=RING, routing=recipe.routing)

    family = opened(recipe.slots)
    recipe = suited(recipe, family.shape.kind)
    if recipe.slots != family.tables().cos.shape[0]:
        family = opened(recipe.slots)
    parts = list(_parts(family, recipe))
    about = {
        "name": source.name,
        "source": source.about,
        "weights_of": source.identity,
        "recipe": asdict(recipe),
        "facts": {**asdict(source.facts), "context_length": recipe.slots},
        "made_by": f"paceline {paceline.__version__}",
    }
    with writing(out):
        if _begin(out, about):
            return read_artifact(out)
        with progress.task(
            f"converting {source.name} to Core ML", len(parts), unit="packages"
        ) as on:
            for done, part in enumerate(parts):
                if not (out / part.path).exists():
                    _make(part, family, out, recipe, temporary)
                on(done + 1)
        embeddings, head = family.embeddings(), family.head()
        np.save(out / EMBEDDINGS, embeddings.numpy().astype(np.float16))
        if recipe.taps and head is not None and not torch.equal(head, embeddings):
            np.save(out / HEAD, head.numpy().astype(np.float16))
        np.save(out / ROTARY, np.stack(family.tables()))
        shutil.copyfile(source.tokenizer, out / TOKENIZER)
        settings = source.tokenizer.with_name(GENERATION)
        if settings.is_file():
            shutil.copyfile(settings, out / GENERATION)
        if source.template is not None:
            (out / TEMPLATE).write_text(source.template, encoding="utf-8")
        _describe(out, about, family, recipe, parts)
        (out / MAKING).unlink()
    return read_artifact(out)


class _Part(NamedTuple):
    """A package to be made."""

    path: str
    span: Span
    taps: tuple[int, ...] | None
    """Layers that are tapped; None: a part of the head."""
    weights: Mapping[str, int]
    """How many numbers each has, by name."""

    def entry(self) -> dict[str, Any]:
        """As the manifest has it."""
        entry: dict[str, Any] = {"path": self.path, "start": self.span.start, "end": self.span.end}
        return {**entry, "taps": list(self.taps)} if self.taps else entry


def _parts(family: Family, recipe: Recipe) -> Iterator[_Part]:
    shape = family.shape
    tapped = range(shape.layers) if recipe.taps == "all" else sorted(recipe.taps)
    unknown = [tap for tap in tapped if not 0 <= tap < shape.layers]
    if unknown:
        raise InvalidRequest(f"layers {unknown} cannot be tapped; there are {shape.layers}")
    numbers = _numbers(family)
    check_patterns(recipe.keep, [name for names in numbers for name in names])
    if recipe.topology is not None:
        spans = parse_topology(recipe.topology, shape.layers)
    else:
        each = [int(sum(layer.values()) * BYTES[recipe.weights]) for layer in numbers[:-1]]
        spans = even_topology(each, recipe.megabytes * _MEGABYTE)
    for span in spans:
        taps = tuple(tap for tap in tapped if span.start <= tap < span.end)
        weights = {name: size for part in numbers[slice(*span)] for name, size in part.items()}
        yield _Part(f"layers-{span.start:03}-{span.end:03}.mlpackage", span, taps, weights)
    whole = [Span(0, len(shape.labels))]  # a classifier's head is small
    for span in whole if shape.labels else split_evenly(shape.vocab_size, recipe.head_rows):
        yield _Part(f"head-{span.start:06}-{span.end:06}.mlpackage", span, None, numbers[-1])


def _numbers(family: Family) -> list[dict[str, int]]:
    """How many numbers each weight has: for every layer, and last for the head.

    So every tensor is looked at once before anything is made of one.

    Raises:
        ModelError: tensors do not go together.
    """
    found = []
    for index in range(family.shape.layers):
        try:
            layer = family.layer(index)
        except (RuntimeError, ValueError, IndexError) as error:  # torch's ways to say so
            reason = str(error).splitlines()[0]
            raise ModelError(
                f"layer {index} of this {family.shape.family} model cannot be put together from "
                f"its tensors: {reason}"
            ) from error
        named = layer.named_parameters(f"layers.{index}")
        found.append({name: weight.numel() for name, weight in named})
    family.final(), family.embeddings()
    head = family.head()
    size = family.shape.vocab_size * family.shape.hidden_size if head is None else head.numel()
    return [*found, {"head.weight": size}]


def _begin(out: Path, about: Mapping[str, Any]) -> bool:
    """Take up what was begun, or begin. Returns whether all is there already.

    Raises:
        InvalidRequest: something else is there.
    """
    out.mkdir(parents=True, exist_ok=True)
    done = (out / MANIFEST).exists()
    if not done and not (out / MAKING).exists():
        if any(out.iterdir()):
            raise InvalidRequest(f"{out} is not empty; choose another folder, or remove it")
        write_json(out / MAKING, about)
    found = read_json(out / (MANIFEST if done else MAKING))
    wanted = json.loads(json.dumps(about))
    differing = [key for key in wanted if found.get(key) != wanted[key]]
    if differing:
        raise InvalidRequest(
            f"{out} has another conversion, whole or in part (another {', '.join(differing)}); "
            "choose another folder, or remove it"
        )
    return done


def _make(part: _Part, family: Family, out: Path, recipe: Recipe, temporary: Path | None) -> None:
    """One package, whole or not at all."""
    sizes = Sizes(recipe.rows, recipe.slots, RING)
    if part.taps is None:
        program = convert_head(family, *part.span, sizes=sizes)
    else:
        program = convert_layers(family, *part.span, sizes=sizes, taps=part.taps)
    program = compress(program, recipe.weights, recipe.keep, part.weights)
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
    out: Path,
    about: Mapping[str, Any],
    family: Family,
    recipe: Recipe,
    parts: Sequence[_Part],
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
        **about,
        "family": shape.family,
        "task": shape.kind,
        "labels": list(shape.labels),
        "reach": shape.reach,
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
        "fingerprint": fingerprint_of(files),
        "files": files,
    }
    write_json(out / MANIFEST, value)
