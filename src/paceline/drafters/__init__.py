"""Who guesses: one file each. A drafter sees the context and proposes; it never decides.

`create` makes drafters from a spec such as `ngram:min=2,max=5` or `suffix+recycle`.
"""

from collections.abc import Callable, Mapping

from paceline.decoding.types import Drafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.probe import Probe
from paceline.drafters.recycle import RecycleDrafter
from paceline.drafters.suffix import Corpus, SuffixDrafter
from paceline.errors import InvalidRequest

DEFAULT = "suffix"
"""What `auto` stands for."""

__all__ = [
    "DEFAULT",
    "Corpus",
    "NgramDrafter",
    "Probe",
    "RecycleDrafter",
    "SuffixDrafter",
    "create",
    "remembers",
    "resolved",
]


def create(spec: str, corpus: Corpus | None = None) -> list[Drafter]:
    """The drafters that `spec` names, in its order.

    Args:
        spec: `none`, `auto`, or parts joined by `+`: `ngram[:min=,max=,length=]`,
            `suffix[:earlier]` (also look in earlier answers of the process), `recycle`.
        corpus: earlier answers, for `suffix:earlier`.

    Raises:
        InvalidRequest: an unknown name, option or value.
    """
    if spec == "none":
        return []
    return [_part(part, corpus) for part in resolved(spec).split("+")]


def resolved(spec: str) -> str:
    """`spec` with `auto` spelled out."""
    return DEFAULT if spec == "auto" else spec


def remembers(spec: str) -> bool:
    """Whether a drafter of `spec` looks in earlier answers, so that this one should be kept."""
    return any(part == "suffix:earlier" for part in resolved(spec).split("+"))


def _ngram(options: Mapping[str, str], _corpus: Corpus | None) -> Drafter:
    values = {key: _whole(key, options[key]) for key in options}
    try:
        return NgramDrafter(
            min_match=values.get("min", 1),
            max_match=values.get("max", 4),
            length=values.get("length", 15),
        )
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def _suffix(options: Mapping[str, str], corpus: Corpus | None) -> Drafter:
    return SuffixDrafter(corpus if "earlier" in options else None)


def _recycle(_options: Mapping[str, str], _corpus: Corpus | None) -> Drafter:
    return RecycleDrafter()


_Maker = Callable[[Mapping[str, str], Corpus | None], Drafter]
_KNOWN: dict[str, tuple[_Maker, frozenset[str]]] = {
    "ngram": (_ngram, frozenset({"min", "max", "length"})),
    "suffix": (_suffix, frozenset({"earlier"})),
    "recycle": (_recycle, frozenset()),
}


def _part(part: str, corpus: Corpus | None) -> Drafter:
    name, _, rest = part.partition(":")
    if name not in _KNOWN:
        raise InvalidRequest(
            f"no drafter is called {name!r}; expected none, auto, or {', '.join(_KNOWN)} "
            "joined by +"
        )
    make, allowed = _KNOWN[name]
    options = {}
    for option in rest.split(",") if rest else ():
        key, equals, value = option.partition("=")
        if key not in allowed:
            expected = ", ".join(sorted(allowed)) or "none"
            raise InvalidRequest(f"drafter {name} has no option {key!r}; expected {expected}")
        if equals and key == "earlier":
            raise InvalidRequest(f"drafter option {key} takes no value")
        options[key] = value
    return make(options, corpus)


def _whole(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise InvalidRequest(f"drafter option {key} is {value!r}; expected a number") from None
