"""Rows near the context lengths where MLX's attention changes kernels, on this machine.

    python benchmarks/mlx_thresholds.py --model mlx-community/Qwen3-0.6B-4bit

After prompts that end before 1,024, 4,096, 8,192 and 16,384 tokens, random tokens are decoded one
by one, in blocks, and in blocks while other sequences share the calls. Prints a line of JSON per
context: how many rows were compared with plain decoding's, and how many differ in any bit. Fails if
one does.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import cycle

import numpy as np

import paceline
from paceline.decoding.types import Block, Logits
from paceline.engines.base import Engine, KVSequence
from paceline.engines.exact import RowComparison, compare

THRESHOLDS = (1024, 4096, 8192, 16384)
"""Numbers of keys; see `paceline_mlx/thresholds.py`."""
BEFORE = 12
ROWS = 24
"""Compared rows, from `BEFORE` rows before a threshold on."""
LENGTHS = ((4, 8), (8,), (5, 3, 7))
"""Lengths of blocks, in turn; of each block up to two rows are rejected."""
OTHERS = 2


def main() -> int:
    """Compare, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    failed = False
    with paceline.load(arguments.model, engine="mlx", contexts=2 + OTHERS) as model:
        for threshold in THRESHOLDS:
            if threshold + ROWS > model.engine.context_length:
                break
            result = near(model.engine, threshold - BEFORE)
            failed |= not result.holds
            print(json.dumps({"threshold": threshold, **result.as_dict()}), flush=True)
    return int(failed)


def near(engine: Engine, start: int) -> RowComparison:
    """Compare rows after a prompt of `start` tokens."""
    rng = np.random.default_rng(start)
    text = rng.integers(0, engine.vocab_size, start + ROWS + max(map(max, LENGTHS))).tolist()
    total = RowComparison()
    with ExitStack() as stack:
        prompt = stack.enter_context(closing(engine.open()))
        engine.step([(prompt, Block(text[:start], 0, prefill=True))])
        prompt.commit(start)
        others = [stack.enter_context(closing(engine.open())) for _ in range(OTHERS)]
        for other in others:
            engine.step([(other, Block(text[:40], 0, prefill=True))])
            other.commit(40)
        plain = decoded(engine, prompt, text, cycle([1]), ())
        for lengths in LENGTHS:
            for beside in ((), others):
                total += compare(decoded(engine, prompt, text, cycle(lengths), beside), plain)
    return total


def decoded(
    engine: Engine,
    prompt: KVSequence,
    text: Sequence[int],
    lengths: Iterator[int],
    others: Sequence[KVSequence],
) -> Logits:
    """Logits of `ROWS` rows after the prompt, [ROWS, vocab], in blocks of these lengths."""
    rows: list[Logits] = []
    start = prompt.length
    while (at := sum(map(len, rows))) < ROWS:
        count = next(lengths)
        # Nothing of the others is committed: they run the same block again.
        work = [(other, Block(text[40:43], 3)) for other in others]
        block = Block(text[start + at : start + at + count], count)
        logits = engine.step([*work, (prompt, block)]).logits[-1]
        kept = min(max(count - 2, 1), ROWS - at)
        rows.append(logits[:kept].copy())
        prompt.commit(kept)
    prompt.rewind(start)
    return np.concatenate(rows)


if __name__ == "__main__":
    sys.exit(main())
