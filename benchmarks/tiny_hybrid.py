"""Write a tiny random Qwen3.5 with an MTP head as a GGUF file: a hybrid model for soak tests.

    python benchmarks/tiny_hybrid.py FILE

Needs the test tools: it is the model of the tests (`tests/support/hybrids.py`), with a context of
4,096 tokens.
"""

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.hybrids import HEAD, with_head

from support.mtp import random_weights

CONTEXT = 4096

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("name the file to write: python benchmarks/tiny_hybrid.py FILE")
    with TemporaryDirectory() as folder:  # what the file is made of
        made = with_head(Path(folder) / "made.gguf", random_weights(HEAD), context=CONTEXT)
        shutil.copy(made, sys.argv[1])
