"""Checks before a conversion: converts one layer with random or real weights, and checks it.

A whole model takes an hour to convert and compile, and a single operation that leaves the Neural
Engine spoils it. So a random layer of the model's shape is checked first, then one with real
weights. The checks are `lint`'s rules, `residency` of Core ML's plan, and golden's comparisons:
full passes with single rows, the graph with transformers, and the losses of number format and
weights. They stop at the first failure. Off a Mac, the layer runs in the emulator, without a plan.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import paceline
from paceline.errors import InvalidRequest, ModelError
from paceline.models import Progress
from paceline.storage.coreml import fingerprint_of
from paceline.storage.files import megabytes, sha256_of, size_of
from paceline.storage.report import Report
from paceline_coreml import compute_plan
from paceline_coreml.conversion.checkpoint import read_checkpoint
from paceline_coreml.conversion.compress import compress
from paceline_coreml.conversion.convert import OpenModel, artifact_sizes, open_model
from paceline_coreml.conversion.family import Family
from paceline_coreml.conversion.shards import ShardSizes, convert_layers, state_shapes
from paceline_coreml.conversion.source import Source
from paceline_coreml.conversion.torch_model import run_layers
from paceline_coreml.engine import packages
from paceline_coreml.engine.artifact import CAUSAL_LM, Artifact, Shard
from paceline_coreml.engine.call import run_package
from paceline_coreml.engine.inputs import CallInputs
from paceline_coreml.golden.checks import GRAPH_COSINE, FormatCheck, agreement, format_loss
from paceline_coreml.golden.compare import nearness
from paceline_coreml.golden.reference import Reference
from paceline_coreml.golden.texts import Text, row_names
from paceline_coreml.lint import lint
from paceline_coreml.options import ConversionOptions
from paceline_coreml.probe.layer_shape import (
    LayerShape,
    check_memory,
    parse_shape,
    random_model,
    shape_of,
)
from paceline_coreml.residency import evaluate

__all__ = ["LayerShape", "ProbeOptions", "parse_shape", "probe_layer", "probe_shape", "run_gates"]

Floats = npt.NDArray[np.float32]

PACKAGE: Final = "layer.mlpackage"
_GRAPH: Final = "float32.mlpackage"
"""The layer in float32: it differs from transformers' only if the graph is wrong."""

_ROWS = 16
"""Minimum rows of a comparison."""


class ProbeOptions(NamedTuple):
    progress: Progress
    units: str = packages.DEFAULT_UNITS
    """One of `packages.UNITS`, on a Mac."""


class Check(NamedTuple):
    name: str
    passed: bool | None
    """The result, or None if this machine cannot run the check, or it only measures."""
    what: str
    milliseconds: float | None = None
    """Mean time per forward pass, if the check runs any."""


class _Rows(NamedTuple):
    tokens: Sequence[int]
    """[n]"""
    stream: Floats
    """[n, stream_size]: input."""
    expected: Floats
    """[n, hidden_size]: hidden states after the layer, in float32."""
    half: Floats
    """The same of transformers in float16."""


def probe_shape(shape: LayerShape, recipe: ConversionOptions, probing: ProbeOptions) -> Report:
    """Convert and check a layer with random weights, in the recipe's format.

    Raises InvalidRequest if it does not fit in memory.
    """
    check_memory(f"a layer with shape {shape}", shape, shape.weights, others=shape.weights)
    with tempfile.TemporaryDirectory() as folder:
        source = random_model(shape, Path(folder))
        recipe = ConversionOptions(
            recipe.weights, functions=(shape.T,), slots=shape.S, stateless=recipe.stateless
        )
        probed = probe_layer(source, open_model(source, recipe), 0, shape.T, probing)
    return replace(probed, value={**probed.value, "shape": asdict(shape)})


def probe_layer(
    source: Source, model: OpenModel, layer: int, rows: int, probing: ProbeOptions
) -> Report:
    """Convert and check a model's layer, with its weights, in passes of `rows` rows.

    Raises:
        ModelError: the checkpoint is corrupt.
        InvalidRequest: it is not a causal language model, has no such layer, or the layer does not
            fit in memory.
    """
    family, options, slots = model.family, model.options, model.options.slots
    shape = family.shape
    _check_task(source, model)
    if layer >= shape.layers:
        raise InvalidRequest(
            f"layer {layer} does not exist in {source.name}; expected 0 to {shape.layers - 1}"
        )
    name = f"layer {layer} of {source.name}, {rows} rows"
    weights = sum(weight.numel() for weight in family.layer(layer).parameters())
    # transformers loads all layers up to this one; embeddings are in memory twice.
    others = (layer + 1) * weights + 2 * shape.vocab_size * shape.hidden_size
    config, _ = read_checkpoint(source.checkpoint)
    check_memory(name, shape_of(config, rows=rows, slots=slots), weights, others=others)
    sizes = ShardSizes(
        rows, slots, model.sizes.conv_slots, flexible=False, stateless=options.stateless
    )
    about = {
        "paceline": paceline.__version__,
        "model": source.name,
        "layer": layer,
        "family": shape.family,
        "rows": rows,
        "slots": slots,
        "weights": options.weights,
        "stateless": options.stateless,
        "units": probing.units if packages.on_a_mac() else packages.REHEARSED,
    }
    with (
        probing.progress.task(f"probing {name}"),
        tempfile.TemporaryDirectory() as work,
    ):
        compared = _rows_of(source, model, layer, sizes)
        artifact = _convert(model, layer, Path(work), sizes)
        checks: list[Check] = []
        for check in _checks(artifact, family, compared, probing):
            checks.append(check)
            if check.passed is False:
                break
        return _report(name, {**about, "bytes": size_of(Path(work) / PACKAGE)}, checks)


def run_gates(source: Source, recipe: ConversionOptions, probing: ProbeOptions) -> list[Report]:
    """Probe a random layer of the model's shape, then each kind of its layers, with its weights.

    Probes the numbers of rows of exact passes, up to the first report that fails. Raises
    the same errors as `probe_layer`.
    """
    model = open_model(source, recipe)
    _check_task(source, model)
    config, _ = read_checkpoint(source.checkpoint)
    functions = model.options.functions or (model.options.rows,)
    widths = [rows for rows in functions if rows > 1] or functions
    kinds: dict[tuple[Any, ...], int] = {}
    """Names and shapes of a layer's weights and states -> the first such layer."""
    for index in range(model.family.shape.layers):
        layer = model.family.layer(index)
        tensors = [*layer.named_parameters(), *layer.named_buffers()]
        kinds.setdefault(tuple((name, tensor.shape) for name, tensor in tensors), index)
    shapes = [shape_of(config, rows=rows, slots=model.options.slots) for rows in widths]
    gates = [partial(probe_shape, shape, recipe, probing) for shape in shapes]
    gates += [
        partial(probe_layer, source, model, index, rows, probing)
        for index in kinds.values()
        for rows in widths
    ]
    reports: list[Report] = []
    for gate in gates:
        reports.append(gate())
        if not reports[-1].passed:
            break
    return reports


def _check_task(source: Source, model: OpenModel) -> None:
    task = model.family.shape.task
    if task != CAUSAL_LM:
        # A classifier's rows attend to the whole text, so single rows cannot be compared.
        raise InvalidRequest(f"{source.name} is for {task}; expected a model for {CAUSAL_LM}")


def _rows_of(source: Source, model: OpenModel, layer: int, sizes: ShardSizes) -> _Rows:
    """Return random tokens' rows before a layer, and transformers' rows after it."""
    family = model.family
    is_soft = model.options.routing == "soft"
    load = partial(Reference, source.checkpoint, layers=layer + 1, soft=is_soft)
    embeddings, shape = family.embeddings().half().float().numpy(), family.shape
    # float16 and a norm's epsilon turn low-norm tokens, hardly trained ones, into noise.
    by_norm = np.argsort(np.linalg.norm(embeddings, axis=1), kind="stable")
    # At least two passes.
    count = min(max(2 * sizes.rows, _ROWS), sizes.slots)
    tokens = np.random.default_rng(0).choice(by_norm[len(by_norm) // 2 :], count).tolist()
    if source.facts.add_bos and source.facts.bos_token_id is not None:
        tokens[0] = source.facts.bos_token_id
    embedded = embeddings[tokens]
    stream = np.pad(embedded, ((0, 0), (0, shape.stream_size - shape.hidden_size)))
    del embeddings
    # transformers does not return the extra channels of a family's stream.
    before = run_layers(family, range(layer), stream, conv_slots=sizes.conv_slots, rows=sizes.rows)
    expected, half = (
        load(dtype=dtype).run(tokens, embedded).streams[layer + 1]
        for dtype in (torch.float32, torch.float16)
    )
    return _Rows(tokens, before, expected, half)


def _convert(model: OpenModel, index: int, folder: Path, sizes: ShardSizes) -> Artifact:
    """Convert one layer to a package in `folder`; return an artifact without a head."""
    family = model.family
    options = replace(model.options, rows=sizes.rows, functions=(sizes.rows,))
    convert = partial(convert_layers, family, index, index + 1, sizes=sizes)
    convert(rounded=False).save(str(folder / _GRAPH))
    compress(convert(), options.weights).save(str(folder / PACKAGE))
    outside = state_shapes(family.layer(index), index) if sizes.stateless else {}
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return Artifact(
        f"layer {index}",
        **{**artifact_sizes(family, options, sizes.conv_slots), "layers": 1},
        layer_shards=tuple(Shard(path, 0, 1, states=outside) for path in (PACKAGE, _GRAPH)),
        head_shards=(),
        fingerprint=fingerprint_of({str(path): sha256_of(path) for path in paths}),
        files={},
        folder=folder,
    )


def _checks(
    artifact: Artifact, family: Family, compared: _Rows, probing: ProbeOptions
) -> Iterator[Check]:
    """Run all checks, in order; a later one may rely on earlier ones."""
    rows, findings = artifact.rows, lint(artifact.folder / PACKAGE)
    failing = [
        f"{one.rule} at {one.where}: {one.what}" for one in findings if one.verdict == "fail"
    ]
    warnings = sorted({one.rule for one in findings if one.verdict == "warn"})
    passing = f"no failures; warnings: {', '.join(warnings) or 'none'}"
    yield Check("rules", not failing, failing[0] if failing else passing)
    if packages.on_a_mac():
        verdict = evaluate(
            compute_plan.record(artifact.folder, PACKAGE, rows, function=None, units=probing.units)
        )
        on = f"{verdict.convs.on} convolutions and {verdict.others.on} other operations stay on it"
        yield Check("residency", verdict.fault is None, verdict.fault or on)
    else:
        yield Check("residency", None, "Core ML's plan is only available on a Mac")
    opener = packages.PackageOpener(
        artifact, units=probing.units, rounding="f16", on_message=probing.progress.note
    )
    inputs = CallInputs(rows, *family.rope_tables(), conv_slots=artifact.ring, lags=artifact.lags)
    try:
        package = opener.open(PACKAGE, None)
        blocks = run_package(package, compared.stream, rows, inputs)["out_hidden"]
        begun = perf_counter()
        singles = run_package(package, compared.stream, rows, inputs, rows=1)["out_hidden"]
        milliseconds = 1000 * (perf_counter() - begun) / len(singles)
    except ModelError as error:
        yield Check("runs", False, str(error))
        return
    # Rows must not depend on other rows of their pass, or speculation changes tokens.
    way = agreement("single rows", {"out_hidden": singles}, {"out_hidden": blocks})
    faults = [f"{fault}, so speculation would not be exact" for fault in way.faults(exact=True)]
    what = f"in passes of {rows}, bit-identical to single rows"
    yield Check("rows", not faults, "; ".join(faults) or what, milliseconds)
    emulator = packages.PackageOpener(artifact, units=probing.units, rounding="f32")
    unrounded, graph = (
        run_package(emulator.open(path, None), compared.stream, rows, inputs)["out_hidden"]
        for path in (PACKAGE, _GRAPH)
    )
    size = artifact.hidden_size
    names = row_names([Text("the layer", compared.tokens)])
    near = nearness(names, graph[:, :size], compared.expected)
    what = f"minimum cosine {near.cosine.worst:.5f}"
    faults = near.faults(GRAPH_COSINE)
    yield Check("graph", not faults, "; ".join(faults) or what)
    number_format = FormatCheck(
        format_loss(blocks[:, :size], unrounded[:, :size]),
        format_loss(compared.half, compared.expected),
    )
    faults = number_format.faults("float16")
    what = f"{number_format.loss:.2g} of the median row's cosine is lost"
    yield Check("format", not faults, "; ".join(faults) or what)
    loss = nearness(names, unrounded[:, :size], graph[:, :size]).cosine
    what = f"minimum cosine {loss.worst:.5f} with stored weights, {loss.median:.5f} at the median"
    yield Check("weights", None, what)


def _report(name: str, about: Mapping[str, Any], checks: list[Check]) -> Report:
    failed = [check for check in checks if check.passed is False]
    milliseconds = next((check.milliseconds for check in checks if check.milliseconds), None)
    verdicts = {True: "passes", False: "FAILS", None: "no verdict"}
    on_a_mac = packages.on_a_mac()
    lines = [f"package: {megabytes(about['bytes'])}"]
    lines += [f"{check.name}: {verdicts[check.passed]}: {check.what}" for check in checks]
    if milliseconds is not None:
        where = "with Core ML" if on_a_mac else "in the emulator"
        lines.append(f"time per pass {where}: {milliseconds:.2f} ms")
    verdict = "passes"
    if failed:
        verdict = f": {failed[0].name} fails: {failed[0].what}"
    elif not on_a_mac:
        verdict = "is graph-correct in the emulator; this shows nothing about the Neural Engine"
    lines.append(f"verdict: {name}{'' if failed else ' '}{verdict}")
    value = {
        **about,
        "passed": not failed,
        "checks": [{"name": c.name, "passed": c.passed, "what": c.what} for c in checks],
        "milliseconds": milliseconds,
    }
    return Report(value, not failed, "\n".join(lines))
