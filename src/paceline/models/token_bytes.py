"""What a token is in text: its bytes, and a name for it where those are no whole character.

Knows one tokenizer's vocabulary, byte-level or with SentencePiece's marks. Knows nothing of
answers.
"""

import re
from functools import cached_property

from paceline.models.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_COMPOSED = 4
"""Characters of a text that a tokenizer's normaliser makes one of, at most (Unicode's NFC)."""


def _letters() -> dict[str, int]:
    """The letter that stands for each byte in a byte-level vocabulary, as GPT-2 has them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    pairs = [(chr(byte), byte) for byte in plain]
    return dict(pairs + [(chr(256 + place), byte) for place, byte in enumerate(rest)])


_LETTERS = _letters()


class Words:
    """The tokens of one model as text. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Prepare; the vocabulary is read at the first question."""
        self._tokenizer = tokenizer

    @cached_property
    def special(self) -> dict[int, str]:
        """The control tokens, which are not part of any text."""
        return {number: name for name, number in self._tokenizer.special_tokens().items()}

    def bytes_of(self, token: int) -> bytes:
        """What a token adds to a text; of a control token its name."""
        name = self._names.get(token, "")
        if token in self.special:
            return name.encode()
        if self._byte_level and all(letter in _LETTERS for letter in name):
            return bytes(_LETTERS[letter] for letter in name)
        if found := _BYTE.fullmatch(name):
            return bytes.fromhex(found[1])
        return (name if self._byte_level else name.replace("\u2581", " ")).encode()

    def name(self, token: int) -> str:
        r"""A token's text; `bytes:\xf0\x9f` where it is no whole character, as OpenAI has it."""
        known = self.bytes_of(token)
        try:
            return known.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in known)

    def text(self, tokens: list[int]) -> str:
        """The text of tokens, with the names of control tokens.

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

    def least(self, text: str) -> int:
        """How many tokens a text has at least, told without making them.

        A megabyte takes half a second and 100 MB to make; what cannot fit need not be made.
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
        return all(letter in known for letter in _LETTERS)
