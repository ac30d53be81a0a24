"""What an artifact is asked: a few texts, begun as the model was trained, and rare tokens apart.

Knows an artifact's folder and its tokenizer. Knows no torch. Two traps are dealt with here.

*The beginning.* Models use the first position as a sink of attention, and many were trained with a
token that always stands there (BOS). Without it, or with one that they never saw, every number
after it is another. So texts begin as the manifest says, and `beginning_faults` holds the manifest
to the checkpoint.

*Tokens of low norm.* Tokens that hardly occurred in training have embeddings next to zero, where
float16 and a norm's epsilon make a direction of noise: a right model looks wrong there. They stand
in a text of their own, and are judged apart (see `compare`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.engines.coreml.artifact import Artifact
from paceline.errors import InvalidRequest, ModelError
from paceline.models.hf_config import read_facts
from paceline.models.manifest import TOKENIZER
from paceline.models.tokenizer import Tokenizer
from paceline.storage.files import read_json
from paceline.storage.manifest import MANIFEST

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
"""The name of the text of tokens whose embeddings have the least norm."""

_LOW_TOKENS = 8
_CONTEXT = 4
"""Ordinary tokens before those of low norm: none of these shall stand in the first position."""


class Text(NamedTuple):
    """Tokens of one sequence."""

    name: str
    tokens: Sequence[int]
    low: int | None = None
    """The first position of tokens of low norm; None: there are none."""


def texts_for(artifact: Artifact, embeddings: Floats, tokens: int) -> list[Text]:
    """Texts of `tokens` tokens each: prompts, or random ones where the artifact has no tokenizer.

    The last one holds the tokens of low norm. `embeddings` are the checkpoint's, [vocab, d]: where
    the artifact has others, it does not choose what is looked at.

    Raises:
        InvalidRequest: they do not fit into the artifact's slots, or are too few.
        ModelError: the manifest does not say how a text begins, or the tokenizer cannot be read.
    """
    longest = max(tokens, _CONTEXT + _LOW_TOKENS + 1) + artifact.rows
    if tokens <= _CONTEXT or longest > artifact.slots:
        raise InvalidRequest(
            f"texts of {tokens} tokens cannot be compared; expected more than {_CONTEXT}, and "
            f"{longest} slots, of which the artifact has {artifact.slots}"
        )
    begin = _begin(artifact.folder)
    tokenizer = _tokenizer(artifact.folder, begin)
    by_norm = np.argsort(np.linalg.norm(embeddings, axis=1), kind="stable")
    if tokenizer is None:
        texts = _random_texts(by_norm[len(by_norm) // 2 :], begin, tokens)
    else:
        texts = [
            Text(name, _of_length(tokenizer.encode(prompt, special=True), tokens, len(begin)))
            for name, prompt in PROMPTS.items()
        ]
    outside = sorted({t for text in texts for t in text.tokens if t >= artifact.vocab_size})
    if outside:
        raise ModelError(
            f"{artifact.folder / TOKENIZER} gives tokens up to {outside[-1]}; the artifact has "
            f"{artifact.vocab_size}, so it is another model's"
        )
    context = texts[0].tokens[: len(begin) + _CONTEXT]
    low: list[int] = by_norm[:_LOW_TOKENS].tolist()
    return [*texts, Text(LOW_NORM, [*context, *low], len(context))]


def beginning_faults(artifact: Artifact, checkpoint: Path) -> list[str]:
    """Where the artifact begins a text, or cuts it into tokens, otherwise than the checkpoint.

    Nothing is said of a checkpoint without a tokenizer.
    """
    if not (checkpoint / TOKENIZER).is_file():
        return []
    facts = read_facts(checkpoint)
    wanted = [facts.bos_token_id] if facts.add_bos and facts.bos_token_id is not None else []
    found = _begin(artifact.folder)
    faults = []
    if found != wanted:
        faults.append(
            f"BOS: a text begins with {_token(found)}; the checkpoint's begins with "
            f"{_token(wanted)}"
        )
    # Compared without their beginnings, of which all is said.
    ours, theirs = _tokenizer(artifact.folder, []), _tokenizer(checkpoint, [])
    if ours is not None and theirs is not None:
        faults += [
            f"tokenizer: {name} is cut into other tokens than by the checkpoint's"
            for name, prompt in PROMPTS.items()
            if ours.encode(prompt) != theirs.encode(prompt)
        ]
    return faults


def _begin(folder: Path) -> list[int]:
    """What the manifest puts before every text: one token, or none."""
    facts: Any = read_json(folder / MANIFEST).get("facts")
    if not isinstance(facts, dict) or not isinstance(facts.get("add_bos"), bool):
        raise ModelError(
            f"{folder / MANIFEST} does not say whether a text begins with a token of its own; "
            "convert the model again"
        )
    begin = facts.get("bos_token_id")
    return [begin] if facts["add_bos"] and isinstance(begin, int) else []


def _tokenizer(folder: Path, begin: Sequence[int]) -> Tokenizer | None:
    path = folder / TOKENIZER
    if not path.is_file():
        return None
    return Tokenizer(path, bos_token_id=begin[0] if begin else None, add_bos=bool(begin))


def _of_length(tokens: Sequence[int], length: int, begin: int) -> list[int]:
    """Cut, or said again until it is long enough; its first `begin` tokens come once."""
    body = tokens[begin:]
    if not body:
        raise ModelError("the artifact's tokenizer gives no tokens for a text; convert it again")
    return [*tokens[:begin], *(list(body) * -(-length // len(body)))][:length]


def _random_texts(tokens: npt.NDArray[np.int64], begin: Sequence[int], length: int) -> list[Text]:
    """Texts of some of the tokens: none of low norm, which would spoil all that see it."""
    drawn = np.random.default_rng(0).choice(tokens, (len(PROMPTS), length - len(begin))).tolist()
    return [Text(f"random {number}", [*begin, *text]) for number, text in enumerate(drawn, start=1)]


def _token(begin: Sequence[int]) -> str:
    return f"token {begin[0]}" if begin else "none of its own"
