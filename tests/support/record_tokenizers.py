"""Compares our tokenizers of GGUF metadata with llama.cpp's, and records the latter's ids.

    pip install llama-cpp-python sentencepiece
    PYTHONPATH=src:tests python -m support.record_tokenizers --lines 10000   # compares
    PYTHONPATH=src:tests python -m support.record_tokenizers --write         # and records

tests/data/gguf_tokenizers.json gets a digest of each line's ids, with which
tests/models/gguf/test_gguf_tokenizer.py compares ours. Two kinds of differences are meant, and
their lines are recorded as differing: see `pre_tokenizers.py`.
"""

import argparse
import hashlib
import io
import json
import re
import tempfile
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from paceline.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from paceline.models.gguf.tokenizer import build_tokenizer
from support.tokenizer_lines import SPACE, byte_pairs, lines, write_vocabulary

DATA = Path(__file__).parent.parent / "data" / "gguf_tokenizers.json"
LINES, PAIRS = 300, 12_000
"""What is recorded: the first lines, with a vocabulary of this size."""


def digest(ids: Sequence[int]) -> str:
    """Eight hexadecimal digits."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:8]


def ours(fields: Mapping[str, Any]) -> Callable[[str], list[int]]:
    backend = tokenizers.Tokenizer.from_str(build_tokenizer(Path("a.gguf"), fields))
    backend.encode_special_tokens = True
    return lambda text: list(backend.encode(text, add_special_tokens=False).ids)


def llama(path: Path) -> Callable[[str], list[int]]:
    import llama_cpp

    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return lambda text: list(model.tokenize(text.encode(), add_bos=False, special=False))


def vocabulary(pre: str, pairs: int, pieces: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata for a pre-tokenizer; `pieces` are those of a model of SentencePiece."""
    if not PRE_TOKENIZERS[pre].marks_spaces:
        return {**byte_pairs(pairs), "tokenizer.ggml.pre": pre}
    known = dict(zip(pieces["tokenizer.ggml.tokens"], pieces["tokenizer.ggml.scores"], strict=True))
    merges = [
        (-score, f"{text[:cut]} {text[cut:]}")
        for text, score in known.items()
        for cut in range(1, len(text))
        if {text[:cut], text[cut:]} <= known.keys() and " " not in text
    ]
    return {
        **pieces,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": [merge for _, merge in sorted(merges)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def compared(
    fields: Mapping[str, Any], pre: str, count: int, folder: Path
) -> tuple[list[str], dict[int, str]]:
    """Digests of llama.cpp's ids, and the lines for which ours differ, by number."""
    theirs = llama(write_vocabulary(folder / f"{pre}.gguf", fields))
    mine = ours(fields)
    digests, different = [], {}
    for number, line in enumerate(lines(count)):
        text = unicodedata.normalize("NFC", line) if PRE_TOKENIZERS[pre].nfc else line
        expected = theirs(text)
        digests.append(digest(expected))
        if mine(text) != expected:
            different[number] = text
    return digests, different


def trained(*, prefix: bool) -> tuple[dict[str, Any], Callable[[str], list[int]]]:
    """Metadata of a small model of SentencePiece, and its own encoding.

    Without a prefix it is like Gemma's: line breaks and runs of spaces are tokens of their own.
    """
    import sentencepiece

    user = [] if prefix else [*(SPACE * n for n in range(2, 12)), "\n", "\n\n", "\t", "<b>"]
    # The letters of few scripts, so that others are bytes.
    texts = (text for text in lines(9000, seed=7) if max(map(ord, text)) < 0x600)
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(re.sub(r"[\r\n]", " ", text) for text in texts),
        model_writer=written,
        model_type="bpe",
        vocab_size=1400,
        character_coverage=0.98,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        user_defined_symbols=user,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    tokens, scores, kinds = [], [], []
    for i in range(model.vocab_size()):
        piece = model.IdToPiece(i)
        tests = (model.IsUnknown(i), model.IsControl(i), piece in user, model.IsUnused(i))
        kinds.append(next((kind for kind, is_it in enumerate(tests, 2) if is_it), 1))
        if model.IsByte(i):
            kinds[-1] = 6
        # As llama.cpp's converter writes user-defined tokens.
        tokens.append(piece.replace(SPACE, " ") if piece in user else piece)
        scores.append(-1000.0 if piece in user else model.GetScore(i))
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    return fields, model.encode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=LINES)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--pre", action="append")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    values: dict[str, dict[str, Any]] = {}
    plain = trained(prefix=False)[0]
    with tempfile.TemporaryDirectory() as folder:
        for pre in options.pre or PRE_TOKENIZERS:
            try:
                fields = vocabulary(pre, options.pairs, plain)
                digests, different = compared(fields, pre, options.lines, Path(folder))
            except (ValueError, RuntimeError) as error:
                print(f"{pre:16} refused by llama.cpp: {error}")  # noqa: T201
                continue
            values[pre] = {"different": [*different], "ids": "".join(digests)}
            shown = [repr(entry) for entry in sorted(different.values(), key=len)[:3]]
            counts = f"{len(different):6} of {options.lines} differ"
            print(f"{pre:16} {counts}", *shown, flush=True)  # noqa: T201
        pieces = []
        for prefix in (True, False):
            fields, encode = trained(prefix=prefix)
            theirs = llama(write_vocabulary(Path(folder) / f"{prefix}.gguf", fields))
            mine = ours(fields)
            all_three = [(mine(text), encode(text), theirs(text)) for text in lines(options.lines)]
            apart = [sum(ids[0] != ids[other] for ids in all_three) for other in (1, 2)]
            print(f"sentencepiece: {apart[0]} differ, llama.cpp: {apart[1]}")  # noqa: T201
            ids = "".join(digest(entry) for _, _, entry in all_three)
            pieces.append({"fields": fields, "ids": ids})
    if options.write:
        DATA.parent.mkdir(exist_ok=True)
        distinct = list(dict.fromkeys(entry["ids"] for entry in values.values()))
        for item in values.values():
            item["ids"] = distinct.index(item["ids"])
        kept = {"pre": values, "ids": distinct, "sentencepiece": pieces}
        DATA.write_text(json.dumps(kept, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
