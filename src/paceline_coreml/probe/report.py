"""Probes of a shape and of a model's layers, and both as gates before a conversion."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import paceline
from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.storage.files import megabytes, size_of
from paceline.storage.report import Report
from paceline_coreml.conversion.checkpoint import read_checkpoint
from paceline_coreml.conversion.conversion_options import ConversionOptions
from paceline_coreml.conversion.convert import OpenModel, open_model
from paceline_coreml.conversion.family import Family
from paceline_coreml.conversion.shards import Sizes
from paceline_coreml.conversion.source import Source
from paceline_coreml.conversion.torch_model import run_layers
from paceline_coreml.engine import packages
from paceline_coreml.engine.artifact import CAUSAL_LM
from paceline_coreml.golden.reference import Reference
from paceline_coreml.probe.checks import Check, LayerChecks, Rows, Settings, convert_layer
from paceline_coreml.probe.layer_shape import LayerShape, check_memory, random_family, shape_of

_THRESHOLD = 0.99
"""Minimum cosine of a row, as `golden` has it."""

_ROWS = 16
"""Fewest rows of a comparison."""


class ProbeOptions(NamedTuple):
    """Options of a probe."""

    weights: str
    """One of `compress.FORMS`."""
    units: str
    """One of `packages.UNITS`, on a Mac."""
    temporary: Path | None
    """Folder for the package; None: the system's."""
    progress: Progress
    stateless: bool = False
    """Whether states are inputs and outputs."""


def probe_shape(shape: LayerShape, options: ProbeOptions) -> Report:
    """Convert and check a layer with random weights.

    Raises InvalidRequest if it does not fit in memory.
    """
    name = f"a layer of the shape {shape}"
    check_memory(name, shape, shape.weights)
    family = random_family(shape)
    stream = np.random.default_rng(0).standard_normal(
        (_row_count(shape.T, shape.S), shape.d), np.float32
    )
    with options.progress.task(f"probing {name}"):
        after = run_layers(family, range(1), stream, slots=shape.S, conv_slots=0, rows=shape.T)
        sizes = Sizes(shape.T, shape.S, 0, flexible=False, stateless=options.stateless)
        return _report(
            name, {"shape": asdict(shape)}, (family, 0, sizes), Rows(stream, after), options
        )


def probe_layer(
    source: Source, model: OpenModel, layer: int, rows: int, options: ProbeOptions
) -> Report:
    """Convert and check one layer of a model, with its weights.

    Args:
        source: the model.
        model: the same, open.
        layer: index of the layer.
        rows: rows of a call.
        options: of the probe.

    Raises:
        ModelError: the checkpoint is damaged.
        InvalidRequest: it is no causal language model, has no such layer, or one that does not fit
            in memory.
    """
    shape, slots = model.family.shape, model.options.slots
    _check_task(source, model)
    if layer >= shape.layers:
        raise InvalidRequest(
            f"layer {layer} is not in {source.name}; expected 0 to {shape.layers - 1}"
        )
    name = f"layer {layer} of {source.name}, {rows} rows"
    weights = sum(weight.numel() for weight in model.family.layer(layer).parameters())
    # transformers has all layers up to this one; embeddings are there twice.
    others = (layer + 1) * weights + 2 * shape.vocab_size * shape.hidden_size
    config = read_checkpoint(source.checkpoint).config
    check_memory(name, shape_of(config, rows=rows, slots=slots), weights, others=others)
    sizes = Sizes(rows, slots, model.sizes.conv_slots, flexible=False, stateless=options.stateless)
    with options.progress.task(f"probing {name}"):
        about = {"model": source.name, "layer": layer, "family": shape.family}
        return _report(
            name,
            about,
            (model.family, layer, sizes),
            _rows_of(source, model.family, layer, sizes),
            options,
        )


def run_gates(source: Source, recipe: ConversionOptions, options: ProbeOptions) -> list[Report]:
    """Probe a layer of the model's shape, then each kind of its layers, with its weights.

    All at every number of rows that calls will have, up to the first report that does not pass.
    Raises as `probe_layer`.
    """
    model = open_model(source, recipe)
    _check_task(source, model)
    reports: list[Report] = []
    for report in _gates(source, model, options):
        reports.append(report)
        if not report.passed:
            break
    return reports


def _check_task(source: Source, model: OpenModel) -> None:
    task = model.family.shape.task
    if task != CAUSAL_LM:
        # A classifier's rows see the whole text, so there are no calls of single rows to compare.
        raise InvalidRequest(f"{source.name} is for {task}; expected a model for {CAUSAL_LM}")


def _gates(source: Source, model: OpenModel, options: ProbeOptions) -> Iterator[Report]:
    config = read_checkpoint(source.checkpoint).config
    widths = model.options.functions or (model.options.rows,)
    for rows in widths:
        yield probe_shape(shape_of(config, rows=rows, slots=model.options.slots), options)
    for layer in _kinds(model.family):
        for rows in widths:
            yield probe_layer(source, model, layer, rows, options)


def _kinds(family: Family) -> list[int]:
    """The first layer of each kind: of those with weights and states of the same shapes."""
    kinds: dict[tuple[Any, ...], int] = {}
    for index in range(family.shape.layers):
        layer = family.layer(index)
        tensors = [*layer.named_parameters(), *layer.named_buffers()]
        kinds.setdefault(tuple((name, tensor.shape) for name, tensor in tensors), index)
    return list(kinds.values())


def _rows_of(source: Source, family: Family, layer: int, sizes: Sizes) -> Rows:
    """Random tokens' rows before a layer, and after it by transformers."""
    embeddings, shape = family.embeddings().numpy(), family.shape
    # Tokens of low norm are noise in float16; see `golden.texts`.
    by_norm = np.argsort(np.linalg.norm(embeddings, axis=1), kind="stable")
    count = _row_count(sizes.rows, sizes.slots)
    tokens = np.random.default_rng(0).choice(by_norm[len(by_norm) // 2 :], count).tolist()
    if source.facts.add_bos and source.facts.bos_token_id is not None:
        tokens[0] = source.facts.bos_token_id
    stream = np.zeros((count, shape.stream_size), np.float32)
    stream[:, : shape.hidden_size] = embeddings[tokens]
    del embeddings
    before = run_layers(
        family,
        range(layer),
        stream,
        slots=sizes.slots,
        conv_slots=sizes.conv_slots,
        rows=sizes.rows,
    )
    reference = Reference(source.checkpoint, layers=layer + 1)
    return Rows(before, reference.run(tokens).streams[layer + 1], reference.experts)


def _row_count(rows: int, slots: int) -> int:
    """Rows of a comparison: of two calls at least."""
    return min(max(2 * rows, _ROWS), slots)


def _report(
    name: str,
    about: Mapping[str, Any],
    layer: tuple[Family, int, Sizes],
    rows: Rows,
    options: ProbeOptions,
) -> Report:
    family, index, sizes = layer
    with tempfile.TemporaryDirectory(dir=options.temporary, prefix="paceline-coreml-") as work:
        folder = Path(work)
        artifact = convert_layer(family, index, folder, sizes=sizes, weights=options.weights)
        size = size_of(folder)
        settings = Settings(options.units, _THRESHOLD, options.progress.say)
        checks = LayerChecks(artifact, family.rope_tables(), rows, settings)
        results = checks.run()
    passed = all(check.passed is not False for check in results)
    on_a_mac = packages.on_a_mac()
    value = {
        "paceline": paceline.__version__,
        **about,
        "rows": sizes.rows,
        "slots": sizes.slots,
        "weights": options.weights,
        "stateless": options.stateless,
        "bytes": size,
        "units": options.units if on_a_mac else packages.REHEARSED,
        "passed": passed,
        "checks": [asdict(check) for check in results],
        "milliseconds": checks.milliseconds,
    }
    return Report(value, passed, "\n".join(_lines(name, size, results, checks.milliseconds)))


def _lines(name: str, size: int, checks: list[Check], milliseconds: float | None) -> Iterator[str]:
    yield f"package: {megabytes(size)}"
    for check in checks:
        verdict = {True: "passes", False: "FAILS", None: "not checked"}[check.passed]
        yield f"{check.name}: {verdict}: {check.what}"
    where = "with Core ML" if packages.on_a_mac() else "rehearsed"
    if milliseconds is not None:
        yield f"a call, {where}: {milliseconds:.2f} ms"
    failed = next((check for check in checks if check.passed is False), None)
    if failed is not None:
        yield f"verdict: {name}: {failed.name} fails: {failed.what}"
    elif packages.on_a_mac():
        yield f"verdict: {name} passes"
    else:
        yield (
            f"verdict: {name} is graph-correct, as rehearsed; this shows nothing about the Neural "
            "Engine"
        )
