"""The texts of the comparison; independent of torch.

*BOS.* Models use the first position as an attention sink, and many were trained with a BOS token
there. With a wrong first token every later value differs. So texts begin as the manifest says, and
`tokenizer_faults` compares the manifest with the checkpoint.

*Tokens of low norm.* Tokens that hardly occurred in training have embeddings near zero; float16 and
a norm's epsilon make their direction noise, so a right model looks wrong there. They are in a text
of their own, compared by other criteria (see `compare`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidRequest, ModelError
from paceline.models import TOKENIZER, Tokenizer, read_facts
from paceline.storage.files import read_json
from paceline.storage.manifest import MANIFEST
from paceline_coreml.engine.artifact import Artifact
from paceline_coreml.golden.compare import RowFacts

Floats = npt.NDArray[np.float32]

PROMPTS: Mapping[str, str] = {
    "prose": (
        "The lighthouse keeper had counted the ships for thirty years, and he wrote each of them "
        "down in a book that nobody read. On the first day of autumn a small grey boat came in "
        "without a sail. He asked where it was from, and the man at the oars said that it had "
        "always been there, only that until now he had been looking the other way."
    ),
    "code": (
        "def longest_run(numbers: list[int]) -> int:\n"
        '    """The length of the longest run of equal numbers."""\n'
        "    best = run = 0\n"
        "    for before, number in zip([None, *numbers], numbers):\n"
        "        run = run + 1 if number == before else 1\n"
        "        best = max(best, run)\n"
        "    return best\n"
    ),
}

LOW_NORM = "low norm"
"""Name of the text with the tokens whose embeddings have the smallest norms."""

_LOW_TOKENS = 8
_CONTEXT = 4
"""Ordinary tokens before those of low norm, which must not be at the first position."""


class Text(NamedTuple):
    name: str
    tokens: Sequence[int]
    low: int | None = None
    """Position of the first token of low norm; None: there are none."""


def rows_of(texts: Sequence[Text]) -> RowFacts:
    places = [(text, row) for text in texts for row in range(len(text.tokens))]
    return RowFacts(
        [f"row {row} of {text.name}" for text, row in places],
        np.array([row == 0 for _, row in places]),
        np.array([text.low is not None and row >= text.low for text, row in places]),
    )


def texts_for(artifact: Artifact, embeddings: Floats, tokens: int) -> list[Text]:
    """Texts of `tokens` tokens.

    The last one has the tokens of low norm. `embeddings` are the checkpoint's, [vocab, d], because
    the artifact's may be wrong.

    Raises:
        InvalidRequest: `tokens` is too small, or more than the artifact's slots.
        ModelError: the manifest lacks `add_bos`, or the tokenizer cannot be read.
    """
    # A classifier reads a text in one call, of as many rows as it has slots at most.
    beside, room = (0, artifact.rows) if artifact.labels else (artifact.decode_rows, artifact.slots)
    longest = max(tokens, _CONTEXT + _LOW_TOKENS + 1) + beside
    if tokens <= _CONTEXT or longest > room:
        raise InvalidRequest(
            f"texts of {tokens} tokens cannot be compared; expected more than {_CONTEXT}, and "
            f"{longest} slots, of which the artifact has {room}"
        )
    bos = _bos(artifact.folder)
    tokenizer = _tokenizer(artifact.folder, bos)
    by_norm = np.argsort(np.linalg.norm(embeddings, axis=1), kind="stable")
    texts = [
        Text(name, _of_length(tokenizer.encode(prompt, special=True), tokens, len(bos)))
        for name, prompt in PROMPTS.items()
    ]
    outside = sorted({t for text in texts for t in text.tokens if t >= artifact.vocab_size})
    if outside:
        raise ModelError(
            f"{artifact.folder / TOKENIZER} gives tokens up to {outside[-1]}; the artifact has "
            f"{artifact.vocab_size}, so it is another model's"
        )
    context = texts[0].tokens[: len(bos) + _CONTEXT]
    low: list[int] = by_norm[:_LOW_TOKENS].tolist()
    return [*texts, Text(LOW_NORM, [*context, *low], len(context))]


def tokenizer_faults(artifact: Artifact, checkpoint: Path) -> list[str]:
    """Differences between the artifact's BOS and tokenizer and the checkpoint's.

    Empty for a checkpoint without a tokenizer.
    """
    if not (checkpoint / TOKENIZER).is_file():
        return []
    facts = read_facts(checkpoint)
    expected = [facts.bos_token_id] if facts.add_bos and facts.bos_token_id is not None else []
    actual = _bos(artifact.folder)
    faults = []
    if actual != expected:
        faults.append(
            f"BOS: a text begins with {_token(actual)}; the checkpoint's begins with "
            f"{_token(expected)}"
        )
    # Compared without BOS, which is checked above.
    ours, theirs = _tokenizer(artifact.folder, []), _tokenizer(checkpoint, [])
    faults += [
        f"tokenizer: {name} gives other tokens than the checkpoint's"
        for name, prompt in PROMPTS.items()
        if ours.encode(prompt) != theirs.encode(prompt)
    ]
    return faults


def _bos(folder: Path) -> list[int]:
    """The BOS token before every text according to the manifest: one or none."""
    facts: Any = read_json(folder / MANIFEST).get("facts")
    if not isinstance(facts, dict) or not isinstance(facts.get("add_bos"), bool):
        raise ModelError(f"{folder / MANIFEST} has no add_bos; convert the model again")
    bos = facts.get("bos_token_id")
    return [bos] if facts["add_bos"] and isinstance(bos, int) else []


def _tokenizer(folder: Path, bos: Sequence[int]) -> Tokenizer:
    return Tokenizer(folder / TOKENIZER, bos_token_id=bos[0] if bos else None, add_bos=bool(bos))


def _of_length(tokens: Sequence[int], length: int, bos: int) -> list[int]:
    """Truncate or repeat to `length`; the first `bos` tokens are not repeated."""
    body = tokens[bos:]
    if not body:
        raise ModelError("the artifact's tokenizer gives no tokens for a text; convert it again")
    return [*tokens[:bos], *(list(body) * -(-length // len(body)))][:length]


def _token(bos: Sequence[int]) -> str:
    return f"token {bos[0]}" if bos else "no BOS"
