"""Published drafters as GGUF files, for targets in the engine llamacpp; see `drafters/heads.py`.

`dflash` fills a block in one pass (DFlash, DFlash 2, DSpark); `mtp` drafts a chain, token by token
(EAGLE-3, and the MTP layers inside a model's own file). llama.cpp runs their networks
(`engines/llamacpp/draft_context.py`); this package decides what to draft, and what to cache.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.drafters.heads import HeadFacts, check_fits, sizes_of
from paceline.drafters.native.block import BlockNetwork
from paceline.drafters.native.cache import DraftNetwork
from paceline.drafters.native.chain import LONGEST_CHAIN, ChainNetwork
from paceline.drafters.native.file import INSIDE, DraftFile, read_drafter
from paceline.errors import ModelError

_FIRST_KEYS = 1 << 16
"""Bytes at the start of a file that contain its number of MTP layers, if it has any."""


class _Kind:
    def __init__(self, name: str, options: Sequence[str] = ()) -> None:
        self.name = name
        self.options: Mapping[str, Sequence[int]] = dict.fromkeys(options, ())

    def is_inside(self, target: Path) -> bool:
        if self.name != "mtp" or target.suffix != ".gguf" or not target.is_file():
            return False
        with target.open("rb") as file:  # keys come first, except those of the tokenizer
            return INSIDE.encode() in file.read(_FIRST_KEYS)

    def taps(self, folder: Path, target: Path) -> tuple[int, ...]:
        return self._read(folder, target).taps

    def open(self, folder: Path, engine: Any, options: Mapping[str, int]) -> DraftNetwork:
        file = self._read(folder, engine.path)
        model = engine.open_drafter(file.path)
        if file.kind == "dflash":
            return BlockNetwork(file, model)
        return ChainNetwork(file, model, options.get("length", LONGEST_CHAIN))

    def facts(self, folder: Path) -> HeadFacts | None:
        file = read_drafter(folder)
        if file is None or file.kind != self.name or file.is_inside:
            return None
        return _facts(file)

    def _read(self, folder: Path, target: Path) -> DraftFile:
        file = read_drafter(folder)
        if file is None or file.kind != self.name:
            raise ModelError(
                f"{folder} does not contain a {self.name} drafter; expected a GGUF file with the "
                "architecture dflash (for dflash) or eagle3 (for mtp)"
            )
        sizes, _ = sizes_of(target)
        check_fits(file.path, _facts(file), sizes)
        if max(file.taps) >= sizes.layers:
            raise ModelError(
                f"{file.path} is a drafter for another target: it reads states after layer "
                f"{max(file.taps)}, and {target.name} has {sizes.layers} layers; use a drafter for "
                "this model"
            )
        return file


def _facts(file: DraftFile) -> HeadFacts:
    return HeadFacts(file.kind, file.form, file.target_width, file.vocab_size, None)


DFLASH, MTP = _Kind("dflash"), _Kind("mtp", ("length",))
