"""The result of a generation: the answer, the counters, the times."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.decoding.types import Counters, FinishReason, TokenLogprob
from paceline.engines.exact import RowComparison
from paceline.runtime.request import Setting

_SHOWN = 60
"""Maximum characters of an answer's text in its repr."""


@dataclass(slots=True, repr=False)
class Stats(Counters):
    """Counters and times of an answer. Times are in seconds."""

    cached_tokens: int = 0  # of the prompt
    load_seconds: float = 0.0  # once per process
    first_token_seconds: float = 0.0  # from the call: template, tokenizer and prompt
    prefill_seconds: float = 0.0  # the prompt's forward passes, and sampling of the first token
    decode_seconds: float = 0.0  # the answer after its first token: draft, verify and the rest
    draft_seconds: float = 0.0  # drafters and policy
    verify_seconds: float = 0.0  # forward passes, the head included
    sample_seconds: float = 0.0  # sampling, acceptance, detokenization
    preempted: int = 0  # number of preemptions, because a server's KV cache was full
    recomputed: int = 0  # rows, after preemption
    recompute_seconds: float = 0.0  # for these rows; part of no other time
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds by part of the forward passes, prefill included, if the engine has parts."""
    decoded: int = 0  # tokens after the first
    probe: dict[str, dict[str, int]] | None = None
    """With a probe: drafter -> the steps, drafted and accepted tokens it would have had."""

    def __repr__(self) -> str:
        drafts = f"{self.accepted} of {self.drafted} drafts accepted"
        return f"<Stats: {self.decoded} tokens decoded in {self.steps} steps, {drafts}>"

    @property
    def acceptance_rate(self) -> float:
        """The ratio of accepted to drafted tokens; 0.0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """The tokens per forward pass (tau); 0.0 without steps."""
        return self.decoded / self.steps if self.steps else 0.0

    @property
    def host_seconds(self) -> float:
        """The decode time outside forward passes."""
        return self.decode_seconds - self.verify_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """The tokens after the first, over decode time."""
        return self.decoded / self.decode_seconds if self.decode_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        names = [
            *("steps", "drafted", "accepted", "forced", "fallbacks", "acceptance_rate"),
            *("tokens_per_step", "drafted_by", "accepted_by", "drafted_at", "accepted_at"),
            *("cached_tokens", "load_seconds", "first_token_seconds", "prefill_seconds"),
            *("decode_seconds", "draft_seconds", "verify_seconds", "sample_seconds"),
            *("host_seconds", "decode_tokens_per_second"),
        ]
        names += [name for name in ("parts", "hidden_seconds", "probe") if getattr(self, name)]
        if self.preempted:
            names += ["preempted", "recomputed", "recompute_seconds"]
        return {name: getattr(self, name) for name in names}

    def line(self) -> str:
        """Return one line of statistics."""
        if not self.steps:
            return f"1 token in {self.first_token_seconds:.2f} s"
        drafts = "no drafts"
        if self.drafted:
            by = ", ".join(f"{name} {count}" for name, count in self.accepted_by.items() if count)
            drafts = f"{self.accepted} of {self.drafted} drafts accepted ({by or 'none'})"
        rate = f"{self.decode_tokens_per_second:.1f} tokens/s"
        for name, seen in (self.probe or {}).items():
            drafts += f"; {name} would have {seen['accepted']} of {seen['drafted']} accepted"
        return (
            f"{self.decoded + 1} tokens, {rate}, {self.tokens_per_step:.2f} tokens per step, "
            f"{drafts}; first token after {self.first_token_seconds:.2f} s, "
            f"host {100 * self.host_seconds / self.decode_seconds:.1f} %"
        )


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    text: str
    """The answer, without the model's reasoning if its format is known."""
    token_ids: list[int]
    """All tokens of the model: reasoning, its tags and an ending stop token included."""
    finish_reason: FinishReason
    stats: Stats
    prompt_tokens: int
    model: str
    engine: str
    drafter: str
    policy: str
    exact: bool
    """True if the tokens equal plain decoding's: no measured row depends, on this machine, on a
    condition that this answer was computed under."""
    seed: int
    """Seed of the sampler; the same seed gives the same tokens."""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """Sampling settings and `max_tokens`: name -> value and its source."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Logprobs of the answer's tokens, if they were requested."""
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    """Logprobs of the prompt's tokens; None for its first token."""
    reasoning: str = ""
    """The model's reasoning, without its tags."""
    reasoning_tokens: int = 0
    """Number of `token_ids` that are reasoning and its tags."""
    stopped_by: str | None = None
    """The stop string that ended the answer, or None."""
    exactness: Mapping[str, RowComparison] = field(default_factory=dict)
    """The evidence for `exact`: condition -> numbers of compared rows and of different ones.
    Empty if nothing can differ, or if there were no slots for the measurement."""

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        return f"<Result {text!r}: {self.completion_tokens} tokens, {self.finish_reason}>"

    @property
    def sampled(self) -> bool:
        """True if the answer depends on the seed."""
        return "temperature" in self.settings and self.settings["temperature"].value > 0

    def line(self) -> str:
        """Return one line: statistics, and the engine and seed that reproduce the answer."""
        seed = f", seed {self.seed}" if self.sampled else ""
        statistics = self.stats.line() if self.token_ids else "no tokens"
        return f"{statistics}; {self.engine}, drafter {self.drafter}{seed}"

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)

    def as_dict(self) -> dict[str, Any]:
        names = (
            *("text", "reasoning", "reasoning_tokens", "token_ids", "prompt_tokens"),
            *("completion_tokens", "finish_reason", "model", "engine", "drafter", "policy"),
            *("exact", "exactness", "seed"),
        )
        return {name: getattr(self, name) for name in names} | {
            "finish_reason": str(self.finish_reason),
            "exactness": {name: compared.as_dict() for name, compared in self.exactness.items()},
            "settings": {name: setting._asdict() for name, setting in self.settings.items()},
            "stats": self.stats.as_dict(),
        }
