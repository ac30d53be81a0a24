"""A request: checked options, with the defaults of the model under them.

The first layer with a value determines a setting: the request, the registry's entry for the model,
the model's own files, the fallback. `paceline.options` has the ranges.
"""

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from paceline.decoding.auto import Acceptance, Auto
from paceline.decoding.costs import CostTable
from paceline.decoding.generation import Rules
from paceline.decoding.policy import Adaptive, Fixed, Kelly
from paceline.decoding.reasoning import ReasoningMarks
from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import DEFAULT, Repetition, Stopping
from paceline.decoding.types import Constraint, Drafter, Policy
from paceline.drafters import DrafterSpec, Probe
from paceline.engines.costs import MAX_ROWS
from paceline.errors import InvalidRequest, ModelError
from paceline.models import ModelFiles, settings_of
from paceline.options import Options, faults, schema_of

if TYPE_CHECKING:
    from paceline.constraints.grammar import Grammars

_RULES: Mapping[str, type[Fixed]] = {"fixed": Fixed, "adaptive": Adaptive, "kelly": Kelly}

_RULE_BLOCK = 8  # default rows of the policies that do not weigh costs
_DRAWN_BITS = 32  # of a drawn seed: few, because people type it

# The settings that have layers, with neutral values: greedy, without a limit.
NEUTRAL: Mapping[str, Any] = {
    one.name: one.default for one in fields(Sampling) if one.name not in ("logit_bias", "seed")
} | {"max_tokens": None}


class Setting(NamedTuple):
    """A value and the layer that it comes from."""

    value: Any
    source: Literal["request", "registry", "model", "fallback"]


@dataclass(frozen=True, slots=True)
class Defaults:
    """The layers under a request; without arguments: greedy, for any model."""

    registry: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    """Settings in the model's own files."""
    fallback: Mapping[str, Any] = field(default_factory=dict)
    """Fallbacks that differ from `NEUTRAL`."""

    def resolve(self, request: Mapping[str, Any]) -> dict[str, Setting]:
        """Return every setting of `NEUTRAL`, from the first layer that has it."""
        settings = {name: Setting(value, "fallback") for name, value in NEUTRAL.items()}
        settings |= {name: Setting(value, "fallback") for name, value in self.fallback.items()}
        settings |= {name: Setting(value, "model") for name, value in self.model.items()}
        settings |= {name: Setting(value, "registry") for name, value in self.registry.items()}
        settings |= {name: Setting(value, "request") for name, value in request.items()}
        return {name: settings[name] for name in NEUTRAL}


@dataclass(frozen=True, slots=True)
class Request:
    """Checked options."""

    sampling: Sampling
    drafter: DrafterSpec
    """Drafters; `auto` is resolved in a request of `Model._request`."""
    policy: str
    max_block: int
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    probe: DrafterSpec | None = None
    raw: bool = False
    system: str | None = None
    parse_special: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: bool = False
    constraint: Constraint | None = None
    prediction: Sequence[int] = ()
    think: bool | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    thoughts: ReasoningMarks | None = None
    """Tags of the model's reasoning; None: all of the text is the answer."""
    private: bool = False
    """True if the answer is neither saved nor drafted from saved ones."""
    shown: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that stay in the answer's text: id -> text."""
    repetition: Repetition | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)

    def rules(self, stop_token_ids: Collection[int]) -> Rules:
        """Return the rules for an answer of a model with these end-of-sequence tokens."""
        ends = frozenset() if self.ignore_eos else frozenset(stop_token_ids)
        return Rules(
            self.sampling,
            Stopping(self.max_tokens, ends, self.stop, self.min_tokens, self.repetition),
            self.constraint,
            self.logprobs,
            self.prompt_logprobs,
            self.thoughts,
            self.shown,
        )

    def within(self, room: int) -> "Request":
        """Return the same request with at most `room` tokens in the answer."""
        return replace(self, max_tokens=min(self.max_tokens or room, room))

    def policy_for(
        self, cost: Callable[[], CostTable], acceptance: Acceptance, context: int
    ) -> Policy:
        """Return the policy that limits drafts, for a prompt of `context` tokens.

        `cost` is called only for `auto`; `acceptance` learns as the request runs.
        """
        if self.drafter.none:
            return Fixed(2)  # for probes
        if self.policy == "auto":
            return Auto(self.max_block, cost(), acceptance, context, latest=cost)
        return _RULES[self.policy](self.max_block)


class RequestDrafters(NamedTuple):
    asked: Sequence[Drafter]
    probes: Sequence[Probe]  # are only watched
    policy: Policy
    acceptance: Acceptance  # of earlier answers; the policy updates it


def check(options: Options, defaults: Defaults | None = None) -> Request:
    """Check `options`; `defaults` supplies missing ones. None: greedy, without a limit.

    Raises InvalidRequest, with a line for each option that is unknown, has a wrong type, or is out
    of range; otherwise for the first other fault.
    """
    layers = defaults or Defaults()
    if options.get("generation_config") == "none":
        layers = replace(layers, registry={}, model={})
    # NumPy numbers become Python numbers, which JSON supports.
    scalars = {name: each.item() for name, each in options.items() if isinstance(each, np.generic)}
    given: Any = {**options, **scalars}
    settings = layers.resolve(given)
    values: dict[str, Any] = {**given, **{name: settings[name].value for name in settings}}
    if wrong := faults(values):
        raise InvalidRequest("\n".join(wrong))
    if values.get("seed") is None:
        values["seed"] = draw_seed()
    stop, policy = values.get("stop", ()), values.get("policy", "auto")
    block = values.get("max_block")
    if block is None:
        block = MAX_ROWS if policy == "auto" else _RULE_BLOCK
    drafter = DrafterSpec.parse(values.get("drafter", "auto"))
    probe = None if values.get("probe") is None else DrafterSpec.parse(values["probe"])
    for spec in (drafter, probe):
        if spec and spec.has("prediction") and not values.get("prediction"):
            raise InvalidRequest(
                f"drafter {spec} needs a prediction; give one with the option prediction, or omit "
                f"the drafter"
            )
    values |= {
        "sampling": Sampling(**_fields_of(Sampling, values)),
        "drafter": drafter,
        "policy": policy,
        "max_block": block,
        "stop": (stop,) if isinstance(stop, str) else tuple(stop),
        "probe": probe,
        "prediction": values.get("prediction") or (),
        "repetition": _repetition(values.get("repetition_detection")),
        "settings": settings,
    }
    return Request(**_fields_of(Request, values))


def draw_seed() -> int:
    return secrets.randbits(_DRAWN_BITS)


def _fields_of(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {one.name: values[one.name] for one in fields(kind) if one.name in values}


def structure(options: Options, grammars: "Callable[[], Grammars]") -> Constraint | None:
    """Compile the structure that checked options require of an answer; None if there is none.

    Raises InvalidRequest if it is wrong or too complex, and what `Grammars` raises.
    """
    if (schema := schema_of(options.get("json_schema"))) is not None:
        return grammars().json_schema(schema)
    if (regex := options.get("regex")) is not None:
        return grammars().regex(regex)
    grammar = options.get("grammar")
    return None if grammar is None else grammars().lark(grammar)


def defaults_of(files: ModelFiles) -> Defaults:
    """Return a model's default settings: the registry's, else those of its own files.

    Raises ModelError if its own settings cannot be used.
    """
    defaults = Defaults(registry=settings_of(files.name), model=files.settings)
    try:
        check({}, defaults)
    except InvalidRequest as error:
        raise ModelError(
            f"invalid settings of {files.name}: {error}; fix generation_config.json in "
            f"{files.folder}, or ignore it with --generation-config none"
        ) from error
    return defaults


def _repetition(value: bool | Mapping[str, Any] | None) -> Repetition | None:
    """Return the rule of `repetition_detection`; as in vLLM, `max_pattern_size` 0 disables it."""
    if not isinstance(value, Mapping):
        return DEFAULT if value else None
    rule = {"max_pattern_size": 0, "min_pattern_size": 0, "min_count": 0, **value}
    if unknown := rule.keys() - {part.name for part in fields(Repetition)}:
        raise InvalidRequest(f"repetition_detection has no {min(unknown)}")
    if rule == {**rule, "max_pattern_size": 0, "min_pattern_size": 0}:
        return None
    try:
        return Repetition(**rule)
    except ValueError as error:
        raise InvalidRequest(f"repetition_detection is wrong: {error}") from error
