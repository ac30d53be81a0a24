"""Token parity, and the verdict of a verification.

Prompts are answered with drafters, policies, blocks and samplings, alone and several in one call;
the tokens must equal plain decoding's. `rows.py` has row invariance.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from paceline import drafters
from paceline.engines.base import Engine
from paceline.engines.exact import Compared
from paceline.errors import InvalidRequest
from paceline.options import GREEDY as NEUTRAL
from paceline.options import POLICIES, Options
from paceline.runtime.model import Model
from paceline.storage.json_lines import Journal
from paceline.verify.suite import Suite, prompt_for

DRAFTERS = (
    "suffix",
    "suffix:earlier",
    "ngram",
    "ngram:min=2,max=3,length=4",
    "ngram+suffix",
)
BLOCKS = tuple(range(2, 17))
GREEDY: Options = {"temperature": 0.0}
SAMPLED: tuple[Options, ...] = (
    {"temperature": 0.5, "seed": 1},
    {"temperature": 0.8, "seed": 3, "top_k": 40},
    {"temperature": 1.2, "seed": 5, "min_p": 0.05},
    {"temperature": 0.5, "seed": 2, "top_p": 0.9},
    {"temperature": 0.8, "seed": 4, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    {"temperature": 1.2, "seed": 6, "frequency_penalty": 0.3},
)

LONG = 448
"""Tokens of a long answer: some differences show only after hundreds of tokens."""

_EVERY = 8
_LONG_CASE = 6
"""Index of the case, in every `_EVERY`, whose answer may be long; it is alone in its calls."""


class DoneChecks(NamedTuple):
    """Checks done, of how many, and the seconds that they took."""

    done: int
    of: int
    seconds: float

    @property
    def whole_seconds(self) -> float:
        """Estimated seconds of all checks."""
        return self.seconds * self.of / max(self.done, 1)

    def __str__(self) -> str:
        return f"{self.done} of {self.of}"


@dataclass(slots=True)
class Verdict:
    """Numbers of comparisons, and the differences."""

    conditions: dict[str, Compared] = field(default_factory=dict)
    """Condition of `engines/exact.py` -> rows compared under it."""
    answers_compared: int = 0
    answers_differing: list[str] = field(default_factory=list)
    """One line per answer: prompt, case, and the first token that differs."""
    tokens_compared: int = 0
    prompts_left_out: list[str] = field(default_factory=list)
    """Ids of prompts that do not fit into the context or the KV cache."""

    @property
    def rows(self) -> Compared:
        """Comparisons of all conditions together."""
        return sum(self.conditions.values(), Compared())

    @property
    def exact(self) -> bool:
        """True if something was compared and nothing differed."""
        compared = self.rows.rows or self.answers_compared
        return bool(compared) and not (self.rows.differing or self.answers_differing)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "exact": self.exact,
            "rows_compared": self.rows.rows,
            "rows_differing": self.rows.differing,
            "largest_difference": self.rows.largest_difference,
            **asdict(self),
            "conditions": {name: compared.as_dict() for name, compared in self.conditions.items()},
        }


@dataclass(frozen=True, slots=True)
class VerifyCase:
    """Drafter, policy, block and sampling of one comparison with plain decoding."""

    drafter: str
    policy: str
    block: int
    sampling: Options

    @property
    def options(self) -> Options:
        """Options of `Model.stream`."""
        return {
            **NEUTRAL,
            **self.sampling,
            "drafter": self.drafter,
            "policy": self.policy,
            "max_block": self.block,
        }

    def __str__(self) -> str:
        how = " ".join(f"{key}={value}" for key, value in self.sampling.items())
        return f"{self.drafter}, {self.policy}, block {self.block}, {how}"


class CaseResult(NamedTuple):
    """Answers and tokens compared in one case, and a line per answer that differed."""

    answers: int
    tokens: int
    differing: list[str]


def default_drafters(model: Model) -> list[str]:
    """Drafters to check for a model: those for any model, and those shipped for this one."""
    shipped = drafters.shipped(model.files.name)
    return [*DRAFTERS, *shipped, *(f"suffix+{kind}" for kind in shipped)]


def verify_cases(*, whole: bool, drafters: Sequence[str] = DRAFTERS) -> list[VerifyCase]:
    """Every drafter x policy x block, greedy and sampled.

    The samplings alternate: all of them meet every drafter, policy and block. If not `whole`: a
    subset in which every pair of two parameters' values occurs.
    """
    all_cases = [
        VerifyCase(drafter, policy, block, how)
        for number, (drafter, policy) in enumerate(product(drafters, POLICIES))
        for block in BLOCKS
        for how in (GREEDY, SAMPLED[(number + block) % len(SAMPLED)])
    ]
    if whole:
        return all_cases
    pairs_left = {pair for case in all_cases for pair in _pairs(case)}
    chosen: list[VerifyCase] = []
    rng = np.random.default_rng(0)
    order = [all_cases[i] for i in rng.permutation(len(all_cases))]
    while pairs_left:
        case = max(order[:400], key=lambda candidate: len(pairs_left & _pairs(candidate)))
        if not pairs_left & _pairs(case):
            order = order[400:]
            continue
        pairs_left -= _pairs(case)
        chosen.append(case)
    return chosen


def check_tokens(
    model: Model,
    suite: Suite,
    cases: Sequence[VerifyCase],
    verdict: Verdict,
    *,
    max_tokens: int,
    journal: Journal | None = None,
    long: int = 0,
    together: Sequence[int] = (1,),
    watch: Callable[[int], None] = lambda _: None,
    seconds: float = inf,
) -> DoneChecks:
    """Answer the suite's prompts with the cases in turn, and compare with plain decoding.

    `together` has sequences per call, by case in turn (1: alone); if they do not fit into the
    free slots, there are fewer. Answers have `max_tokens` tokens, one of eight cases `long` if that
    is more. Prompts that do not fit are left out. Cases in `journal` are not checked again, and
    after `seconds` no further case is. Raises InvalidRequest if no prompt fits.
    """
    started = perf_counter()
    engine, journal = model.engine, journal or Journal()
    prompts = [model.tokens(prompt_for(model.files, prompt.messages)) for prompt in suite.prompts]
    context = min(engine.context_length, engine.free_slots)
    fitting = [at for at, prompt in enumerate(prompts) if len(prompt) + engine.min_rows <= context]
    verdict.prompts_left_out += [
        prompt.id for at, prompt in enumerate(suite.prompts) if at not in {*fitting}
    ]
    if not fitting:
        raise InvalidRequest(
            f"no prompt of the suite fits into {context} tokens; use another with --suite, or more "
            "--cache-tokens"
        )

    def plain(at: int, sampling: Options, length: int) -> list[int]:
        key = f"prompt {at}, {length} tokens, {sampling}"
        if (token_ids := journal.get(key, list[int])) is None:
            alone: Options = {**NEUTRAL, **sampling, "drafter": "none", "max_tokens": length}
            token_ids = model.generate(prompts[at], **alone).token_ids
            journal.add(key, token_ids)
        return token_ids

    def check(case: VerifyCase, group: Sequence[int], length: int) -> CaseResult:
        options: Options = {**case.options, "max_tokens": length}
        asked = [prompts[at] for at in group]
        results = (
            model.generate(asked, **options)
            if len(asked) > 1
            else [model.generate(asked[0], **options)]
        )
        tokens, differing = 0, []
        for at, result in zip(group, results, strict=True):
            token_ids, plain_ids = result.token_ids, plain(at, case.sampling, length)
            tokens += len(plain_ids)
            if token_ids != plain_ids:
                how = f"{suite.prompts[at].id} ({case}, {len(group)} together)"
                differing.append(f"{how}: token {_difference(token_ids, plain_ids)} differs")
        return CaseResult(len(group), tokens, differing)

    def group_of(first: int, count: int) -> list[int]:
        """Up to `count` prompts from a place on, as many as fit into the free slots together."""
        group: list[int] = []
        free = engine.free_slots
        for at in range(first, first + count):
            prompt = fitting[at % len(fitting)]
            free -= slots_of(engine, min(len(prompts[prompt]) + max_tokens, engine.context_length))
            if group and free < 0:
                break
            group.append(prompt)
        return group

    place = done = 0
    for done, case in enumerate(cases, start=1):
        length = max(max_tokens, long) if (done - 1) % _EVERY == _LONG_CASE else max_tokens
        group = group_of(place, together[(done - 1) % len(together)])
        place = (place + len(group)) % len(fitting)
        key = f"case {done}"
        if (result := journal.get(key, CaseResult)) is None:
            result = check(case, group, length)
            journal.add(key, result)
        verdict.answers_compared += result.answers
        verdict.tokens_compared += result.tokens
        verdict.answers_differing += result.differing
        watch(done)
        if perf_counter() - started > seconds:
            break
    return DoneChecks(done, len(cases), perf_counter() - started)


def _difference(tokens: Sequence[int], plain: Sequence[int]) -> int:
    """Place of the first token that differs, or that only one of the two has."""
    pairs = zip([*tokens, -1], [*plain, -1], strict=False)
    return next(place for place, (a, b) in enumerate(pairs) if a != b)


def _pairs(case: VerifyCase) -> set[tuple[str, str]]:
    values = [case.drafter, case.policy, str(case.block), str(case.sampling)]
    return {(a, b) for i, a in enumerate(values) for b in values[i + 1 :]}


def slots_of(engine: Engine, length: int) -> int:
    """Slots of the KV blocks of a sequence of `length` tokens."""
    return -(-length // engine.block_size) * engine.block_size
