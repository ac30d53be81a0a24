"""Builds a `tokenizer.json` from GGUF metadata: byte-level BPE, and SentencePiece's BPE.

`pre_tokenizers.py` defines the names in `tokenizer.ggml.pre`, `vocabulary.py` checks the tokens. If
the metadata is not enough, a tokenizer.json next to the file is used.

SentencePiece merges the pair of symbols whose joined token has the best score, the leftmost first.
Here they become ordered merges: every pair that joins to a token, by the token's score.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ModelError
from paceline.models.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from paceline.models.gguf.vocabulary import TokenType, list_of, token_id, token_types
from paceline.models.manifest import TOKENIZER
from paceline.storage.files import read_text
from paceline.storage.gguf_file import NumberArray, short

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPACE = "\u2581"
"""Stands for a space in SentencePiece's tokens."""

_KEEP_SPACE = frozenset(["<unk>", "<s>", "<|endoftext|>"])
"""Phi-3's control tokens; white space after them is text (as in llama.cpp)."""


class UnsupportedTokenizer(ModelError):
    """A tokenizer that cannot be read from the metadata; the message names it."""


def build_tokenizer(path: Path, fields: Mapping[str, Any]) -> str:
    """Return the text of a tokenizer.json for the checked metadata of the file at `path`.

    If the metadata is not enough, or lacks the pre-tokenizer's name, a tokenizer.json next to the
    file is used if it has the same tokens. Raises ModelError, which names the remedy.
    """
    unnamed = fields.get("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.pre" not in fields
    made, reason = None, ""
    try:
        made = make_tokenizer(fields).to_str()
    except UnsupportedTokenizer as error:
        reason = str(error)
    if made is not None and not unnamed:
        return made
    adjacent = path.with_name(TOKENIZER)
    misfit = _misfit(adjacent, fields)
    if misfit is None:
        return read_text(adjacent)
    if made is not None:
        return made
    raise ModelError(
        f"{path} has {reason}; put the tokenizer.json of the original model next to the file "
        f"({misfit})"
    )


def _misfit(path: Path, fields: Mapping[str, Any]) -> str | None:
    """Return why a tokenizer.json disagrees with the GGUF vocabulary, or None if it matches."""
    from tokenizers import Tokenizer

    if not path.is_file():
        return "there is none"
    try:
        known: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises bare Exception
        return f"{path} is not a valid tokenizer: {short(error)}"
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    # GGUF writers spell added tokens and fillers differently.
    spelled = (TokenType.NORMAL, TokenType.BYTE)
    plain = {number for number, kind in enumerate(token_types(fields)) if kind in spelled}
    for name, number in known.items():
        if number >= len(tokens) or (number in plain and tokens[number] != name):
            return f"{path} does not fit: its token {number} is {short(repr(name))}"
    if missing := plain - set(known.values()):
        return f"{path} does not fit: it has no token {min(missing)}"
    return None


def make_tokenizer(fields: Mapping[str, Any]) -> "Tokenizer":
    """Build the tokenizer of checked metadata. Raises UnsupportedTokenizer."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    _refuse_options(fields, kind)
    if kind == "llama":
        tokenizer = _sentence_piece(fields)
    elif kind == "gemma4":
        tokenizer = _bpe(fields, PRE_TOKENIZERS["gemma4"])
    elif kind == "gpt2" and isinstance(pre, str) and pre in PRE_TOKENIZERS:
        tokenizer = _bpe(fields, PRE_TOKENIZERS[pre])
    else:
        raise UnsupportedTokenizer(
            f"a tokenizer of kind {short(kind)}/{short(pre)}, not supported; expected llama, "
            f"gemma4, or gpt2 with one of {len(PRE_TOKENIZERS)} pre-tokenizers, such as llama-bpe"
        )
    is_phi3 = fields.get("general.architecture") in ("phi3", "phimoe")
    _add_tokens(tokenizer, fields, strip=kind == "llama" and is_phi3)
    return tokenizer


def _refuse_options(fields: Mapping[str, Any], kind: object) -> None:
    """Raise UnsupportedTokenizer for an unimplemented option that would change the ids."""
    options = ["remove_extra_whitespaces"]
    if f"{fields.get('general.architecture')}.pooling_type" not in fields:
        options.append("add_eos_token")  # `pooling_facts` reads it for embedding models
    if kind != "llama":
        options.append("add_space_prefix")  # llama.cpp ignores it; the models' own files do not
    for option in options:
        if fields.get(f"tokenizer.ggml.{option}"):
            raise UnsupportedTokenizer(
                f"a tokenizer with the option {option}, which is not implemented"
            )
    charsmap = fields.get("tokenizer.ggml.precompiled_charsmap")
    if isinstance(charsmap, NumberArray) and len(charsmap.values):
        raise UnsupportedTokenizer(
            "a tokenizer with a precompiled_charsmap, which is not implemented"
        )


def _bpe(fields: Mapping[str, Any], pre: PreTokenizer) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges", ())]
    if not merges:
        raise UnsupportedTokenizer("a BPE tokenizer without merges")
    ids = _ids(fields)
    if pre.marks_spaces and not _has_bytes(ids):
        raise UnsupportedTokenizer("a BPE tokenizer of plain text without tokens for bytes")
    tokenizer = Tokenizer(
        models.BPE(ids, merges, ignore_merges=pre.ignore_merges, byte_fallback=pre.marks_spaces)
    )
    steps: list[Any] = [Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    if pre.marks_spaces:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        tokenizer.decoder = _decoder(strip=False)
    else:
        steps.append(ByteLevel(add_prefix_space=False, use_regex=False))
        tokenizer.decoder = decoders.ByteLevel()
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = Sequence(steps)
    return tokenizer


def _sentence_piece(fields: Mapping[str, Any]) -> "Tokenizer":
    """Build SentencePiece's BPE: tokens with scores, and bytes for text without tokens."""
    from tokenizers import Tokenizer, models, normalizers

    prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    ids, unknown = _ids(fields), token_id(fields, "unknown")
    tokenizer = Tokenizer(
        models.BPE(
            ids,
            _merges_by_score(fields),
            unk_token=None if unknown is None else fields["tokenizer.ggml.tokens"][unknown],
            fuse_unk=True,
            byte_fallback=_has_bytes(ids),
        )
    )
    # A prefix before the text and after each control token, as in llama.cpp.
    marks: list[Any] = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = _decoder(strip=prefix)
    return tokenizer


def _merges_by_score(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return every pair of tokens that joins to a token, best score first.

    In SentencePiece, pairs with the same score have one rank, and the leftmost is merged first.
    Sorting by longest token, then longest left part, gives the same order in runs of a letter.
    """
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    scores, kinds = _checked_scores(fields), token_types(fields)
    known = {
        text: score
        for text, score, kind in zip(tokens, scores, kinds, strict=True)
        if kind in (TokenType.NORMAL, TokenType.USER_DEFINED)
    }
    merges = [
        (-score, -len(text), -cut, text)
        for text, score in known.items()
        for cut in range(1, len(text))
        if text[:cut] in known and text[cut:] in known
    ]
    return [(text[:-cut], text[-cut:]) for _, _, cut, text in sorted(merges)]


def _checked_scores(fields: Mapping[str, Any]) -> list[float]:
    """Return the scores if they rank merges; otherwise raise UnsupportedTokenizer."""
    ranks: list[float] = list_of(fields, "scores")
    types = token_types(fields)
    normal = [score for score, kind in zip(ranks, types, strict=False) if kind == TokenType.NORMAL]
    if not ranks or not all(map(math.isfinite, normal)):
        raise UnsupportedTokenizer("a SentencePiece tokenizer without scores")
    if len(normal) > 1 and len(set(normal)) == 1:  # converted from a tokenizer.json
        raise UnsupportedTokenizer(
            "a SentencePiece tokenizer whose scores are all equal, so its merges are lost"
        )
    if sum(score != int(score) for score in normal) > len(normal) / 2:
        raise UnsupportedTokenizer(
            "a SentencePiece tokenizer of the kind Unigram (its scores are probabilities)"
        )
    return ranks


def _decoder(*, strip: bool) -> Any:
    """Decode bytes and spaces; remove the space before a text if one was added."""
    from tokenizers import decoders

    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)


def _add_tokens(tokenizer: "Tokenizer", fields: Mapping[str, Any], *, strip: bool) -> None:
    """Add control tokens, and those that are found in a text before it is split."""
    from tokenizers import AddedToken

    control, others = list[AddedToken](), list[AddedToken]()
    for text, kind in zip(fields["tokenizer.ggml.tokens"], token_types(fields), strict=True):
        is_control = kind in (TokenType.CONTROL, TokenType.UNKNOWN)
        if text and (is_control or kind == TokenType.USER_DEFINED):
            rstrip = strip and text not in _KEEP_SPACE
            token = AddedToken(text, special=is_control, normalized=False, rstrip=rstrip)
            (control if is_control else others).append(token)
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(others)


def _ids(fields: Mapping[str, Any]) -> dict[str, int]:
    return {text: i for i, text in enumerate(fields["tokenizer.ggml.tokens"])}


def _has_bytes(ids: Mapping[str, int]) -> bool:
    return all(f"<0x{byte:02X}>" in ids for byte in range(256))
