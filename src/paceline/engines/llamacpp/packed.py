"""Packed copies of weights: the format that ik_llama.cpp computes fastest.

Rows of a matrix are stored interleaved, four or eight together, so that one load of a register
gets a part of each:

    as in the file   row 0: a0 a1 a2 ...   row 1: b0 b1 b2 ...   row 2: c0 ...   row 3: d0 ...
    packed           a0 b0 c0 d0  a1 b1 c1 d1  ...

The library can pack a file whenever it opens it, in its own memory: 3.9 s and 1.1 GB for a 1.7B
model. A packed copy is mapped like the file, so it opens at once, and memory holds it once. It
needs as much disk as the file, so it is only made if much space is free. A copy belongs to one
version of a file and of the library; those of deleted files are removed when the next copy is
made. If anything fails, the file itself is used.

A head that is also the embedding table is not packed, as the table is read row by row: the copy has
it again as a separate matrix. The table's pages are then hardly read, and use no memory.

Packing runs in its own process (`main`): the library's asserts end it.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from paceline.engines.llamacpp.binding import Binding
from paceline.engines.llamacpp.libraries import load
from paceline.errors import ModelError
from paceline.storage.files import digest_of
from paceline.storage.gguf_file import GgufFile, Tensor, read_gguf, write_gguf
from paceline.storage.progress import Progress
from paceline.storage.workspace import workspace

_FORM = 1

_ROOM = 10
"""A copy is only written if the disk has space for this many."""

_MIN_BYTES = 32 << 20
"""Minimum file size in bytes for which a copy is worthwhile."""

_SECONDS, _BYTES_PER_SECOND = 60, 20 << 20
"""Packing time limit: a constant, and a second per this many bytes (350 MB measured)."""

_COPY, _SOURCE, _NONE = ".gguf", ".source", ".none"
"""File suffixes: the copy, its source path, and a marker that no copy is possible."""

_TABLE, _HEAD = "token_embd.weight", "output.weight"


class PackedWeights:
    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def find(self, path: Path, binding: Binding) -> Path | None:
        copy = self._path(path, binding)
        return copy if copy is not None and copy.exists() else None

    def find_or_make(self, path: Path, binding: Binding, progress: Progress) -> Path | None:
        """Return the copy of a file, written if missing. None: use the file itself.

        Args:
            path: the file.
            binding: the library.
            progress: shows long work.
        """
        copy = self._path(path, binding)
        if copy is None or copy.exists():
            return copy
        none = copy.with_suffix(_NONE)
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            size = path.stat().st_size
            free = shutil.disk_usage(copy.parent).free
            if size < _MIN_BYTES or none.exists() or free < _ROOM * size:
                return None
            if binding.packs(read_gguf(path)):
                self._remove_old(path)
                with progress.task(f"packing {path.name} for this CPU, once"):
                    packed = _pack(path, copy)
                if packed:
                    copy.with_suffix(_SOURCE).write_bytes(bytes(path))
                    return copy
            none.touch()
        except (OSError, ModelError):
            pass
        return None

    def refuse(self, path: Path, binding: Binding) -> None:
        if (copy := self._path(path, binding)) is not None:
            with contextlib.suppress(OSError):
                copy.with_suffix(_NONE).touch()
                copy.unlink(missing_ok=True)

    def _path(self, path: Path, binding: Binding) -> Path | None:
        """Return the path of a file's copy, if it may have one."""
        try:
            stat = path.stat()
        except OSError:  # opening the file reports it better
            return None
        if self._folder is None:
            return None
        identity = (str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino)
        digest = digest_of([_FORM, binding.name, binding.version, *identity])
        return self._folder / f"{digest}{_COPY}"

    def _remove_old(self, path: Path) -> None:
        """Remove copies of other versions of the file, and of deleted files."""
        assert self._folder is not None
        for source in self._folder.glob(f"*{_SOURCE}"):
            with contextlib.suppress(OSError):
                packed = os.fsdecode(source.read_bytes())
                if packed == str(path) or not Path(packed).exists():
                    source.with_suffix(_COPY).unlink(missing_ok=True)
                    source.unlink()


def _pack(path: Path, copy: Path) -> bool:
    size = path.stat().st_size
    command = [sys.executable, "-P", "-m", "paceline.engines.llamacpp.packed", str(path)]
    with (
        contextlib.suppress(subprocess.TimeoutExpired),
        workspace(copy.parent, copy.stem, needed=size) as work,
    ):
        partial = work / copy.name
        done = subprocess.run(
            [*command, str(partial)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS + size // _BYTES_PER_SECOND,
            check=False,
        )
        if done.returncode == 0:
            with partial.open("rb+") as file:
                os.fsync(file.fileno())  # else a power failure could leave a copy of zeros
            partial.replace(copy)
    return copy.exists()


def main() -> int:
    """Pack the file of the first argument into that of the second; return 0 on success."""
    from paceline.engines.llamacpp.ik import IkLlama

    source, target = map(Path, sys.argv[1:])
    binding = load("ik_llama.cpp")
    assert isinstance(binding, IkLlama)
    content = read_gguf(source)
    tensors = {tensor.name: tensor for tensor in content.tensors}
    if _HEAD not in tensors:
        untied = target.with_name(f"{target.name}.untied")
        _write_untied(content, tensors[_TABLE], untied)
        source = untied
    return binding.pack(source, target)


def _write_untied(content: GgufFile, table: Tensor, path: Path) -> None:
    """Rewrite a file, with a second copy of the embedding table as the head."""
    tensors = [*content.tensors, table._replace(name=_HEAD)]
    forms = {tensor.name: (tensor.kind, tensor.data.nbytes) for tensor in tensors}
    untied = replace(content, tensors=tensors)
    write_gguf(path, untied, forms, lambda tensor: tensor.data, lambda _: None)


if __name__ == "__main__":
    sys.exit(main())
