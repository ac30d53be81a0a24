"""Comparisons of a verification: row invariance, and token parity.

Rows are compared as in `engines/exact.py`, after more contexts and in more ways, and around numbers
of keys where attention may take another kernel. Prompts are answered with drafters, policies,
blocks and samplings, alone and several in one call; the tokens must equal plain decoding's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle, islice
from math import inf
from random import Random
from time import perf_counter
from typing import Any

from paceline import drafters
from paceline.engines.base import Engine
from paceline.engines.exact import BLOCK_LENGTH, Depth, RowComparison, compare_rows, room_for
from paceline.errors import InvalidRequest
from paceline.options import GREEDY as NEUTRAL
from paceline.options import POLICIES, Options
from paceline.runtime.model import Model
from paceline.verify.suite import Suite, prompt_for

BLOCKS = tuple(range(2, 17))
DRAFTERS = ("suffix", "suffix:earlier", "ngram", "ngram:min=2,max=3,length=4", "ngram+suffix")
GREEDY: Options = {"temperature": 0.0}
SAMPLED: tuple[Options, ...] = (
    {"temperature": 0.5, "seed": 1},
    {"temperature": 0.8, "seed": 3, "top_k": 40},
    {"temperature": 1.2, "seed": 5, "min_p": 0.05},
    {"temperature": 0.5, "seed": 2, "top_p": 0.9},
    {"temperature": 0.8, "seed": 4, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    {"temperature": 1.2, "seed": 6, "frequency_penalty": 0.3},
)

CONTEXTS = (16, 64, 300, 1000)
ROWS = max(BLOCKS)
DEPTH = Depth(ROWS, (1, *BLOCKS), (2, 3, 16, 31, 64, 100, -1, -4), after=ROWS)

THRESHOLDS = (512, 1024, 2048, 4096, 8192)
"""Numbers of keys where attention may take another kernel."""

_BEFORE = 9

_CROSSING = Depth(ROWS, (2, 3, 5, 8, 16))

TOGETHER = (1, 2, 1, 3, 1, 5, 1, 8)
"""Sequences per call, by case in turn; 1: alone."""

_LONG_CASE = 6
"""Index in `TOGETHER` of the case whose answer has `LONG` tokens."""

LONG = 448
"""Tokens of a long answer: some differences show only after hundreds of tokens."""

Check = Callable[[], None]
"""Adds the results of a comparison to a verdict."""


@dataclass(slots=True)
class Verdict:
    """Numbers of comparisons, and the differences."""

    conditions: dict[str, RowComparison] = field(default_factory=dict)
    """Condition of `engines/exact.py` -> rows compared under it."""
    answers_compared: int = 0
    answers_differing: list[str] = field(default_factory=list)
    """One line per answer: prompt, case, and the first token that differs."""
    tokens_compared: int = 0
    prompts_left_out: list[str] = field(default_factory=list)
    """Ids of prompts that do not fit into the context or the KV cache."""

    @property
    def rows(self) -> RowComparison:
        return sum(self.conditions.values(), RowComparison())

    @property
    def exact(self) -> bool:
        """True if something was compared and nothing differed."""
        compared = self.rows.rows or self.answers_compared
        return bool(compared) and not (self.rows.differing or self.answers_differing)

    def as_dict(self) -> dict[str, Any]:
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


def row_checks(engine: Engine, verdict: Verdict) -> list[Check]:
    """Return comparisons of the same positions' rows under every condition, bit for bit.

    One for every context length that fits twice into the free slots, and one around every
    threshold that fits once.
    """

    def check(keys: int, depth: Depth, *conditions: Sequence[str]) -> None:
        for name, compared in compare_rows(engine, keys, depth, *conditions).items():
            verdict.conditions[name] = verdict.conditions.get(name, RowComparison()) + compared

    contexts = [at for at in CONTEXTS if at + ROWS <= room_for(engine, 2)]
    thresholds = [keys for keys in THRESHOLDS if keys + ROWS <= room_for(engine, 1)]
    return [
        *(partial(check, at, DEPTH) for at in contexts),
        *(partial(check, keys - _BEFORE, _CROSSING, [BLOCK_LENGTH]) for keys in thresholds),
    ]


def default_drafters(model: Model) -> list[str]:
    """Drafters to check for a model: those for any model, and those shipped for this one."""
    shipped = drafters.shipped(model.files.name)
    return [*DRAFTERS, *shipped, *(f"suffix+{kind}" for kind in shipped)]


def verify_cases(drafters: Sequence[str] = DRAFTERS) -> list[VerifyCase]:
    """Return cases with every pair of values of drafter, policy, block and sampling.

    The numbers of blocks, samplings and policies (15, 7, 4) have no common divisor, so going round
    each of them brings every pair of theirs; a drafter changes when the blocks have gone round.
    """
    blocks, samplings = len(BLOCKS), (GREEDY, *SAMPLED)
    cases = [
        VerifyCase(
            drafters[number // blocks % len(drafters)],
            POLICIES[number % len(POLICIES)],
            BLOCKS[number % blocks],
            samplings[number % len(samplings)],
        )
        for number in range(blocks * max(len(drafters), len(samplings)))
    ]
    Random(0).shuffle(cases)  # the first ones, of a quick verification, differ in all
    return cases


def token_checks(
    model: Model,
    suite: Suite,
    cases: Sequence[VerifyCase],
    verdict: Verdict,
    *,
    max_tokens: int,
    long: int = LONG,
    together: Sequence[int] = TOGETHER,
) -> list[Check]:
    """Comparisons of answers to the suite's prompts with plain decoding's, one for each case.

    Answers have `max_tokens` tokens, one of eight cases `long` if that is more. Prompts that do not
    fit are left out. Raises InvalidRequest if no prompt fits.
    """
    prompts = {
        prompt.id: model.tokens(prompt_for(model.files, prompt.messages))
        for prompt in suite.prompts
    }
    context = model.max_length
    fitting = [name for name in prompts if len(prompts[name]) + model.engine.min_rows <= context]
    verdict.prompts_left_out += [name for name in prompts if name not in fitting]
    if not fitting:
        raise InvalidRequest(
            f"no prompt of the suite fits into {context} tokens; use another with --suite, or more "
            "--cache-tokens"
        )
    plain_answers: dict[str, list[int]] = {}
    uncached = model.without_history()

    def plain(name: str, sampling: Options, length: int) -> list[int]:
        key = f"{name}, {length} tokens, {sampling}"
        if key not in plain_answers:
            alone: Options = {**NEUTRAL, **sampling, "drafter": "none", "max_tokens": length}
            plain_answers[key] = uncached.generate(prompts[name], **alone).token_ids
        return plain_answers[key]

    def check(case: VerifyCase, names: Sequence[str], length: int) -> None:
        options: Options = {**case.options, "max_tokens": length}
        if len(names) == 1:  # as `chat` and `generate` answer
            results = [model.generate(prompts[names[0]], **options)]
        else:
            results = model.generate([prompts[name] for name in names], **options)
        for name, result in zip(names, results, strict=True):
            token_ids, plain_ids = result.token_ids, plain(name, case.sampling, length)
            verdict.answers_compared += 1
            verdict.tokens_compared += len(plain_ids)
            if token_ids != plain_ids:
                verdict.answers_differing.append(
                    f"{name} ({case}, {len(names)} together): token "
                    f"{_difference(token_ids, plain_ids)} differs"
                )

    def checks() -> Iterator[Check]:
        names = cycle(fitting)
        for number, case in enumerate(cases):
            group = [*islice(names, together[number % len(together)])]
            is_long = number % len(TOGETHER) == _LONG_CASE
            yield partial(check, case, group, max(max_tokens, long) if is_long else max_tokens)

    return [*checks()]


def run_checks(
    checks: Sequence[Check], watch: Callable[[int], None] = lambda _: None, until: float = inf
) -> int:
    """Run checks, the first at least, but begin none after the time `until`; how many were run."""
    for done, check in enumerate(checks, start=1):
        check()
        watch(done)
        if perf_counter() > until:
            return done
    return len(checks)


def _difference(tokens: Sequence[int], plain: Sequence[int]) -> int:
    """Place of the first token that differs, or that only one of the two has."""
    pairs = zip([*tokens, -1], [*plain, -1], strict=False)
    return next(place for place, (a, b) in enumerate(pairs) if a != b)
