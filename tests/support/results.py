"""Small records of every kind, for the tests of charts and pages."""

from typing import Any

from paceline_lab.bench.record import Record, Row

HEAD: dict[str, Any] = {
    "made": "2026-01-01T00:00:00+00:00",
    "command": "paceline bench run --kind 'a & b' <x>",
    "paceline": "0.1.0",
    "versions": {"python": "3.11"},
    "machine": {"processor": "P", "cores": 2},
    "model": {"name": "m", "fingerprint": "f" * 64},
    "engine": {"engine": "llamacpp", "taps": ""},
    "suite_sha256": "a" * 64,
}


def row(case: str, kind: str, contender: str, ratio: float, **options: Any) -> Row:
    """A row with all measures, of two rounds."""
    drafts = contender != "plain"
    measures = {
        "ratio": [ratio, ratio * 1.5] if drafts else [1.0, 1.0],
        "tokens_per_step": [ratio, ratio],
        "decode_tokens_per_second": [50 * ratio, 60 * ratio],
        "prefill_tokens_per_second": [500.0, 600.0],
        "first_token_seconds": [0.5, 0.25],
        "decode_seconds": [2.0, 4.0],
        "verify_seconds": [1.5, 3.0],
        "draft_seconds": [0.25, 0.5],
        "sample_seconds": [0.125, 0.25],
    }
    counts = {"drafted_at": [20, 10, 5, 4], "accepted_at": [15, 5]} if drafts else {}
    return Row(
        case,
        kind,
        contender,
        {**measures, **options.pop("measures", {})},
        options.pop("at", {}),
        counts,
        {"tokens": 11, "same_tokens": True, **options},
    )


RUN = Record(
    "run",
    [
        row(case, kind, name, ratio)
        for case, kind, base in (("a", "chat", 1.25), ("b", "chat", 2.0), ("c", "code", 4.0))
        for name, ratio in (("plain", 1.0), ("x", base), ("y", base / 2))
    ],
    **HEAD,
)

SWEEP = Record(
    "sweep",
    [
        *(
            row(f"code, {length} tokens", "code", name, ratio, at={"prompt_tokens": length})
            for length in (100, 800)
            for name, ratio in (("plain", 1.0), ("x", length / 100 + 1))
        )
    ],
    **HEAD,
)

BLOCKS = Record(
    "sweep",
    [
        row(
            "code",
            "code",
            f"suffix, {rule} {block}",
            block / 2,
            at={"block": block},
            way=f"suffix, {rule}",
        )
        for rule in ("fixed", "kelly")
        for block in (2, 4, 8)
    ],
    **HEAD,
)
