"""Makes the drafters that a `DrafterSpec` names, and opens what they need."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.decoding.types import Drafter
from paceline.drafters.ahead import AheadDrafter
from paceline.drafters.dflash import (
    ContextCache,
    DFlashDrafter,
    MlxNetwork,
    MlxTarget,
    Network,
    OpenVinoNetwork,
    read_config,
)
from paceline.drafters.model import DraftModel, ModelDrafter
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.recycle import RecycleDrafter
from paceline.drafters.spec import DrafterPart, DrafterSpec, ngram_drafter
from paceline.drafters.suffix import AnswerHistory, SuffixDrafter
from paceline.drafters.table import Table, TableDrafter
from paceline.errors import InvalidRequest


@dataclass(slots=True)
class Shared:
    """What the drafters of all requests to one target have in common."""

    target: str = "this model"
    """The target's name, for people."""
    vocab_size: int = 0
    corpus: AnswerHistory = field(default_factory=AnswerHistory)
    """Earlier answers, for `suffix:earlier`."""
    shipped: Mapping[str, Path] = field(default_factory=dict)
    """Kind of drafter -> its folder, of those that come with the target."""
    find: Callable[[str], Path] = Path
    """The folder of a drafter by its name: a path, or whatever else the caller knows."""
    graph: Path | None = None
    """What the target's engine opened: a dflash drafter uses its embeddings and head."""
    mlx: MlxTarget | None = None
    """The same of a target that MLX runs, as it lies in memory."""
    tables: dict[str, Table] = field(default_factory=dict)
    networks: dict[str, Network] = field(default_factory=dict)
    """Those that are open, by what they were asked for as."""
    open_model: Callable[[str], DraftModel] | None = None
    """Opens a smaller model to draft with, once it was found to have the target's vocabulary."""
    models: dict[str, DraftModel] = field(default_factory=dict)
    beside: "Shared | None" = None
    """What those who draft ahead have for themselves: they run in another thread."""
    worker: ThreadPoolExecutor | None = None
    """That thread."""


def shipped(model: str) -> dict[str, Path]:
    """Kind of drafter -> its folder, of the drafters that paceline brings for `model`."""
    if Path(model).name != model:  # a path, which is nobody's name
        return {}
    folder = Path(__file__).parent / "shipped" / model
    if not folder.is_dir():
        return {}
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_dir()}


class Memory(dict[str, ContextCache[Any]]):
    """What the drafters of one sequence know of it, by spec.

    Who keeps a sequence keeps it too, and cuts it where the sequence is cut.
    """

    def beginning(self, length: int) -> "Memory":
        """Of its own: what they know of the first `length` tokens."""
        return Memory({spec: known.copy(length) for spec, known in self.items()})

    def cut(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        for known in self.values():
            known.truncate(length)


@dataclass(slots=True)
class Own:
    """What one request brings."""

    memory: Memory = field(default_factory=Memory)
    """What earlier drafters learnt of the same sequence."""
    prediction: Sequence[int] = ()
    """What the answer is expected to be."""
    prompt_length: int = 0


def create(
    spec: str | DrafterSpec, shared: Shared | None = None, own: Own | None = None
) -> list[Drafter]:
    """Make the drafters of `spec`, in its order.

    Args:
        spec: see `DrafterSpec.parse`.
        shared: what belongs to the target.
        own: what belongs to the request.

    Raises:
        InvalidRequest: an unknown name, option or value, or a drafter that this target has not.
        ModelError: a drafter that does not fit the target, or cannot be read.
    """
    shared = shared or Shared()
    own = own or Own()
    parts = DrafterSpec.parse(spec).resolve(shared.shipped).parts
    return [_MAKERS[part.kind](part, shared, own) for part in parts]


def taps(spec: str | DrafterSpec, shared: Shared) -> tuple[int, ...]:
    """Layers of the target whose hidden states the drafters of `spec` need, ascending.

    Raises what `create` raises.
    """
    needed: set[int] = set()
    for part in DrafterSpec.parse(spec).parts:
        if part.kind == "dflash" and part.argument in shared.networks:
            needed.update(shared.networks[part.argument].taps)
        elif part.kind == "dflash":
            needed.update(read_config(_folder(part, shared)).target_layer_ids)
    return tuple(sorted(needed))


def slots(spec: str | DrafterSpec, shared: Shared) -> int | None:
    """KV slots of the smallest open model that drafts for `spec`; None: there is none."""
    found = []
    for part in DrafterSpec.parse(spec).parts:
        models = shared.models
        if part.kind == "ahead":
            models = shared.beside.models if shared.beside else {}
        if part.kind in ("model", "ahead") and part.name in models:
            found.append(models[part.name].slots)
    return min(found, default=None)


def _ngram(part: DrafterPart, _shared: Shared, _own: Own) -> Drafter:
    return ngram_drafter(part.options)


def _suffix(part: DrafterPart, shared: Shared, _own: Own) -> Drafter:
    return SuffixDrafter(shared.corpus if part.argument else None)


def _recycle(_part: DrafterPart, _shared: Shared, _own: Own) -> Drafter:
    return RecycleDrafter()


def _table(part: DrafterPart, shared: Shared, _own: Own) -> Drafter:
    if part.name not in shared.tables:
        shared.tables[part.name] = Table(_folder(part, shared), shared.vocab_size)
    return TableDrafter(shared.tables[part.name])


def _dflash(part: DrafterPart, shared: Shared, own: Own) -> Drafter:
    if part.argument not in shared.networks:
        shared.networks[part.argument] = _network(part, shared)
    network = shared.networks[part.argument]
    return DFlashDrafter(network, own.memory.setdefault(part.argument, network.new_cache()))


def _network(part: DrafterPart, shared: Shared) -> Network:
    options = part.options
    window, bits = options.get("window"), options.get("bits")
    if shared.mlx is not None:
        if "int8" in options:
            raise InvalidRequest(
                "dflash has int8, which is for drafting with OpenVINO; this target runs in MLX: "
                "expected bits=8 or bits=4, or neither for the drafter's own precision"
            )
        return MlxNetwork(_folder(part, shared), shared.mlx, window=window, bits=bits)
    if shared.graph is None:
        raise InvalidRequest("dflash needs a target whose embeddings and head it can use")
    if bits is not None:
        raise InvalidRequest(
            f"dflash has bits={bits}, which is for targets of the engine mlx; here expected "
            "int8=1, or int8=0 for float32"
        )
    folder, int8 = _folder(part, shared), bool(options.get("int8", 1))
    return OpenVinoNetwork(folder, shared.graph, window=window, int8=int8)


def _model(part: DrafterPart, shared: Shared, _own: Own) -> Drafter:
    if part.name not in shared.models:
        if shared.open_model is None:
            raise InvalidRequest(f"{shared.target} cannot have another model as its drafter")
        shared.models[part.name] = shared.open_model(part.name)
    return ModelDrafter(shared.models[part.name])


def _ahead(part: DrafterPart, shared: Shared, own: Own) -> Drafter:
    if shared.beside is None or shared.worker is None:
        shared.beside = replace(shared, models={})
        shared.worker = ThreadPoolExecutor(1, thread_name_prefix="paceline-ahead")
    return AheadDrafter(_model(part, shared.beside, own), shared.worker)


def _prediction(_part: DrafterPart, _shared: Shared, own: Own) -> Drafter:
    return PredictionDrafter(own.prediction, own.prompt_length)


_MAKERS: Mapping[str, Callable[[DrafterPart, Shared, Own], Drafter]] = {
    "ngram": _ngram,
    "suffix": _suffix,
    "recycle": _recycle,
    "table": _table,
    "dflash": _dflash,
    "model": _model,
    "ahead": _ahead,
    "prediction": _prediction,
}


def _folder(part: DrafterPart, shared: Shared) -> Path:
    if part.name:
        return shared.find(part.name)
    kind = part.kind
    if kind not in shared.shipped:
        raise InvalidRequest(
            f"no {kind} comes with {shared.target}; train one with `paceline train {kind}` and "
            f"name its folder: {kind}:FOLDER"
        )
    return shared.shipped[kind]
