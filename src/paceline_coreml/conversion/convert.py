"""Converts a model to a Core ML artifact: shards, embeddings, rotary tables, tokenizer, manifest.

Invariant: a conversion can be interrupted at any time and resumed. Each shard is built in a
temporary folder and then moved. `making.json` describes the conversion; the manifest comes last.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import paceline
from paceline.errors import InvalidRequest
from paceline.models import GENERATION, TEMPLATE, TOKENIZER, Progress
from paceline.storage.coreml import EMBEDDINGS, MAKING, fingerprint_of
from paceline.storage.files import read_json, sha256_of, size_of, write_json, writing
from paceline.storage.manifest import MANIFEST, FileRecord, remember
from paceline.system.machine import memory_bytes
from paceline_coreml.conversion.checkpoint import damage_reported
from paceline_coreml.conversion.compress import check_patterns, compress
from paceline_coreml.conversion.families import open_family
from paceline_coreml.conversion.families.dflash import open_drafter
from paceline_coreml.conversion.family import Family
from paceline_coreml.conversion.scratch import OUTPUT, TEMPORARY, check_space, scratch
from paceline_coreml.conversion.shards import (
    ShardSizes,
    convert_head,
    convert_layers,
    input_shapes,
    state_shapes,
    static_functions,
)
from paceline_coreml.conversion.source import Source
from paceline_coreml.conversion.topology import (
    LayerSize,
    Span,
    even_topology,
    parse_topology,
    split_evenly,
)
from paceline_coreml.engine.artifact import (
    KIND,
    MAX_STATES,
    ROTARY,
    VERSION,
    Artifact,
    read_artifact,
)
from paceline_coreml.options import (
    BYTES_PER_WEIGHT,
    ConversionOptions,
    with_defaults,
)

CONV_SLOTS = 64
"""Minimum rows of a convolution state: with 2 lags, a block can roll back by up to 62 rows."""

_SLOTS = 2048
"""Default context length, unless the model's own is shorter."""

_SLOTS_UNIT = 32
"""Divisor of all state sizes (coremltools issue 2631)."""

_MEGABYTE = 1 << 20


def convert(
    source: Source,
    out: Path,
    options: ConversionOptions,
    *,
    progress: Progress,
) -> Artifact:
    """Create the artifact in a new folder `out`, or resume the same conversion there.

    Raises:
        ModelError: the checkpoint cannot be read, or its family or format is not supported.
        InvalidRequest: the folder has other contents or cannot be written, or the options do not
            match the model.
    """
    model = open_model(source, options)
    chosen = options.functions or options.flexible or options.stateless or source.target
    if not chosen and 1 not in model.options.functions:
        progress.note(
            "creating no function for single rows: its copy of the weights would leave too little "
            "of this machine's memory; --functions 1,8 creates it"
        )
    family, options = model.family, model.options
    parts = list(_parts(family, options))
    about = {
        "name": source.name,
        "source": source.about,
        "weights_of": source.identity,
        "recipe": asdict(options),
        "facts": {**asdict(source.facts), "context_length": options.slots},
        "made_by": f"paceline {paceline.__version__}",
    }
    _check_space(out, model, parts)
    with writing(out):
        if _begin(out, about):
            return read_artifact(out)
        with progress.task(
            f"converting {source.name} to Core ML", len(parts), unit="packages"
        ) as on:
            for done, part in enumerate(parts):
                if not (out / part.path).exists():
                    _make(part, model, out)
                on(done + 1)
        np.save(out / EMBEDDINGS, family.embeddings().numpy().astype(np.float16))
        np.save(out / ROTARY, family.rope_tables())
        shutil.copyfile(source.tokenizer, out / TOKENIZER)
        settings = source.tokenizer.with_name(GENERATION)
        if settings.is_file():
            shutil.copyfile(settings, out / GENERATION)
        if source.template is not None:
            (out / TEMPLATE).write_text(source.template, encoding="utf-8")
        _describe(out, about, model, parts)
        (out / MAKING).unlink()
    return read_artifact(out)


class OpenModel(NamedTuple):
    family: Family
    options: ConversionOptions
    """Options with the defaults of the model's task."""
    sizes: ShardSizes


def open_model(source: Source, options: ConversionOptions) -> OpenModel:
    """Open a model, and choose the sizes for its conversion.

    Raises InvalidRequest if there are more slots than the model's context length.
    """
    context = source.facts.context_length
    if options.slots > context:
        raise InvalidRequest(
            f"slots is {options.slots}; the context length of {source.name} is {context}"
        )
    options = replace(options, slots=options.slots or min(_SLOTS, context))
    if source.target is not None:
        drafter, options = open_drafter(source.checkpoint, source.target, options)
        slots = options.slots + options.rows // 2  # the block has its own slots
        sizes = ShardSizes(options.rows, slots, 0, flexible=False, stateless=options.stateless)
        return OpenModel(drafter, options, sizes)

    def opened(slots: int, conv_slots: int) -> Family:
        return open_family(
            source.checkpoint, slots=slots, conv_slots=conv_slots, routing=options.routing
        )

    shape = opened(options.slots, CONV_SLOTS).shape
    # The checkpoint's weights usually have two bytes; each function has a copy in memory.
    copies = 2 * size_of(source.checkpoint, links=True) * BYTES_PER_WEIGHT[options.weights] / 2
    options = with_defaults(options, shape.task, single=copies <= memory_bytes() / 2)
    # A pass writes all its rows before it reads, so the state holds them and the rows before them.
    needed = -(-(options.rows + shape.lags) // _SLOTS_UNIT) * _SLOTS_UNIT
    conv_slots = max(CONV_SLOTS, needed) if shape.lags else CONV_SLOTS
    sizes = ShardSizes(
        options.rows,
        options.slots,
        conv_slots,
        flexible=len(options.functions) != 1,
        stateless=options.stateless,
    )
    return OpenModel(opened(options.slots, conv_slots), options, sizes)


class _Part(NamedTuple):
    path: str
    span: Span
    taps: tuple[int, ...] | None
    """Tapped layers; None: a part of the head."""
    weights: Mapping[str, int]
    """Name of each weight -> its number of elements."""
    states: Mapping[str, Sequence[int]]
    """Name of each state that is an input and output -> its shape."""

    def entry(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"path": self.path, "start": self.span.start, "end": self.span.end}
        entry |= {"taps": list(self.taps)} if self.taps else {}
        return entry | ({"states": dict(self.states)} if self.states else {})


def _parts(family: Family, options: ConversionOptions) -> Iterator[_Part]:
    shape = family.shape
    tapped = range(shape.layers) if options.taps == "all" else sorted(options.taps)
    unknown = [tap for tap in tapped if not 0 <= tap < shape.layers]
    if unknown:
        raise InvalidRequest(f"cannot tap layers {unknown}; the model has {shape.layers} layers")
    sizes, states = _weight_sizes(family)
    check_patterns(options.keep, [*(name for names in sizes for name in names), "head.weight"])
    if options.topology is not None:
        spans = parse_topology(options.topology, shape.layers)
    else:
        per_weight = BYTES_PER_WEIGHT[options.weights]
        layers = [
            LayerSize(int(sum(layer.values()) * per_weight), len(layer_states))
            for layer, layer_states in zip(sizes, states, strict=True)
        ]
        spans = even_topology(layers, LayerSize(options.megabytes * _MEGABYTE, MAX_STATES))
    for span in spans:
        taps = tuple(tap for tap in tapped if span.start <= tap < span.end)
        weights = {name: size for part in sizes[slice(*span)] for name, size in part.items()}
        outside = {
            name: shape
            for part in states[slice(*span)]
            if options.stateless
            for name, shape in part.items()
        }
        path = f"layers-{span.start:03}-{span.end:03}.mlpackage"
        yield _Part(path, span, taps, weights, outside)
    whole = [Span(0, len(shape.labels))]  # a classifier's head is small
    for span in whole if shape.labels else split_evenly(shape.vocab_size, options.head_rows):
        weights = {"head.weight": (span.end - span.start) * shape.hidden_size}
        yield _Part(f"head-{span.start:06}-{span.end:06}.mlpackage", span, None, weights, {})


def _weight_sizes(
    family: Family,
) -> tuple[list[dict[str, int]], list[dict[str, tuple[int, ...]]]]:
    """Return the elements of weights and the shapes of states, by name.

    There is one dictionary per layer. This reads every tensor once before any conversion. Raises
    ModelError if one cannot be read.
    """
    sizes: list[dict[str, int]] = []
    states: list[dict[str, tuple[int, ...]]] = []
    for index in range(family.shape.layers):
        with damage_reported(f"the tensors of layer {index}"):
            layer = family.layer(index)
        named = layer.named_parameters(f"layers.{index}")
        sizes.append({name: weight.numel() for name, weight in named})
        states.append(state_shapes(layer, index))
    family.final(), family.embeddings(), family.head()
    return sizes, states


def _check_space(out: Path, model: OpenModel, parts: Sequence[_Part]) -> None:
    """Raise ModelError if the disk has no room for missing packages, or to build the largest."""
    shape, options = model.family.shape, model.options
    counts = [sum(part.weights.values()) for part in parts if not (out / part.path).exists()]
    stored = BYTES_PER_WEIGHT[options.weights]
    # coremltools writes a package twice in float16, and twice as stored to copy its functions.
    twice = 2 * (2 + (stored if len(options.functions) > 1 else 0))
    work, needed = Path(tempfile.gettempdir()), int(twice * max(counts, default=0))
    check_space(work, "a package", needed, TEMPORARY)
    parent = next(path for path in (out, *out.absolute().parents) if path.is_dir())
    shared = needed if parent.stat().st_dev == work.stat().st_dev else 0
    embeddings = 2 * shape.vocab_size * shape.hidden_size if counts else 0
    check_space(parent, out.name, shared + embeddings + int(stored * sum(counts)), OUTPUT)


def _begin(out: Path, about: Mapping[str, Any]) -> bool:
    """Start or resume a conversion in `out`; return True if it is complete.

    Raises InvalidRequest if `out` has other contents.
    """
    out.mkdir(parents=True, exist_ok=True)
    done = (out / MANIFEST).exists()
    if not done and not (out / MAKING).exists():
        if any(out.iterdir()):
            raise InvalidRequest(f"{out} is not empty; choose another folder, or remove it")
        write_json(out / MAKING, about)
    recorded = read_json(out / (MANIFEST if done else MAKING))
    settings = json.loads(json.dumps(about))
    differing = [key for key in settings if recorded.get(key) != settings[key]]
    if differing:
        raise InvalidRequest(
            f"{out} has a conversion with another {', '.join(differing)}; choose another folder, "
            "or remove it"
        )
    return done


def _make(part: _Part, model: OpenModel, out: Path) -> None:
    """Build one package and move it into `out` atomically."""
    with scratch() as work:
        with damage_reported(f"the weights of {part.path}"):
            package = _build(part, model, work)
        # Moving from another disk is not atomic, but the rename after it is.
        staged = out / f".{part.path}"
        shutil.rmtree(staged, ignore_errors=True)
        shutil.move(package, staged)
        staged.rename(out / part.path)


def _build(part: _Part, model: OpenModel, work: Path) -> Path:
    family, options, sizes = model
    if part.taps is None:
        program = convert_head(family, *part.span, sizes=sizes)
    else:
        program = convert_layers(family, *part.span, sizes=sizes, taps=part.taps)
    program = compress(program, options.weights, options.keep, part.weights)
    package = work / part.path
    program.save(str(package))
    if len(options.functions) < 2:
        return package
    shapes = {
        rows: {"hidden": (1, family.shape.stream_size, rows, 1)}
        if part.taps is None
        else input_shapes(family, sizes, rows)
        for rows in options.functions
    }
    static = work / f"static-{part.path}"
    static_functions(package, shapes, static)
    return static


def _describe(
    out: Path, about: Mapping[str, Any], model: OpenModel, parts: Sequence[_Part]
) -> None:
    options = model.options
    names = sorted(
        path.relative_to(out).as_posix()
        for path in out.rglob("*")
        if path.is_file() and path.name not in (MAKING, MANIFEST)
    )
    files = {name: FileRecord((out / name).stat().st_size, sha256_of(out / name)) for name in names}
    value = {
        "kind": KIND,
        "version": VERSION,
        **about,
        **artifact_sizes(model.family, options, model.sizes.conv_slots),
        "weights": {"form": options.weights, "float16": list(options.keep)},
        "layer_shards": [part.entry() for part in parts if part.taps is not None],
        "head_shards": [part.entry() for part in parts if part.taps is None],
        "fingerprint": fingerprint_of({name: file.sha256 for name, file in files.items()}),
        "files": {name: asdict(file) for name, file in files.items()},
    }
    write_json(out / MANIFEST, value)
    remember(out, files)


def artifact_sizes(family: Family, options: ConversionOptions, conv_slots: int) -> dict[str, Any]:
    """Return the fields of an `Artifact` that describe the model and its forward passes."""
    shape = family.shape
    return {
        "family": shape.family,
        "task": shape.task,
        "labels": shape.labels,
        "reach": shape.window,
        "layers": shape.layers,
        "hidden_size": shape.hidden_size,
        "stream_size": shape.stream_size,
        "vocab_size": shape.vocab_size,
        "slots": options.slots,
        "rows": options.rows,
        "functions": options.functions,
        "ring": conv_slots if shape.lags else 0,
        "lags": shape.lags,
        "drafts": shape.drafts and asdict(shape.drafts),
    }
