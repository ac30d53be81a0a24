"""Makes the drafters that a `DrafterSpec` names, and opens what they need."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.decoding.sampling import Sampling
from paceline.decoding.types import Drafter
from paceline.drafters.ahead import AheadDrafter
from paceline.drafters.dflash import (
    DFlashDrafter,
    MlxNetwork,
    Network,
    OpenVinoNetwork,
    read_config,
)
from paceline.drafters.kept import KeptDrafter, KeptText
from paceline.drafters.model import DraftModel, ModelDrafter
from paceline.drafters.mtp import (
    DraftHead,
    MlxHead,
    MtpDrafter,
    OpenVinoHead,
    has_head,
    names_head,
    read_head,
)
from paceline.drafters.mtp import read_config as read_head_config
from paceline.drafters.networks.context import ContextCache
from paceline.drafters.networks.mlx import MlxTarget
from paceline.drafters.networks.target import layers_of
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.spec import DrafterPart, DrafterSpec, ngram_drafter
from paceline.drafters.suffix import AnswerHistory, SuffixDrafter
from paceline.drafters.table import Table, TableDrafter
from paceline.errors import InvalidRequest


@dataclass(slots=True)
class DrafterResources:
    """Resources that the drafters of all requests to one target share."""

    target: str = "this model"
    """The target's name, for messages."""
    vocab_size: int = 0
    history: AnswerHistory = field(default_factory=AnswerHistory)
    """Earlier answers, for `suffix:earlier`."""
    shipped: Mapping[str, Path] = field(default_factory=dict)
    """Kind of drafter -> its folder, for drafters shipped with the target."""
    find: Callable[[str], Path] = Path
    """Resolves the name of a drafter, e.g. a path, to its folder."""
    graph: Path | None = None
    """The target's files, as `read_target` takes them: for drafters that share its embeddings and
    head. The folder of a checkpoint if MLX runs it."""
    mlx: MlxTarget | None = None
    """The target in MLX, for the same use."""
    tables: dict[str, Table] = field(default_factory=dict)
    networks: dict[str, Network] = field(default_factory=dict)
    """Open networks, by the argument of their part."""
    heads: dict[str, DraftHead] = field(default_factory=dict)
    """Open heads of `mtp`, in the same way."""
    open_model: Callable[[str], DraftModel] | None = None
    """Opens a draft model and checks its vocabulary; None: this target cannot have one."""
    models: dict[str, DraftModel] = field(default_factory=dict)
    ahead: "DrafterResources | None" = None
    """Resources of the drafters in the worker thread, which share none with the others."""
    worker: ThreadPoolExecutor | None = None
    """The thread of the drafters that draft ahead."""


_LONGEST_CHAIN = 8
"""Most tokens that `mtp` drafts without its option `length`."""


_READERS = ("dflash", "mtp")
"""Kinds of drafters that read the target's hidden states, but for heads that read logits."""


def shipped(model: str, files: Path | None = None) -> dict[str, Path]:
    """Kind of drafter -> where it is, of those that come with a model.

    Args:
        model: its name; a path has none shipped for it.
        files: the model itself, which may have an MTP head.
    """
    head = {"mtp": files} if files is not None and has_head(files) else {}
    folder = Path(__file__).parent / "shipped" / model
    if Path(model).name != model or not folder.is_dir():
        return head
    return head | {path.name: path for path in sorted(folder.iterdir()) if path.is_dir()}


class DraftKV(dict[str, ContextCache[Any]]):
    """KV caches of one sequence's drafters, by the argument of their part.

    Kept with the sequence, and truncated with it.
    """

    def copy_prefix(self, length: int) -> "DraftKV":
        """A copy of the first `length` tokens."""
        return DraftKV({key: cache.copy(length) for key, cache in self.items()})

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        for cache in self.values():
            cache.truncate(length)


@dataclass(slots=True)
class RequestContext:
    """The request that drafters serve."""

    kv: DraftKV = field(default_factory=DraftKV)
    """KV from earlier drafters of the same sequence."""
    prediction: Sequence[int] = ()
    """The predicted answer."""
    prompt_length: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    """How the target picks: drafters with a distribution pick alike."""
    kept: KeptText | None = None
    """Earlier answers of the target, if this request may draft from them."""


def create(
    spec: str | DrafterSpec,
    shared: DrafterResources | None = None,
    request: RequestContext | None = None,
) -> list[Drafter]:
    """Make the drafters of `spec`, in its order.

    Args:
        spec: see `DrafterSpec.parse`; `auto` is resolved before, by `Model.request`.
        shared: resources of the target.
        request: the request that the drafters are for.

    Raises:
        InvalidRequest: an unknown name, option or value, or a drafter that this target cannot have.
        ModelError: a drafter that does not fit the target, or cannot be read.
    """
    shared = shared or DrafterResources()
    request = request or RequestContext()
    return [_MAKERS[part.kind](part, shared, request) for part in _parts(spec)]


def taps(spec: str | DrafterSpec, shared: DrafterResources) -> tuple[int, ...]:
    """Layers of the target whose hidden states the drafters of `spec` need, ascending.

    Raises what `create` raises.
    """
    needed: set[int] = set()
    for part in _parts(spec):
        opened: DraftHead | Network | None = None
        if part.kind == "dflash":
            opened = shared.networks.get(part.argument)
            if opened is None:
                needed.update(read_config(_folder(part, shared)).target_layer_ids)
        elif part.kind == "mtp":
            opened = shared.heads.get(part.argument)
            if opened is None:
                needed.update(read_head_config(_folder(part, shared), _layers(shared)).taps)
        if opened is not None:
            needed.update(opened.taps)
    return tuple(sorted(needed))


def _parts(spec: str | DrafterSpec) -> tuple[DrafterPart, ...]:
    spec = DrafterSpec.parse(spec)
    assert not spec.auto, "auto stands for drafters of a model: resolve it first"
    return spec.parts


def needs_hidden_states(spec: str) -> bool:
    """Whether a drafter of `spec` reads the target's hidden states, whatever the target is.

    Raises InvalidRequest if there is no such drafter.
    """
    return any(part.kind in _READERS for part in DrafterSpec.parse(spec).parts)


def slots(spec: str | DrafterSpec, shared: DrafterResources) -> int | None:
    """KV slots of the smallest open draft model of `spec`; None: there is none."""
    slot_counts = []
    for part in DrafterSpec.parse(spec).parts:
        models = shared.models
        if part.kind == "ahead":
            models = shared.ahead.models if shared.ahead else {}
        if part.kind in ("model", "ahead") and part.name in models:
            slot_counts.append(models[part.name].slots)
    return min(slot_counts, default=None)


def _ngram(part: DrafterPart, _shared: DrafterResources, _request: RequestContext) -> Drafter:
    return ngram_drafter(part.options)


def _suffix(part: DrafterPart, shared: DrafterResources, _request: RequestContext) -> Drafter:
    return SuffixDrafter(shared.history if part.argument else None)


def _table(part: DrafterPart, shared: DrafterResources, _request: RequestContext) -> Drafter:
    if part.name not in shared.tables:
        shared.tables[part.name] = Table.open(_folder(part, shared), shared.vocab_size)
    return TableDrafter(shared.tables[part.name])


def _kept(_part: DrafterPart, _shared: DrafterResources, request: RequestContext) -> Drafter:
    return KeptDrafter(request.kept)


def _dflash(part: DrafterPart, shared: DrafterResources, request: RequestContext) -> Drafter:
    if part.argument not in shared.networks:
        shared.networks[part.argument] = _network(part, shared)
    network = shared.networks[part.argument]
    cache = request.kv.setdefault(part.argument, network.new_cache())
    return DFlashDrafter(network, cache, request.sampling, request.prompt_length)


def _network(part: DrafterPart, shared: DrafterResources) -> Network:
    graph, options = _target_graph(part, shared), part.options
    folder, window = _folder(part, shared), options.get("window")
    if shared.mlx is not None:
        return MlxNetwork(folder, shared.mlx, window=window, bits=options.get("bits"))
    int8 = bool(options.get("int8", 1))
    return OpenVinoNetwork(folder, graph, window=window, int8=int8)


def _mtp(part: DrafterPart, shared: DrafterResources, request: RequestContext) -> Drafter:
    if part.argument not in shared.heads:
        shared.heads[part.argument] = _head(part, shared)
    head = shared.heads[part.argument]
    # `dflash` of the same folder has a cache of another kind.
    cache: Any = request.kv.setdefault(str(part), head.new_cache())
    length = part.options.get("length", _LONGEST_CHAIN)
    return MtpDrafter(head, cache, length, request.sampling, request.prompt_length)


def _head(part: DrafterPart, shared: DrafterResources) -> DraftHead:
    folder, options = _folder(part, shared), part.options
    graph = _target_graph(part, shared)
    head, vocab = read_head(folder, _layers(shared)), options.get("vocab")
    if shared.mlx is not None:
        return MlxHead(head, shared.mlx, vocab=vocab, bits=options.get("bits"))
    return OpenVinoHead(head, graph, vocab=vocab, int8=bool(options.get("int8", 1)))


def _target_graph(part: DrafterPart, shared: DrafterResources) -> Path:
    """The target's files. Raises InvalidRequest for an option that is of another engine."""
    bits = part.options.get("bits")
    if shared.mlx is not None:
        if "int8" in part.options:
            raise InvalidRequest(
                f"{part.kind} has int8, which is for drafting with OpenVINO; this target runs in "
                "MLX: expected bits=8 or bits=4, or neither for the drafter's own precision"
            )
        return shared.graph or Path()
    if shared.graph is None:
        raise InvalidRequest(f"{part.kind} needs a target whose embeddings and head it can use")
    if bits is not None:
        raise InvalidRequest(
            f"{part.kind} has bits={bits}, which is for targets of the engine mlx; here expected "
            "int8=1, or int8=0 for float32"
        )
    return shared.graph


def _layers(shared: DrafterResources) -> Callable[[], int]:
    """Counts the target's layers when called."""

    def count() -> int:
        if shared.mlx is not None:
            return shared.mlx.layers
        if shared.graph is None:
            raise InvalidRequest("mtp needs a target whose embeddings and head it can use")
        return layers_of(shared.graph)

    return count


def _model(part: DrafterPart, shared: DrafterResources, request: RequestContext) -> Drafter:
    if part.name not in shared.models:
        if shared.open_model is None:
            raise InvalidRequest(f"{shared.target} cannot have another model as its drafter")
        shared.models[part.name] = shared.open_model(part.name)
    return ModelDrafter(shared.models[part.name], request.sampling, request.prompt_length)


def _ahead(part: DrafterPart, shared: DrafterResources, request: RequestContext) -> Drafter:
    if shared.ahead is None or shared.worker is None:
        shared.ahead = replace(shared, models={})
        shared.worker = ThreadPoolExecutor(1, thread_name_prefix="paceline-ahead")
    return AheadDrafter(_model(part, shared.ahead, request), shared.worker)


def _prediction(_part: DrafterPart, _shared: DrafterResources, request: RequestContext) -> Drafter:
    return PredictionDrafter(request.prediction, request.prompt_length)


_MAKERS: Mapping[str, Callable[[DrafterPart, DrafterResources, RequestContext], Drafter]] = {
    "ngram": _ngram,
    "suffix": _suffix,
    "table": _table,
    "kept": _kept,
    "dflash": _dflash,
    "mtp": _mtp,
    "model": _model,
    "ahead": _ahead,
    "prediction": _prediction,
}


def _folder(part: DrafterPart, shared: DrafterResources) -> Path:
    if part.name:
        return shared.find(part.name)
    kind = part.kind
    if kind not in shared.shipped:
        if kind == "mtp" and shared.graph is not None and names_head(shared.graph):
            return shared.graph  # reading it raises an error that names what is missing
        way = "make one with `paceline learn`"
        if kind != "table":
            way = "take a published checkpoint for it"
        raise InvalidRequest(
            f"no {kind} comes with {shared.target}; {way} and name its folder: {kind}:FOLDER"
        )
    return shared.shipped[kind]
