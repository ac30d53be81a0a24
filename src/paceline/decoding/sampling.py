"""The target's sampler.

Invariant: a token depends only on its row of logits, on the tokens before it, and on (seed,
position). It never depends on how the row was computed or on the draft, so verifying a draft by
comparing it with the sampled token is exact for greedy and sampled decoding alike.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Constraint, Logits, TokenLogprob

_GREEDY_BELOW = 1e-5
"""Dividing float32 logits by a smaller temperature could overflow."""

_NEAR = 10.0
"""Nats below the highest logit within which the pick, and the nucleus (top-p), nearly always lie.
Changing it changes the picks."""

_FAR = 20.0
"""Tokens this many nats below the highest logit are omitted at first: 262,144 of them together
weigh 0.0006 of the best one."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options. The defaults are greedy.

    The steps apply in this order: repetition penalty, presence and frequency penalties, logit
    bias, temperature, top-k, top-p, min-p (as in transformers and vLLM). Values are not checked
    here: `paceline.options` has the ranges.
    """

    temperature: float = 0.0
    """0 (or below 1e-5, as in vLLM) is greedy; 1 samples from the model's own distribution."""
    top_k: int = 0
    """Keep the k most likely tokens (and ties with the k-th); 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities sum to at least top_p (and ties)."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive (multiplies negative) logits of tokens in the prompt or response (CTRL,
    arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token in the response so far."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each occurrence in the response so far."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> value added to its logit."""
    seed: int = 0
    """Any integer from 0 to 2**64 - 1; the same seed gives the same tokens."""

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW


class Sampler:
    """Samples the tokens of one request, and counts them for the penalties.

    Call `pick` for a position, then `push` the token that was kept there, in order.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        vocab_size: int,
        constraint: Constraint | None = None,
    ) -> None:
        """Prepare for one request; `constraint` masks tokens that are not allowed.

        Raises ValueError if a token id of `logit_bias` is not in the vocabulary.
        """
        self._sampling = sampling
        self._constraint = constraint
        beyond = [t for t in sampling.logit_bias if t >= vocab_size]
        if beyond:
            raise ValueError(
                f"logit_bias names token {beyond[0]}, but the vocabulary ends at {vocab_size - 1}"
            )
        self._bias_ids = np.array(list(sampling.logit_bias), dtype=np.int64)
        self._bias = np.array(list(sampling.logit_bias.values()), dtype=np.float32)
        self._penalised = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        self._repetition = sampling.repetition_penalty != 1
        self.counts_tokens = self._penalised or self._repetition
        self._answer = _TokenCounts(vocab_size * self._penalised)
        self._seen = _TokenCounts(vocab_size * self._repetition, prompt if self._repetition else ())

    @property
    def picks_argmax(self) -> bool:
        changes = self.counts_tokens or self._bias.size or self._constraint
        return self._sampling.greedy and not changes

    def push(self, token: int) -> None:
        if self._penalised:
            self._answer.add(token)
        if self._repetition:
            self._seen.add(token)
        if self._constraint is not None:
            self._constraint.push(token)

    def pick(
        self, logits: npt.NDArray[np.float32], position: int, banned: Collection[int] = ()
    ) -> int:
        """Return the token for `position` from its row of logits, [vocab] float32 (not changed).

        It is never one of `banned`, unless no other token is allowed.
        """
        logits = self._adjusted(logits)
        if self._constraint is not None:
            logits = self._constraint.masked(logits)
        if banned:
            rest = logits.copy()
            rest[list(banned)] = -np.inf
            logits = rest if rest.max() > -np.inf else logits
        return _sample(logits, self._sampling, position)[0]

    def pick_draft(self, logits: npt.NDArray[np.float32], position: int) -> tuple[int, float]:
        """Return a draft token for `position` from a drafter's row of logits, [vocab] float32.

        The token is the target's pick if the target's row is the same and no constraint forbids it.

        Returns:
            The token, and an estimate of P(the target picks it): the softmax of the deciding
            scores, which are the logits in greedy sampling.
        """
        token, scores = _sample(self._adjusted(logits), self._sampling, position)
        return token, float(1 / np.exp(scores - scores.max()).sum())

    def _adjusted(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Apply penalties and bias to a copy; return the row itself if there are none."""
        seen, answer, sampling = self._seen.ids, self._answer.ids, self._sampling
        if not (seen.size or answer.size or self._bias.size):
            return logits
        logits = logits.copy()
        if seen.size:
            values = logits[seen]
            penalty = np.float32(sampling.repetition_penalty)
            logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        if answer.size:
            times = self._answer.times
            logits[answer] -= sampling.presence_penalty + sampling.frequency_penalty * times
        logits[self._bias_ids] += self._bias
        return logits


class _TokenCounts:
    """Distinct tokens and their counts, in arrays with room for the vocabulary.

    Building the arrays for every pick would take longer as a response grows.
    """

    def __init__(self, vocab_size: int, tokens: Iterable[int] = ()) -> None:
        self._places: dict[int, int] = {}
        self._ids = np.zeros(vocab_size, np.int64)
        self._times = np.zeros(vocab_size, np.float32)
        for token in tokens:
            self.add(token)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self._ids[: len(self._places)]

    @property
    def times(self) -> npt.NDArray[np.float32]:
        return self._times[: len(self._places)]

    def add(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        self._ids[place] = token
        self._times[place] += 1


def noise_key(seed: int, position: int) -> int:
    """Return the 64-bit key of a position's random numbers: the same on every machine.

    This is a hash, because a generator's state would depend on the numbers drawn before, and so on
    the drafts.
    """
    digest = blake2b(
        position.to_bytes(8, "little"), digest_size=8, key=seed.to_bytes(8, "little")
    ).digest()
    return int.from_bytes(digest, "little")


def exponentials(key: int, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return a random number for each token id of a position, [n], distributed as Exponential(1).

    A token's number depends only on `key` and its id: it is output `id` + 1 of SplitMix64 (Steele,
    Lea and Flood 2014, doi 10.1145/2714064.2660195) whose state begins at `key`.
    """
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed += np.uint64(key)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    # 52 bits and a half: neither 0 nor 1.
    numbers: npt.NDArray[np.float64] = -np.log(((mixed >> np.uint64(12)) + 0.5) * 2.0**-52)
    return numbers


_TAIL = np.array([-1])
"""The id whose number decides whether a token of the tail is picked."""


def _sample(
    logits: npt.NDArray[np.float32], sampling: Sampling, position: int
) -> tuple[int, npt.NDArray[np.floating]]:
    """Return the token, and the scores among which its own was the highest.

    Applies the Gumbel-max trick to the tokens that pass top-k, top-p and min-p. The pick is the
    argmax of `logit / temperature - log(e)`, where e is the token's own `exponentials`: a sample of
    the softmax. Two samplers with the same numbers and nearly the same distribution nearly always
    agree (Daliri, Musco and Suresh 2024, arXiv 2408.07978).

    Tokens far below the highest logit are most of a vocabulary and nearly none of its weight. So
    the pick is made without them, and repeated with them if they could change it.
    """
    if sampling.greedy:
        return int(logits.argmax()), logits
    key = noise_key(sampling.seed, position)
    top, temperature = logits.max(), np.float32(sampling.temperature)
    ids = np.flatnonzero(logits >= top - np.float32(_FAR) * temperature)
    left_out = 1.01 * (logits.size - ids.size) * math.exp(-_FAR)  # 1.01: logits are rounded
    picked = _pick((logits[ids] - top) / temperature, ids, sampling, key, left_out)
    if picked is None:
        ids = np.arange(logits.size)
        picked = _pick((logits - top) / temperature, ids, sampling, key, 0.0)
        assert picked is not None
    return picked


def _pick(
    scaled: npt.NDArray[np.float32],
    ids: npt.NDArray[np.int64],
    sampling: Sampling,
    key: int,
    left_out: float,
) -> tuple[int, npt.NDArray[np.float64]] | None:
    """Return the sampled token and the scores, or None if the omitted tokens could win.

    The combined weight of the omitted tokens is below `left_out`.
    """
    floor = _floor(scaled, sampling, left_out)
    if floor is None:
        return None
    near = np.flatnonzero(scaled >= np.float32(max(floor, -_NEAR)))
    scores = _scores(scaled[near], key, ids[near])
    best = int(scores.argmax())
    if floor < -_NEAR:
        # The highest score of a set is distributed as that of one token with the set's weight,
        # whichever token has it. So the tail, most of a vocabulary, seldom needs all its numbers.
        tail = np.flatnonzero((scaled < np.float32(-_NEAR)) & (scaled >= np.float32(floor)))
        weight = float(np.exp(scaled[tail]).sum(dtype=np.float64))
        if weight + left_out > math.exp(scores[best]) * exponentials(key, _TAIL)[0]:
            if left_out:
                return None
            tail_scores = _scores(scaled[tail], key, ids[tail])
            return int(ids[tail[tail_scores.argmax()]]), tail_scores
    return int(ids[near[best]]), scores


def _scores(
    scaled: npt.NDArray[np.float32], key: int, ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    scores: npt.NDArray[np.float64] = scaled.astype(np.float64) - np.log(exponentials(key, ids))
    return scores


def _floor(scaled: npt.NDArray[np.float32], sampling: Sampling, left_out: float) -> float | None:
    """Return the lowest scaled logit to pass top-k, top-p and min-p; None as in `_pick`."""
    floor = -math.inf
    if sampling.top_k:
        if sampling.top_k < scaled.size:
            floor = float(np.partition(scaled, -sampling.top_k)[-sampling.top_k])
            left_out = 0.0
        elif left_out:
            return None
    if sampling.top_p < 1:
        nucleus = _nucleus_floor(scaled, floor, sampling.top_p, left_out)
        if nucleus is None:
            return None
        floor = max(floor, nucleus)
    if sampling.min_p > 0:
        floor = max(floor, math.log(sampling.min_p))
    return floor


def _nucleus_floor(
    scaled: npt.NDArray[np.float32], floor: float, top_p: float, left_out: float
) -> float | None:
    """Return the smallest scaled logit in the nucleus of the tokens at or above `floor`.

    Sorting the whole vocabulary is the slowest part of sampling. So only the tokens within
    `_NEAR` are sorted if they hold enough of the mass. Returns None as `_pick` does.
    """
    weights = np.exp(scaled)
    if floor > -math.inf:
        weights[scaled < np.float32(floor)] = 0
    total = float(weights.sum(dtype=np.float64))
    need = top_p * total
    near = scaled[scaled >= np.float32(max(floor, -_NEAR))]
    if float(np.exp(near).sum(dtype=np.float64)) < need:
        near = scaled[scaled >= np.float32(floor)]
    ordered = np.sort(near)[::-1]
    mass = np.exp(ordered).cumsum(dtype=np.float64)
    last = int(mass.searchsorted(need, side="left"))
    if left_out:
        # Sums of different lengths are rounded differently.
        lower, upper = need * (1 - 1e-12), top_p * (total + left_out) * (1 + 1e-12)
        if mass.searchsorted(lower) != mass.searchsorted(upper) or last == ordered.size:
            return None
    return float(ordered[min(last, ordered.size - 1)])


def token_logprob(
    row: Logits, token: int, top: int, name: Callable[[int], str] = lambda _: ""
) -> TokenLogprob:
    """Return the log probabilities of `token` and of the `top` most likely tokens.

    They describe the model's own distribution: before penalties, bias and temperature.

    Args:
        row: [vocab] logits.
        token: the chosen token.
        top: number of other tokens.
        name: returns the text of a token.
    """
    wide = row.astype(np.float64)
    highest = wide.max()
    total = float(highest + np.log(np.exp(wide - highest).sum()))
    best = _top(wide, top, total)
    texts = tuple(name(other) for other, _ in best)
    return TokenLogprob(token, float(wide[token]) - total, best, name(token), texts)


def _top(row: np.ndarray, count: int, total: float) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    count = min(count, len(row))
    min_logit = np.partition(row, len(row) - count)[len(row) - count]
    tokens = np.flatnonzero(row >= min_logit)
    best = tokens[np.argsort(-row[tokens], kind="stable")][:count]
    return tuple((int(token), float(row[token]) - total) for token in best)
