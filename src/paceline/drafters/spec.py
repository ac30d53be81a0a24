"""From a spec such as `ngram:min=2,max=5` or `suffix+table` to drafters."""

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
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.recycle import RecycleDrafter
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


def create(spec: str, shared: Shared | None = None, own: Own | None = None) -> list[Drafter]:
    """The drafters that `spec` names, in its order.

    Args:
        spec: `none`, `auto`, or parts joined by `+`: `ngram[:min=,max=,length=]`,
            `suffix[:earlier]` (also look in earlier answers of the process), `recycle`,
            `table[:FOLDER]` (left out: the one that comes with the target),
            `dflash[:FOLDER][,window=,int8=,bits=]` (`bits` for a target that MLX runs, `int8` for
            any other), `model:NAME` (a smaller model), `ahead:model:NAME` (the same, while the
            target verifies), `prediction`.
        shared: what belongs to the target.
        own: what belongs to the request.

    Raises:
        InvalidRequest: an unknown name, option or value, or a drafter that this target has not.
        ModelError: a drafter that does not fit the target, or cannot be read.
    """
    shared = shared or Shared()
    own = own or Own()
    return [make(argument, shared, own) for make, argument in _parts(resolved(spec, shared))]


def check(spec: str) -> None:
    """Raise InvalidRequest when no drafters could be made of `spec`, whatever the target."""
    for _ in _parts(spec):
        pass


def resolved(spec: str, shared: Shared, *, expected: bool = False) -> str:
    """`spec` with `auto` spelled out: what is best for the target.

    Where a prediction is `expected` to be used and the spec does not say where, it comes first.
    """
    if spec == "auto":
        spec = "suffix+table" if "table" in shared.shipped else "suffix"
    if expected and spec != "none" and "prediction" not in spec.split("+"):
        return f"prediction+{spec}"
    return spec


def taps(spec: str, shared: Shared) -> tuple[int, ...]:
    """Layers of the target whose hidden states the drafters of `spec` need, ascending.

    Raises what `create` raises.
    """
    needed: set[int] = set()
    for part in resolved(spec, shared).split("+"):
        name, _, argument = part.partition(":")
        if name == "dflash" and argument in shared.networks:
            needed.update(shared.networks[argument].taps)
        elif name == "dflash":
            needed.update(read_config(_dflash_folder(argument, shared)).target_layer_ids)
    return tuple(sorted(needed))


def slots(spec: str, shared: Shared) -> int | None:
    """KV slots of the smallest open model that drafts for `spec`; None: there is none."""
    found = []
    for part in spec.split("+"):
        name, _, argument = part.partition(":")
        models = shared.models
        if name == "ahead":
            models = shared.beside.models if shared.beside else {}
            name, _, argument = argument.partition(":")
        if name == "model" and argument in models:
            found.append(models[argument].slots)
    return min(found, default=None)


def remembers(spec: str) -> bool:
    """Whether a drafter of `spec` looks in earlier answers, so that this one should be kept."""
    return any(part == "suffix:earlier" for part in spec.split("+"))


def _ngram(argument: str, _shared: Shared, _own: Own) -> Drafter:
    options = _options("ngram", argument, ("length", "max", "min"))
    try:
        return NgramDrafter(
            min_match=options.get("min", 1),
            max_match=options.get("max", 4),
            length=options.get("length", 15),
        )
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def _suffix(argument: str, shared: Shared, _own: Own) -> Drafter:
    return SuffixDrafter(shared.corpus if argument else None)


def _recycle(_argument: str, _shared: Shared, _own: Own) -> Drafter:
    return RecycleDrafter()


def _table(argument: str, shared: Shared, _own: Own) -> Drafter:
    if argument not in shared.tables:
        shared.tables[argument] = Table(_folder("table", argument, shared), shared.vocab_size)
    return TableDrafter(shared.tables[argument])


def _dflash(argument: str, shared: Shared, own: Own) -> Drafter:
    if argument not in shared.networks:
        shared.networks[argument] = _network(argument, shared)
    network = shared.networks[argument]
    return DFlashDrafter(network, own.memory.setdefault(argument, network.new_cache()))


def _network(argument: str, shared: Shared) -> Network:
    path, options = _dflash_options(argument)
    window, bits = options.get("window"), options.get("bits")
    if shared.mlx is not None:
        if "int8" in options:
            raise InvalidRequest(
                "dflash has int8, which is for drafting with OpenVINO; this target runs in MLX: "
                "expected bits=8 or bits=4, or neither for the drafter's own precision"
            )
        return MlxNetwork(_folder("dflash", path, shared), shared.mlx, window=window, bits=bits)
    if shared.graph is None:
        raise InvalidRequest("dflash needs a target whose embeddings and head it can use")
    if bits is not None:
        raise InvalidRequest(
            f"dflash has bits={bits}, which is for targets of the engine mlx; here expected "
            "int8=1, or int8=0 for float32"
        )
    folder, int8 = _folder("dflash", path, shared), bool(options.get("int8", 1))
    return OpenVinoNetwork(folder, shared.graph, window=window, int8=int8)


def _dflash_folder(argument: str, shared: Shared) -> Path:
    return _folder("dflash", _dflash_options(argument)[0], shared)


def _dflash_options(argument: str) -> tuple[str, dict[str, int]]:
    """The folder and what else was said: `FOLDER,window=512,int8=0`."""
    parts = argument.split(",")
    path = "" if "=" in parts[0] else parts.pop(0)
    options = _options("dflash", ",".join(parts), ("bits", "int8", "window"))
    if options.get("window", 1) < 1:
        raise InvalidRequest(f"dflash has window={options['window']}; expected 1 or more")
    if options.get("int8", 1) not in (0, 1):
        raise InvalidRequest(f"dflash has int8={options['int8']}; expected 1, or 0 for float32")
    if options.get("bits", 8) not in (4, 8):
        raise InvalidRequest(f"dflash has bits={options['bits']}; expected 4 or 8")
    return path, options


def _model(argument: str, shared: Shared, _own: Own) -> Drafter:
    if argument not in shared.models:
        if shared.open_model is None:
            raise InvalidRequest(f"{shared.target} cannot have another model as its drafter")
        shared.models[argument] = shared.open_model(argument)
    return ModelDrafter(shared.models[argument])


def _ahead(argument: str, shared: Shared, own: Own) -> Drafter:
    if shared.beside is None or shared.worker is None:
        shared.beside = replace(shared, models={})
        shared.worker = ThreadPoolExecutor(1, thread_name_prefix="paceline-ahead")
    ((make, inner),) = _parts(argument)
    return AheadDrafter(make(inner, shared.beside, own), shared.worker)


def _check_ahead(argument: str) -> None:
    if argument.partition(":")[0] != "model":
        raise InvalidRequest(
            f"{argument or 'nothing'} cannot draft ahead; expected ahead:model:NAME, for the "
            "others take no time, or need what the target is still computing"
        )
    _parts(argument)


def _prediction(_argument: str, _shared: Shared, own: Own) -> Drafter:
    return PredictionDrafter(own.prediction, own.prompt_length)


def _check_model(argument: str) -> None:
    if not argument:
        raise InvalidRequest("drafter model needs a name or path: model:NAME")


_Maker = Callable[[str, Shared, Own], Drafter]
_KNOWN: dict[str, tuple[_Maker, Callable[[str], object]]] = {
    "ngram": (_ngram, lambda argument: _ngram(argument, Shared(), Own())),
    "suffix": (_suffix, lambda argument: _only("suffix", argument, ("", "earlier"))),
    "recycle": (_recycle, lambda argument: _only("recycle", argument, ("",))),
    "table": (_table, lambda _folder: None),
    "dflash": (_dflash, _dflash_options),
    "model": (_model, _check_model),
    "ahead": (_ahead, _check_ahead),
    "prediction": (_prediction, lambda argument: _only("prediction", argument, ("",))),
}
"""Name -> how it is made, and how what stands behind its colon is checked."""


_MOST_PARTS = 8
"""Drafters that a request may have at once: each indexes the whole context."""


def _parts(spec: str) -> list[tuple[_Maker, str]]:
    if spec in ("none", "auto"):
        return []
    found = []
    parts = spec.split("+")
    if len(parts) > _MOST_PARTS or len(set(parts)) < len(parts):
        raise InvalidRequest(
            f"drafter has {len(parts)} parts joined by +; expected at most {_MOST_PARTS}, no two "
            "of them the same"
        )
    for part in parts:
        name, _, argument = part.partition(":")
        if name not in _KNOWN:
            raise InvalidRequest(
                f"no drafter is called {name[:40]!r}; expected none, auto, or {', '.join(_KNOWN)} "
                "joined by +"
            )
        make, check_argument = _KNOWN[name]
        check_argument(argument)
        found.append((make, argument))
    return found


def _only(name: str, argument: str, expected: tuple[str, ...]) -> None:
    if argument not in expected:
        option, equals, _ = argument.partition("=")
        if equals and option in expected:
            raise InvalidRequest(f"drafter option {option} takes no value")
        options = ", ".join(filter(None, expected)) or "none"
        raise InvalidRequest(f"drafter {name} has no option {option!r}; expected {options}")


def _options(name: str, argument: str, known: tuple[str, ...]) -> dict[str, int]:
    options = {}
    for option in argument.split(",") if argument else ():
        key, _, value = option.partition("=")
        if key not in known:
            raise InvalidRequest(
                f"drafter {name} has no option {key!r}; expected {', '.join(known)}"
            )
        try:
            options[key] = int(value)
        except ValueError:
            raise InvalidRequest(f"drafter option {key} is {value!r}; expected a number") from None
    return options


def _folder(kind: str, argument: str, shared: Shared) -> Path:
    if argument:
        return shared.find(argument)
    if kind not in shared.shipped:
        raise InvalidRequest(
            f"no {kind} comes with {shared.target}; train one with `paceline train {kind}` and "
            f"name its folder: {kind}:FOLDER"
        )
    return shared.shipped[kind]
