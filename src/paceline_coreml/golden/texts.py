"""The texts of the comparison; does not import torch.

*BOS.* Models use the first position as an attention sink, and many were trained with a BOS token
there. With a wrong first token, every later value differs. So texts begin as set in the manifest,
and `tokenizer_faults` compares the manifest with the checkpoint.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import InvalidRequest, ModelError
from paceline.models import TOKENIZER, Tokenizer, read_facts
from paceline.storage.files import read_json
from paceline.storage.manifest import MANIFEST
from paceline_coreml.engine.artifact import Artifact

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


class Text(NamedTuple):
    name: str
    tokens: Sequence[int]


def row_names(texts: Sequence[Text]) -> list[str]:
    """Return the names of all rows of the texts, such as `row 4 of prose`."""
    return [f"row {row} of {text.name}" for text in texts for row in range(len(text.tokens))]


def texts_for(artifact: Artifact, tokens: int) -> list[Text]:
    """Return texts with `tokens` tokens each.

    Raises:
        InvalidRequest: `tokens` is too small, or more than the artifact's slots.
        ModelError: the manifest has no `add_bos`, or the tokenizer cannot be read.
    """
    # A classifier runs a text in one pass, with at most `rows` tokens.
    extra, limit = (0, artifact.rows) if artifact.labels else (artifact.decode_rows, artifact.slots)
    if tokens < 1 or tokens + extra > limit:
        raise InvalidRequest(
            f"cannot compare texts of {tokens} tokens; they need {tokens + extra} slots, and the "
            f"artifact has {limit}"
        )
    bos = _bos(artifact.folder)
    tokenizer = _tokenizer(artifact.folder, bos)
    texts = [
        Text(name, _of_length(tokenizer.encode(prompt, special=True), tokens, len(bos)))
        for name, prompt in PROMPTS.items()
    ]
    outside = sorted({t for text in texts for t in text.tokens if t >= artifact.vocab_size})
    if outside:
        raise ModelError(
            f"{artifact.folder / TOKENIZER} is another model's: it has tokens up to {outside[-1]}, "
            f"and the artifact has {artifact.vocab_size} tokens; convert the model again"
        )
    return texts


def tokenizer_faults(artifact: Artifact, checkpoint: Path) -> list[str]:
    """Return differences between the artifact's BOS and tokenizer and the checkpoint's.

    The list is empty for a checkpoint without a tokenizer.
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
    # Compare without BOS, which is checked above.
    ours, theirs = _tokenizer(artifact.folder, []), _tokenizer(checkpoint, [])
    faults += [
        f"tokenizer: {name} has other tokens than with the checkpoint's tokenizer"
        for name, prompt in PROMPTS.items()
        if ours.encode(prompt) != theirs.encode(prompt)
    ]
    return faults


def _bos(folder: Path) -> list[int]:
    """Return the manifest's BOS token, as a list of one token or none."""
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
        raise ModelError("the artifact's tokenizer returns no tokens; convert the model again")
    return [*tokens[:bos], *(list(body) * -(-length // len(body)))][:length]


def _token(bos: Sequence[int]) -> str:
    return f"token {bos[0]}" if bos else "no BOS"
