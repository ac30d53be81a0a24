"""llama.cpp's own server, from the wheel of xllamacpp, as it is shipped.

    python benchmarks/llama_server.py FILE.gguf [LOOKUP]

LOOKUP is one of its lookups of n-grams, such as `ngram_mod`; without, it decodes plainly. One slot
has the whole context, as with `--parallel 1`, and keeps prompts, as by default. Prints the address,
and serves until Ctrl-C.
"""

import sys
import threading
from contextlib import suppress

import xllamacpp


def main() -> None:
    """Serve."""
    path, *lookups = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = path
    kinds = xllamacpp.common_speculative_type
    if lookups:
        params.speculative.types = [
            getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{lookup.upper()}") for lookup in lookups
        ]
    params.n_parallel = 1
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    with suppress(KeyboardInterrupt):
        threading.Event().wait()


if __name__ == "__main__":
    main()
