"""Parses drafter specs, such as `suffix+table` or `ngram:min=2,max=4`, and creates drafters.

`DrafterSpec.parse` is called where text enters (options, commands, requests); all other code uses
the object. Drafters that read hidden states are in other packages (`heads.py`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.decoding.sampling import Sampling
from paceline.decoding.types import Drafter
from paceline.drafters import heads
from paceline.drafters.ahead import AheadDrafter
from paceline.drafters.heads import DraftKV, OpenHead
from paceline.drafters.kept import KeptDrafter, KeptText
from paceline.drafters.model import DraftModel, ModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.suffix import AnswerHistory, SuffixDrafter
from paceline.drafters.table import Table, TableDrafter
from paceline.errors import InvalidRequest, did_you_mean
from paceline.storage.coreml import is_core_ml

_BEST = ("table", "kept")
"""Kinds that `auto` uses after `suffix`, if the target has them; built-in heads follow."""

MAX_PARTS = 8
"""Maximum drafters per request: each indexes the whole context."""


@dataclass(frozen=True, slots=True)
class DrafterPart:
    """One drafter of a spec: the text between two `+`."""

    kind: str
    """`ngram`, `suffix`, `table`, `kept`, `model`, `prediction`, or a kind of heads."""
    argument: str = ""
    """The text after the colon."""
    name: str = ""
    """Folder or model; empty: the drafter shipped with the target."""
    options: Mapping[str, int] = field(default_factory=dict)
    ahead: bool = False
    """True if it drafts while the target verifies."""

    def __str__(self) -> str:
        text = f"{self.kind}:{self.argument}" if self.argument else self.kind
        return f"ahead:{text}" if self.ahead else text


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """Drafters in priority order; without parts: plain decoding, or `auto`."""

    parts: tuple[DrafterPart, ...] = ()
    auto: bool = False
    """Choose the best drafters for the target; see `resolve`."""

    @classmethod
    def parse(cls, text: "str | DrafterSpec") -> "DrafterSpec":
        """Parse `none`, `auto`, or up to 8 different parts joined by `+`.

        The parts: `ngram[:min=,max=,length=]`, `suffix[:earlier]` (also searches earlier answers of
        the process), `table[:FOLDER]`, `kept` (the target's answer history; no drafts if it is
        empty), `model:NAME` (a smaller model), `prediction`, and heads,
        `KIND[:FOLDER][,OPTION=...]`, where the default folder is the one shipped with the target;
        `ahead:model:NAME` and `ahead:dflash:FOLDER` draft while the target verifies. Raises
        InvalidRequest for an unknown drafter, option or value, whatever the target.
        """
        if isinstance(text, DrafterSpec):
            return text
        if text in ("none", "auto"):
            return cls(auto=text == "auto")
        parts = text.split("+")
        if len(parts) > MAX_PARTS or len(set(parts)) < len(parts) or {"none", "auto"} & {*parts}:
            raise InvalidRequest(
                f"drafter has {len(parts)} parts joined by +; expected at most {MAX_PARTS}, no two "
                "of them the same, and not none or auto"
            )
        return cls(tuple(map(_part, parts)))

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return "auto" if self.auto else "+".join(map(str, self.parts)) or "none"

    @property
    def none(self) -> bool:
        return not (self.parts or self.auto)

    def has(self, kind: str) -> bool:
        return any(part.kind == kind for part in self.parts)

    @property
    def uses_earlier_answers(self) -> bool:
        """True if a drafter searches earlier answers, so that this one must be saved."""
        return any((part.kind, part.argument) == ("suffix", "earlier") for part in self.parts)

    @property
    def without_folders(self) -> str:
        """The text without the parents of its folders, for published results."""
        parts = (replace(part, argument=Path(part.argument).name) for part in self.parts)
        return str(replace(self, parts=tuple(parts)))

    def resolve(self, shipped: Collection[str], *, prediction: bool = False) -> "DrafterSpec":
        """Replace `auto` with the best drafters for the target.

        Args:
            shipped: kinds of drafters shipped with the target, or inside it; `kept` if it has an
                answer history; names of published ones, as `parse` reads them.
            prediction: True if the request has a prediction. Its drafter goes first if the spec
                does not name it.
        """
        if self.none:
            return self
        parts = self.parts
        if self.auto:
            inside = sorted({*shipped} - {*_BEST})
            best = ["suffix", *(kind for kind in _BEST if kind in shipped), *inside]
            parts = tuple(map(_part, best))
        if prediction and not self.has("prediction"):
            parts = (DrafterPart("prediction"), *parts)
        return DrafterSpec(parts)


@dataclass(slots=True)
class DrafterResources:
    """Resources that the drafters of all requests to one target share."""

    target: str = "this model"
    """The target's name, for messages."""
    engine: str = "none"
    files: Path = Path()
    """The target's own files: a GGUF file, or a folder."""
    opened: Any = None
    """The engine itself, for heads."""
    vocab_size: int = 0
    history: AnswerHistory = field(default_factory=AnswerHistory)
    """Earlier answers, for `suffix:earlier`."""
    shipped: Mapping[str, Path] = field(default_factory=dict)
    """Kind of drafter -> its folder, for drafters shipped with the target."""
    find: Callable[[str], Path] = Path
    """Resolves the name of a drafter, e.g. a path, to its folder."""
    tables: dict[str, Table] = field(default_factory=dict)
    heads: dict[str, OpenHead] = field(default_factory=dict)
    """Open heads, by the text of their part."""
    open_model: Callable[[str], DraftModel] | None = None
    """Opens a draft model and checks its vocabulary; None: this target cannot have one."""
    models: dict[str, DraftModel] = field(default_factory=dict)
    ahead: "DrafterResources | None" = None
    """Resources of the drafters in the worker thread, which share none with the others."""
    worker: ThreadPoolExecutor | None = None
    """The thread of the drafters that draft ahead."""


@dataclass(slots=True)
class RequestContext:
    kv: DraftKV = field(default_factory=DraftKV)
    """KV from earlier drafters of the same sequence."""
    prediction: Sequence[int] = ()
    prompt_length: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    """How the target picks: drafters with a distribution pick alike."""
    kept: KeptText | None = None
    """Earlier answers of the target, if this request may draft from them."""


def shipped(model: str, files: Path | None = None, engine: str = "none") -> dict[str, Path]:
    """Map the kinds of drafters that ship with a model to their paths.

    Args:
        model: its name; a path has none shipped for it.
        files: the model itself, which may have a head inside.
        engine: the engine that runs it.
    """
    own = dict[str, Path]()
    if files is not None:
        kinds = [kind for kind, engines in heads.engines_by_kind().items() if engine in engines]
        own = {kind: files for kind in kinds if heads.load_kind(engine, kind).is_inside(files)}
    folder = Path(__file__).parent / "shipped" / model
    if Path(model).name != model or not folder.is_dir():
        return own
    return own | {path.name: path for path in sorted(folder.iterdir()) if path.is_dir()}


def create(
    spec: str | DrafterSpec,
    shared: DrafterResources | None = None,
    request: RequestContext | None = None,
) -> list[Drafter]:
    """Make the drafters of `spec`, in its order.

    Args:
        spec: see `DrafterSpec.parse`; `auto` is resolved before, by `Model._request`.
        shared: resources of the target.
        request: the request that the drafters are for.

    Raises:
        InvalidRequest: an unknown name, option or value, or a drafter that this target cannot have.
        ModelError: a drafter that does not fit the target, or cannot be read.
    """
    shared = shared or DrafterResources()
    request = request or RequestContext()
    parts = [("ahead" if part.ahead else part.kind, part) for part in _parts(spec)]
    return [_MAKERS.get(kind, _head)(part, shared, request) for kind, part in parts]


def taps(spec: str | DrafterSpec, shared: DrafterResources) -> tuple[int, ...]:
    """Return the target's layers whose hidden states the drafters of `spec` need, ascending.

    Raises what `create` raises.
    """
    needed: set[int] = set()
    for part in _parts(spec):
        if str(part) in shared.heads:
            needed.update(shared.heads[str(part)].taps)
        elif part.kind not in _MAKERS:
            needed.update(_kind(part, shared).taps(_folder(part, shared), shared.files))
    return tuple(sorted(needed))


def slots(spec: str | DrafterSpec, shared: DrafterResources) -> int | None:
    """Return the KV slots of the smallest open draft model of `spec`, or None without one."""
    ahead = shared.ahead.models if shared.ahead else {}
    parts = (part for part in DrafterSpec.parse(spec).parts if part.kind == "model")
    found = ((ahead if part.ahead else shared.models).get(part.name) for part in parts)
    return min((model.slots for model in found if model is not None), default=None)


def _parts(spec: str | DrafterSpec) -> tuple[DrafterPart, ...]:
    spec = DrafterSpec.parse(spec)
    assert not spec.auto, "auto has to be resolved first"
    return spec.parts


# -- parsing ---------------------------------------------------------------------------------------


def _part(text: str) -> DrafterPart:
    kind, _, argument = text.partition(":")
    match kind:
        case "ngram":
            options = _options(kind, argument, ("length", "max", "min"))
            _ngram(options)  # raises if a value is out of its range
            return DrafterPart(kind, argument, options=options)
        case "suffix" | "kept" | "prediction":
            expected = "earlier" if kind == "suffix" else ""
            if argument not in ("", expected):
                raise InvalidRequest(
                    f"drafter {kind} has no option {argument!r}; expected {expected or 'none'}"
                )
            return DrafterPart(kind, argument)
        case "table":
            return DrafterPart(kind, argument, argument)
        case "model" | "ahead":
            return _named_part(kind, argument)
    if kind in (engines := heads.engines_by_kind()):
        return _head_part(kind, argument, engines[kind])
    names = drafter_names()
    raise InvalidRequest(
        f"unknown drafter {kind[:40]!r}; {did_you_mean(kind[:40], names)}"
        f"expected none, auto, or {', '.join(names[2:])}, joined by + (no path may contain +)"
    )


def drafter_names() -> Sequence[str]:
    """Return `none`, `auto` and every kind of drafter."""
    return ("none", "auto", *_MAKERS, *heads.engines_by_kind())


def _head_part(kind: str, argument: str, engines: Sequence[str]) -> DrafterPart:
    parts = argument.split(",")
    option, is_option, _ = parts[0].partition("=")
    folder = "" if is_option and option.isidentifier() else parts.pop(0)  # /a=b is a folder
    allowed = {
        option: values
        for engine in engines
        for option, values in heads.load_kind(engine, kind).options.items()
    }
    options = _options(kind, ",".join(parts), tuple(sorted(allowed)))
    for option, value in options.items():
        if value < 1 or (allowed[option] and value not in allowed[option]):
            expected = " or ".join(map(str, allowed[option])) or "1 or more"
            raise InvalidRequest(f"{kind} has {option}={value}; expected {expected}")
    return DrafterPart(kind, argument, folder, options)


def _named_part(kind: str, argument: str) -> DrafterPart:
    if kind == "ahead" and argument.partition(":")[0] not in ("model", "dflash"):
        raise InvalidRequest(
            f"{argument or 'nothing'} cannot draft ahead; expected ahead:model:NAME or "
            "ahead:dflash:FOLDER: other drafters take no time, or need states that the target is "
            "still computing"
        )
    part = _part(argument) if kind == "ahead" else DrafterPart(kind, argument, argument)
    if not part.name:
        raise InvalidRequest(f"drafter {part.kind} needs a name or path: {part.kind}:NAME")
    return replace(part, ahead=kind == "ahead")


def _options(name: str, argument: str, option_names: tuple[str, ...]) -> dict[str, int]:
    options = {}
    for option in argument.split(",") if argument else ():
        key, _, value = option.partition("=")
        if key not in option_names or key in options:
            raise InvalidRequest(
                f"drafter {name} has no option {key!r}; expected {', '.join(option_names)}, "
                "each once, after a comma (no path may contain a comma)"
            )
        try:
            options[key] = int(value)
        except ValueError:
            raise InvalidRequest(f"drafter option {key} is {value!r}; expected a number") from None
    return options


# -- making ----------------------------------------------------------------------------------------


def _ngram(options: Mapping[str, int]) -> Drafter:
    return NgramDrafter(
        min_match=options.get("min", 1),
        max_match=options.get("max", 4),
        length=options.get("length", 15),
    )


def _table(part: DrafterPart, shared: DrafterResources, _request: RequestContext) -> Drafter:
    if part.name not in shared.tables:
        shared.tables[part.name] = Table.open(_folder(part, shared), shared.vocab_size)
    return TableDrafter(shared.tables[part.name])


def _model(part: DrafterPart, shared: DrafterResources, request: RequestContext) -> Drafter:
    if part.name not in shared.models:
        if shared.open_model is None:
            raise InvalidRequest(f"{shared.target} cannot have another model as its drafter")
        shared.models[part.name] = shared.open_model(part.name)
    return ModelDrafter(shared.models[part.name], request.sampling, request.prompt_length)


def _ahead(part: DrafterPart, shared: DrafterResources, request: RequestContext) -> Drafter:
    if shared.ahead is None or shared.worker is None:
        shared.ahead = replace(shared, models={}, heads={})
        shared.worker = ThreadPoolExecutor(1, thread_name_prefix="paceline-ahead")
    make = _model if part.kind == "model" else _head
    return AheadDrafter(make(part, shared.ahead, request), shared.worker)


def _head(part: DrafterPart, shared: DrafterResources, request: RequestContext) -> Drafter:
    name = str(part)
    if name not in shared.heads:
        kind, folder = _kind(part, shared), _folder(part, shared)
        shared.heads[name] = kind.open(folder, shared.opened, part.options)
    head = shared.heads[name]
    if name not in request.kv:
        request.kv[name] = head.new_cache()
    return head.drafter(request.kv[name], request.sampling, request.prompt_length)


_MAKERS: Mapping[str, Callable[[DrafterPart, DrafterResources, RequestContext], Drafter]] = {
    "ngram": lambda part, *_: _ngram(part.options),
    "suffix": lambda part, shared, _: SuffixDrafter(shared.history if part.argument else None),
    "table": _table,
    "kept": lambda _part, _shared, request: KeptDrafter(request.kept or KeptText.count((), 0)),
    "model": _model,
    "ahead": _ahead,
    "prediction": lambda _part, _shared, request: PredictionDrafter(
        request.prediction, request.prompt_length
    ),
}


def _kind(part: DrafterPart, shared: DrafterResources) -> heads.HeadKind:
    engines, engine = heads.engines_by_kind()[part.kind], shared.engine
    if "coreml" in engines and part.name and is_core_ml(_folder(part, shared)):
        engine = "coreml"  # on a device of its own
    elif part.ahead:
        raise InvalidRequest(
            f"{part.name} runs where its target does and cannot draft ahead; expected a folder "
            "that `paceline convert DRAFTER --to coreml --target MODEL` made"
        )
    elif engine not in engines:
        raise InvalidRequest(
            f"the drafter {part.kind} runs with the engine {' or '.join(engines)}, and "
            f"{shared.target} with {engine}; remove it, or use a model for that engine"
        )
    kind = heads.load_kind(engine, part.kind)
    for option in part.options.keys() - kind.options.keys():
        raise InvalidRequest(
            f"drafter {part.kind} has no option {option!r} with the engine {engine}; "
            f"expected {', '.join(kind.options) or 'none'}"
        )
    return kind


def _folder(part: DrafterPart, shared: DrafterResources) -> Path:
    if part.name:
        return shared.find(part.name)
    if part.kind not in shared.shipped:
        way = "make one with `paceline learn`" if part.kind == "table" else "use a published one"
        raise InvalidRequest(
            f"no {part.kind} ships with {shared.target}; {way} and name its path or repository: "
            f"{part.kind}:NAME"
        )
    return shared.shipped[part.kind]
