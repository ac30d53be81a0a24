"""Script: packs a GGUF file for ik_llama.cpp; `packed.py` runs it. Exit code 0: it is written."""

import sys
from dataclasses import replace
from pathlib import Path

from paceline.engines.llamacpp.libraries import load
from paceline.storage.gguf_file import GgufFile, Tensor, read_gguf, write_gguf

_TABLE, _HEAD = "token_embd.weight", "output.weight"


def main() -> int:
    """Pack the file that the first argument names into that of the second."""
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
    """Write a file again, with the table of embeddings once more as the head."""
    tensors = [*content.tensors, table._replace(name=_HEAD)]
    forms = {tensor.name: (tensor.kind, tensor.data.nbytes) for tensor in tensors}
    untied = replace(content, tensors=tensors)
    write_gguf(path, untied, forms, lambda tensor: tensor.data, lambda _: None)


if __name__ == "__main__":
    sys.exit(main())
