"""Bytes and printable names of tokens, for byte-level and SentencePiece vocabularies."""

import re
from functools import cached_property

from paceline.models.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_COMPOSED = 4
"""Most characters that a tokenizer's normaliser (Unicode NFC) composes into one."""


def _bytes_by_letter() -> dict[str, int]:
    """The byte of each letter of a byte-level vocabulary, as in GPT-2."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    pairs = [(chr(byte), byte) for byte in plain]
    return dict(pairs + [(chr(256 + place), byte) for place, byte in enumerate(rest)])


_BYTES = _bytes_by_letter()


class TokenBytes:
    """The tokens of one model as bytes and names. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Use a tokenizer; its vocabulary is read at the first use."""
        self._tokenizer = tokenizer

    @cached_property
    def special(self) -> dict[int, str]:
        """Control tokens: id -> name. They are not part of a text."""
        return {number: name for name, number in self._tokenizer.special_tokens().items()}

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token adds to a text; for a control token its name."""
        name = self._names.get(token, "")
        if token in self.special:
            return name.encode()
        if self._byte_level and all(letter in _BYTES for letter in name):
            return bytes(_BYTES[letter] for letter in name)
        if found := _BYTE.fullmatch(name):
            return bytes.fromhex(found[1])
        return (name if self._byte_level else name.replace("\u2581", " ")).encode()

    def name(self, token: int) -> str:
        r"""A token's text, or OpenAI's `bytes:\xf0\x9f` if its bytes are not whole characters."""
        known = self.bytes_of(token)
        try:
            return known.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in known)

    def text(self, tokens: list[int]) -> str:
        """The text of tokens, the names of control tokens included.

        Raises:
            InvalidRequest: a token id is negative or too large to be one.
        """
        found, run = "", list[int]()
        for token in tokens:
            if token in self.special:
                found += self._tokenizer.decode(run) + self.special[token]
                run = []
            else:
                run.append(token)
        return found + self._tokenizer.decode(run)

    def min_tokens(self, text: str) -> int:
        """A lower bound of a text's tokens, without tokenizing it.

        Tokenizing a megabyte takes half a second and 100 MB, in vain if the text cannot fit.
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
        known = self._tokenizer.vocabulary
        return all(letter in known for letter in _BYTES)
