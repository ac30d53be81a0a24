"""Encodes text to token ids and decodes them, with a `tokenizer.json`.

Invariant: encoding does not depend on earlier calls, and never adds a second beginning-of-sequence
token.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import InvalidRequest, ModelError
from paceline.storage.files import read_text

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads."""

    def __init__(self, path: Path, *, bos_token_id: int | None = None, add_bos: bool = False):
        """Read `path`, a tokenizer.json. Raises ModelError if it cannot be read."""
        self.path = path
        self._bos = bos_token_id if add_bos else None
        stat = path.stat() if path.exists() else None
        self._parsing = _shared(path, stat and (stat.st_size, stat.st_mtime_ns))

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included (a model's logits may have more columns)."""
        return self._parsing.get_vocab_size(with_added_tokens=True)

    @property
    def vocabulary(self) -> dict[str, int]:
        ids: dict[str, int] = self._parsing.get_vocab(with_added_tokens=True)
        return ids

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of `text`.

        `special=False` encodes literally: "<|im_end|>" becomes ordinary tokens and nothing is
        added. `special=True` is for a whole prompt: control tokens in the text become their
        ids (for a rendered chat, see `ControlText`), and the beginning-of-sequence token is added
        if the model uses one and the text does not begin with it.

        Raises InvalidRequest for text that is not valid Unicode (an unpaired surrogate).
        """
        check_unicode("the text", text)
        backend = self._parsing if special else self._literal
        ids = list(backend.encode(text, add_special_tokens=False).ids)
        return self.with_bos(ids) if special else ids

    def with_bos(self, ids: list[int]) -> list[int]:
        """Add the beginning-of-sequence token to a whole prompt if the model uses one."""
        return ids if self._bos is None or ids[:1] == [self._bos] else [self._bos, *ids]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a literal text, and each token's characters (start, end).

        Tokens that the file's post-processor adds are included, at (0, 0).

        Raises InvalidRequest for text that is not valid Unicode.
        """
        check_unicode("the text", text)
        encoding = self._literal.encode(text, add_special_tokens=True)
        return list(encoding.ids), list(encoding.offsets)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, without control tokens; incomplete UTF-8 gives U+FFFD.

        Ids outside the vocabulary are skipped. Raises InvalidRequest for negative ids.
        """
        try:
            text: str = self._parsing.decode(list(ids), skip_special_tokens=True)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest(f"token ids should be integers of 0 or more: {error}") from error
        return self._decode_runs(ids) if _BROKEN in text and self._bytes_of_tokens else text

    def continuation(self, ids: Sequence[int]) -> str:
        """Decode `ids` that follow other tokens, such as an answer's.

        SentencePiece decoders drop a space at the beginning of a text; these ids continue one.
        """
        before = self._before
        return self.decode([*before, *ids])[len(self.decode(before)) :]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its exact name, such as "<|im_end|>", or None."""
        return self._parsing.token_to_id(token)

    def special_tokens(self) -> dict[str, int]:
        """Return the control tokens, which `decode` omits: name -> id."""
        added = self.added_tokens().items()
        return {token.content: number for number, token in added if token.special}

    def added_tokens(self) -> "Mapping[int, AddedToken]":
        """Return the tokens found in a text before it is split: id -> token, control or not."""
        added: Mapping[int, AddedToken] = self._parsing.get_added_tokens_decoder()
        return added

    def begins_with(self, token_id: int) -> bool:
        """Return whether the file's post-processor adds `token_id` at the beginning."""
        return list(self._parsing.encode("", add_special_tokens=True).ids)[:1] == [token_id]

    def _decode_runs(self, ids: Sequence[int]) -> str:
        """Decode `ids`, keeping complete characters next to incomplete ones.

        The library's decoder gives U+FFFD for every byte of a run of byte tokens if one is invalid.
        """
        special = self._special
        text, begun = "", False
        for in_bytes, run in groupby(
            (token for token in ids if token not in special), self._bytes_of_tokens.__contains__
        ):
            if in_bytes:
                data = bytes(self._bytes_of_tokens[token] for token in run)
                text += data.decode("utf-8", "replace")
            else:
                before = self._before if begun else []
                whole: str = self._parsing.decode([*before, *run], skip_special_tokens=True)
                text += whole[len(self._parsing.decode(before)) :]
            begun = True
        return text

    @cached_property
    def _special(self) -> frozenset[int]:
        """Control tokens: Gemma has 6,000, and naming them takes 3 ms."""
        return frozenset(self.special_tokens().values())

    @cached_property
    def _bytes_of_tokens(self) -> dict[int, int]:
        """Tokens that are a byte, such as "<0x0A>"; empty if they are text in this vocabulary."""
        named = {self.token_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
        bytes_of = {token: byte for token, byte in named.items() if token is not None}
        letter = self.token_id(f"<0x{ord('A'):02X}>")
        is_byte = letter is not None and self._parsing.decode([letter]) == "A"
        return bytes_of if is_byte else {}

    @cached_property
    def _before(self) -> list[int]:
        """A token that keeps the space of the next one; empty if the decoder drops none."""
        token = self.token_id(_SPACE)
        if token is None or self.decode([token, token]) == self.decode([token]) * 2:
            return []
        return [token]

    @cached_property
    def _literal(self) -> "Backend":
        # A second copy, because encoding literally is a setting of the whole backend.
        backend = read_backend(self.path)
        backend.encode_special_tokens = True
        return backend


def check_unicode(what: str, text: str) -> None:
    """Raise InvalidRequest, which names `what`, for a text with an unpaired surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{what} is not valid Unicode: unpaired surrogate at character {error.start}"
        ) from error


@lru_cache(maxsize=4)
def _shared(path: Path, _state: tuple[int, int] | None) -> "Backend":
    return read_backend(path)


def read_backend(path: Path) -> "Backend":
    """Load a file with the tokenizers library. Raises ModelError if it cannot be read."""
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_str(read_text(path))
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} is not a valid tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


_BROKEN = "\ufffd"
"""Stands for bytes that are not a character."""

_SPACE = "\u2581"
"""Stands for a space in SentencePiece's tokens."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_COMPOSED = 4
"""Maximum characters that a tokenizer's normalizer (Unicode NFC) composes into one."""


_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHER = [byte for byte in range(256) if byte not in _PLAIN]
_BYTES = {chr(byte): byte for byte in _PLAIN} | {chr(256 + i): b for i, b in enumerate(_OTHER)}
"""Letter of a byte-level vocabulary, as in GPT-2 -> its byte."""


class TokenBytes:
    """Bytes and names of a model's tokens. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def special(self) -> dict[int, str]:
        """Control tokens: id -> name. They are not part of a text."""
        return {number: name for name, number in self._tokenizer.special_tokens().items()}

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; for a control token, its name."""
        name = self._names.get(token, "")
        if token in self.special:
            return name.encode()
        if self._byte_level and all(letter in _BYTES for letter in name):
            return bytes(_BYTES[letter] for letter in name)
        if match := _BYTE.fullmatch(name):
            return bytes.fromhex(match[1])
        return (name if self._byte_level else name.replace(_SPACE, " ")).encode()

    def name(self, token: int) -> str:
        r"""Return a token's text, or OpenAI's `bytes:\xf0\x9f` if its bytes are incomplete."""
        known = self.bytes_of(token)
        try:
            return known.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in known)

    def text(self, tokens: list[int]) -> str:
        """Return the text of tokens, including the names of control tokens.

        Raises InvalidRequest if a token id is negative or too large to be one.
        """
        text, run = "", list[int]()
        for token in tokens:
            if token in self.special:
                text += self._tokenizer.decode(run) + self.special[token]
                run = []
            else:
                run.append(token)
        return text + self._tokenizer.decode(run)

    def min_tokens(self, text: str) -> int:
        """Return a lower bound of a text's token count, without tokenizing it.

        Tokenizing a megabyte takes half a second and 100 MB, wasted if the text cannot fit.
        """
        return len(text) // (self._longest * _COMPOSED)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._names.values()))

    @cached_property
    def _names(self) -> dict[int, str]:
        return {number: name for name, number in self._tokenizer.vocabulary.items()}

    @cached_property
    def _byte_level(self) -> bool:
        # A large SentencePiece vocabulary may have the letter of the space as text.
        token = self._tokenizer.token_id("\u0120")
        return token is not None and self._tokenizer.decode([token]) == " "
