"""Costs of an answer: OpenAI's usage, llama.cpp's timings, vLLM's speculation metrics.

Independent of HTTP. Invariant: counts are consistent, as their readers check: the sums of a
histogram's steps, accepted and draft tokens equal the fields beside it.
"""

from collections.abc import Sequence
from typing import Any

from paceline.drafters import DrafterSpec
from paceline.server.stream_text import Answer


def usage(
    prompts: Sequence[int], answers: Sequence[Answer], *, predicted: bool = False
) -> dict[str, Any]:
    """OpenAI's usage of answers, which may be unfinished.

    `prompts` are counts of tokens, each counted once for all answers to it; the answers are in the
    order of the prompts, the same number for each.
    """
    per_prompt = len(answers) // len(prompts)
    results = [answer.result for answer in answers]
    cached = [first.stats.cached_tokens for first in results[::per_prompt] if first is not None]
    prompt, completion = sum(prompts), sum(answer.tokens for answer in answers)
    costs: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(cached)},
    }
    if thoughts := sum(answer.reasoning_tokens for answer in answers):
        costs["completion_tokens_details"] = {"reasoning_tokens": thoughts}
    if predicted:
        drafted = sum(result.stats.drafted_by.get("prediction", 0) for result in results if result)
        accepted = sum(
            result.stats.accepted_by.get("prediction", 0) for result in results if result
        )
        details = costs.setdefault("completion_tokens_details", {})
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = drafted - accepted
    return costs


def telemetry(answers: Sequence[Answer], *, steps: bool = False) -> dict[str, Any]:
    """Fields at the root of a response, or of a stream's last chunk, once the answers have ended.

    With several answers they are null: their times overlap. With `steps` each step is listed.
    """
    if len(answers) != 1:
        return {"timings": None, "metrics": None, "speculation": None, "settings": None}
    answer, result = answers[0], answers[0].done
    return {
        "timings": timings(answer),
        "metrics": {"speculative_decoding": speculative_decoding(answer, steps=steps)},
        "speculation": {
            "drafter": DrafterSpec.parse(result.drafter).without_folders,
            "policy": result.policy,
            "exact": result.exact,
            "exactness": {name: compared.as_dict() for name, compared in result.exactness.items()},
            "seed": result.seed,
            "drafted_by": result.stats.drafted_by,
            "accepted_by": result.stats.accepted_by,
            "forced": result.stats.forced,
            "steps": result.stats.steps,
            "tokens_per_step": result.stats.tokens_per_step,
        },
        "settings": {name: setting._asdict() for name, setting in result.settings.items()},
    }


def timings(answer: Answer) -> dict[str, Any]:
    """llama.cpp's timings, in milliseconds; without drafts the draft fields are absent."""
    stats = answer.done.stats
    computed = answer.done.prompt_tokens - stats.cached_tokens
    prompt_ms, predicted_ms = 1e3 * stats.prefill_seconds, 1e3 * stats.decode_seconds
    times = {
        "cache_n": stats.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, computed),
        "prompt_per_second": _ratio(1e3 * computed, prompt_ms),
        "predicted_n": answer.tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, stats.decoded),
        "predicted_per_second": stats.decode_tokens_per_second,
    }
    drafts = {"draft_n": stats.drafted, "draft_n_accepted": stats.accepted}
    return {**times, **drafts} if stats.drafted else times


def speculative_decoding(answer: Answer, *, steps: bool = False) -> dict[str, Any]:
    """Metrics, in vLLM's form, of the steps that had a draft."""
    verified = [step for step in answer.steps if step.drafted]
    drafted = sum(step.drafted for step in verified)
    accepted = sum(step.accepted for step in verified)
    longest = max((step.drafted for step in verified), default=0)
    by_length = {
        str(length): _histogram([s.accepted for s in verified if s.drafted == length], length)
        for length in sorted({step.drafted for step in verified})
    }
    metrics: dict[str, Any] = {
        "mean_acceptance_length": 1 + _ratio(accepted, len(verified)),
        "draft_acceptance_rate": _ratio(accepted, drafted),
        "acceptance_histogram": _histogram([step.accepted for step in verified], longest),
        "acceptance_histogram_by_draft_length": by_length,
        "num_spec_steps": len(verified),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": longest,
    }
    if steps:
        metrics["per_step_accepted"] = [step.accepted for step in verified]
        metrics["per_step_drafted"] = [step.drafted for step in verified]
    return metrics


def _histogram(values: Sequence[int], largest: int) -> list[int]:
    """Counts of the values 0, 1, ... `largest`."""
    return [sum(value == number for value in values) for number in range(largest + 1)]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
