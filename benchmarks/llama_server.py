"""llama.cpp's own server, from the wheel of xllamacpp, as it is shipped.

    python benchmarks/llama_server.py FILE.gguf [--lookup LOOKUP] [--parallel 8] [--draft FILE.gguf]

LOOKUP is one of its lookups of n-grams, such as `ngram_mod`; without, it decodes plainly. Each slot
has `--context` tokens, by default the model's, and keeps prompts, as by default. Prints the
address, and serves until Ctrl-C.
"""

import argparse
import threading
from contextlib import suppress

import xllamacpp


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--lookup")
    parser.add_argument("--parallel", type=int, default=1, help="slots")
    parser.add_argument("--context", type=int, default=0, help="tokens of a slot")
    parser.add_argument("--draft", help="GGUF file of a draft model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.n_parallel = options.parallel
    params.n_ctx = options.context * options.parallel
    if options.threads:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    if options.port:
        params.port = options.port
    if options.draft:
        params.speculative.draft.mparams.path = options.draft
    speculation = "draft_simple" if options.draft else options.lookup
    if speculation:
        kind = f"COMMON_SPECULATIVE_TYPE_{speculation.upper()}"
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    with suppress(KeyboardInterrupt):
        threading.Event().wait()


if __name__ == "__main__":
    main()
