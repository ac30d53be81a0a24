"""A drafter's name, such as `suffix+table` or `ngram:min=2,max=4`, parsed once.

`DrafterSpec.parse` is called where text comes in (options, commands, requests); everything else
uses the object. Nothing is opened here: `factory.py` makes the drafters.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.drafters.ngram import NgramDrafter
from paceline.errors import InvalidRequest

_BEST = ("suffix", "table", "kept", "mtp")
"""Kinds of `auto`, as far as the target has them."""

_COUNTS = {"dflash": ("window",), "mtp": ("length", "vocab")}
"""Options of drafters with a network, of 1 or more."""

MAX_PARTS = 8
"""Maximum drafters of a request: each indexes the whole context."""


@dataclass(frozen=True, slots=True)
class DrafterPart:
    """One drafter of a spec: the text between two `+`."""

    kind: str
    """`ngram`, `suffix`, `table`, `kept`, `dflash`, `mtp`, `model`, `ahead` or `prediction`."""
    argument: str = ""
    """The text after the colon."""
    name: str = ""
    """Its folder or model; empty: the drafter shipped with the target."""
    options: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind}:{self.argument}" if self.argument else self.kind


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """Drafters in the order in which they are asked; without parts plain decoding, or `auto`."""

    parts: tuple[DrafterPart, ...] = ()
    auto: bool = False
    """Choose the best drafters for the target; see `resolve`."""

    @classmethod
    def parse(cls, text: "str | DrafterSpec") -> "DrafterSpec":
        """Parse `none`, `auto`, or up to 8 different parts joined by `+`.

        The parts: `ngram[:min=,max=,length=]`, `suffix[:earlier]` (also searches earlier answers of
        the process), `table[:FOLDER]`, `kept` (the target's earlier answers that were kept; nothing
        if none were), `dflash[:FOLDER][,window=,int8=,bits=]` (`bits` for a target that MLX runs,
        `int8` for any other), `mtp[:FOLDER][,length=,vocab=,int8=,bits=]`, `model:NAME` (a smaller
        model), `ahead:model:NAME` (the same, while the target verifies), `prediction`. Without a
        folder it is the drafter shipped with the target, or the MTP head inside it. Raises
        InvalidRequest for an unknown drafter, option or value, whatever the target.
        """
        if isinstance(text, DrafterSpec):
            return text
        if text in ("none", "auto"):
            return cls(auto=text == "auto")
        parts = text.split("+")
        if len(parts) > MAX_PARTS or len(set(parts)) < len(parts):
            raise InvalidRequest(
                f"drafter has {len(parts)} parts joined by +; expected at most {MAX_PARTS}, no two "
                "of them the same"
            )
        return cls(tuple(map(_part, parts)))

    def __str__(self) -> str:
        """The text that `parse` reads."""
        return "auto" if self.auto else "+".join(map(str, self.parts)) or "none"

    @property
    def none(self) -> bool:
        """Whether nothing is drafted."""
        return not (self.parts or self.auto)

    def has(self, kind: str) -> bool:
        """Whether a part is of this kind."""
        return any(part.kind == kind for part in self.parts)

    @property
    def uses_earlier_answers(self) -> bool:
        """Whether a drafter searches earlier answers, so that this one has to be kept."""
        return any((part.kind, part.argument) == ("suffix", "earlier") for part in self.parts)

    @property
    def without_folders(self) -> str:
        """The text without the parents of its folders, for published results."""
        parts = (replace(part, argument=Path(part.argument).name) for part in self.parts)
        return str(replace(self, parts=tuple(parts)))

    def resolve(self, shipped: Container[str], *, prediction: bool = False) -> "DrafterSpec":
        """Replace `auto` by the best drafters for the target.

        Args:
            shipped: kinds of drafters shipped with the target, or inside it; `kept` if answers
                of it are kept.
            prediction: whether the answer has a prediction. Its drafter goes first if the spec
                does not name it.
        """
        if self.none:
            return self
        parts = self.parts
        if self.auto:
            parts = tuple(
                DrafterPart(kind) for kind in _BEST if kind == "suffix" or kind in shipped
            )
        if prediction and not self.has("prediction"):
            parts = (DrafterPart("prediction"), *parts)
        return DrafterSpec(parts)


def ngram_drafter(options: Mapping[str, int]) -> NgramDrafter:
    """Make the drafter `ngram` with these options. Raises InvalidRequest."""
    try:
        return NgramDrafter(
            min_match=options.get("min", 1),
            max_match=options.get("max", 4),
            length=options.get("length", 15),
        )
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def _part(text: str) -> DrafterPart:
    kind, _, argument = text.partition(":")
    match kind:
        case "ngram":
            options = _options(kind, argument, ("length", "max", "min"))
            ngram_drafter(options)  # raises if a value is out of its range
            return DrafterPart(kind, argument, options=options)
        case "suffix":
            _flag(kind, argument, ("", "earlier"))
            return DrafterPart(kind, argument)
        case "kept" | "prediction":
            _flag(kind, argument, ("",))
            return DrafterPart(kind)
        case "table":
            return DrafterPart(kind, argument, argument)
        case "dflash" | "mtp":
            return _network(kind, argument, _COUNTS[kind])
        case "model" | "ahead":
            return _model(kind, argument)
    raise InvalidRequest(
        f"no drafter is called {kind[:40]!r}; expected none, auto, or ngram, suffix, table, "
        "kept, dflash, mtp, model, ahead, prediction joined by +"
    )


def _network(kind: str, argument: str, counts: tuple[str, ...]) -> DrafterPart:
    """A drafter with a network: its folder, its precision, and options `counts` of 1 or more."""
    parts = argument.split(",")
    folder = "" if "=" in parts[0] else parts.pop(0)
    options = _options(kind, ",".join(parts), tuple(sorted((*counts, "bits", "int8"))))
    for name in counts:
        if options.get(name, 1) < 1:
            raise InvalidRequest(f"{kind} has {name}={options[name]}; expected 1 or more")
    if options.get("int8", 1) not in (0, 1):
        raise InvalidRequest(f"{kind} has int8={options['int8']}; expected 1, or 0 for float32")
    if options.get("bits", 8) not in (4, 8):
        raise InvalidRequest(f"{kind} has bits={options['bits']}; expected 4 or 8")
    return DrafterPart(kind, argument, folder, options)


def _model(kind: str, argument: str) -> DrafterPart:
    name = argument
    if kind == "ahead":
        inner, _, name = argument.partition(":")
        if inner != "model":
            raise InvalidRequest(
                f"{argument or 'nothing'} cannot draft ahead; expected ahead:model:NAME, because "
                "the others take no time, or need what the target is still computing"
            )
    if not name:
        raise InvalidRequest("drafter model needs a name or path: model:NAME")
    return DrafterPart(kind, argument, name)


def _flag(kind: str, argument: str, expected: tuple[str, ...]) -> None:
    if argument not in expected:
        option, equals, _ = argument.partition("=")
        if equals and option in expected:
            raise InvalidRequest(f"drafter option {option} takes no value")
        options = ", ".join(filter(None, expected)) or "none"
        raise InvalidRequest(f"drafter {kind} has no option {option!r}; expected {options}")


def _options(name: str, argument: str, option_names: tuple[str, ...]) -> dict[str, int]:
    options = {}
    for option in argument.split(",") if argument else ():
        key, _, value = option.partition("=")
        if key not in option_names:
            raise InvalidRequest(
                f"drafter {name} has no option {key!r}; expected {', '.join(option_names)}"
            )
        try:
            options[key] = int(value)
        except ValueError:
            raise InvalidRequest(f"drafter option {key} is {value!r}; expected a number") from None
    return options
