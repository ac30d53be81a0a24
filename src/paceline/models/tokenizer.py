"""Text to token ids and back.

Knows one `tokenizer.json`. Knows nothing about chat templates or generation. The rule: the same
text gives the same ids whatever was encoded before, and a beginning-of-sequence token never comes
twice.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import InvalidRequest, ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads."""

    def __init__(self, path: Path, *, bos_token_id: int | None = None, add_bos: bool = False):
        """Read `path`, a tokenizer.json. Raises ModelError when it cannot be read."""
        self._path = path
        self._bos = bos_token_id if add_bos else None
        self._parsing = _load(path)

    @property
    def vocab_size(self) -> int:
        """How many ids there are, added tokens included (a model may compute more columns)."""
        return self._parsing.get_vocab_size(with_added_tokens=True)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token's name and id."""
        found: dict[str, int] = self._parsing.get_vocab(with_added_tokens=True)
        return found

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The token ids of `text`.

        `special=False` takes the text literally: "<|im_end|>" is six or so ordinary tokens and
        nothing is added. `special=True` is for a whole prompt, raw or rendered by a chat template:
        control tokens written in the text become their ids, and the model's beginning-of-sequence
        token is put first if the model wants one and the text does not begin with it already.

        So a chat message that contains "<|im_end|>" ends its own turn, as it does in transformers
        and llama.cpp: a template's output is one string, in which the two cannot be told apart.
        Whoever serves people they do not trust should refuse or rewrite such messages.

        Raises InvalidRequest for text that is not valid Unicode (an unpaired surrogate).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text is not valid Unicode: unpaired surrogate at character {error.start}"
            ) from error
        backend = self._parsing if special else self._literal
        ids = list(backend.encode(text, add_special_tokens=False).ids)
        if special and self._bos is not None and ids[:1] != [self._bos]:
            ids.insert(0, self._bos)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without control tokens; bytes that are no whole character give U+FFFD.

        Ids that the vocabulary has not are skipped. Raises InvalidRequest for negative ids.
        """
        try:
            return self._parsing.decode(list(ids), skip_special_tokens=True)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest(f"token ids should be whole numbers from 0: {error}") from error

    def token_id(self, token: str) -> int | None:
        """The id of one token by its exact name, such as "<|im_end|>"; None when there is none."""
        return self._parsing.token_to_id(token)

    def special_tokens(self) -> dict[str, int]:
        """The control tokens by name: those that `decode` leaves out."""
        added = self._parsing.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def begins_with(self, token_id: int) -> bool:
        """Whether the file itself puts `token_id` first (its post-processor says so)."""
        return list(self._parsing.encode("", add_special_tokens=True).ids)[:1] == [token_id]

    @cached_property
    def _literal(self) -> "Backend":
        # A second copy, because taking text literally is a setting of the whole backend object.
        backend = _read(self._path)
        backend.encode_special_tokens = True
        return backend


def _load(path: Path) -> "Backend":
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    return _shared(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4)
def _shared(path: Path, _size: int, _mtime_ns: int) -> "Backend":
    return _read(path)


def _read(path: Path) -> "Backend":
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} is not a tokenizer that can be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend
