"""Drafts of heads in GGUF files beside those of llama.cpp's own server, step by step.

    python benchmarks/native_drafts.py [FORM ...]

The server is the one in the package xllamacpp, with the same files. Its synthetic acceptance shows
what it drafts: it takes the first `keep` tokens of each draft, whatever the target says, and rolls
back the rest. Ours reads the server's text, and drafts at the same places. The files are tiny and
random, so that a wrong layer, row or position gives other drafts.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import xllamacpp

from paceline.decoding.sampling import Sampling
from paceline.decoding.types import Block, ComputedBlock
from paceline.drafters import DrafterResources, DraftKV, RequestContext, create
from paceline.drafters.native import chain
from paceline.engines import EngineSettings
from paceline.engines.llamacpp.engine import LlamaCppEngine
from paceline.engines.llamacpp.libraries import load

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import native_drafters as files
from support.tiny import write_tiny

DRAFTS, ENDS = 5, (0, 2)
FORMS: dict[str, tuple[str, str, Callable[..., Path]]] = {
    "DFlash": ("dflash", "dflash", files.write_dflash),
    "DFlash 2": ("dflash", "dflash", files.write_dflash2),
    "DSpark": ("dflash", "dspark", files.write_dspark),
    "EAGLE-3": ("mtp", "eagle3", files.write_eagle3),
    "MTP": ("mtp", "mtp", files.write_mtp_model),
}


def server_text(target: Path, drafter: Path, kind: str, keep: int, body: dict[str, Any]) -> Any:
    """The answer of a new server: an old one gives MTP layers the last state of the request before.

    Keys are of the type that ours are of here; with F16 near ties are picked otherwise.
    """
    params = xllamacpp.CommonParams()
    params.model.path = str(target)
    if drafter != target:
        params.speculative.draft.mparams.path = str(drafter)
    kinds = xllamacpp.common_speculative_type
    params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_DRAFT_{kind.upper()}")]
    params.speculative.draft.n_max = DRAFTS
    params.speculative.synth_rates = [1.0] * keep + [0.0] * (DRAFTS - keep)
    params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_BF16
    params.n_ctx, params.n_parallel, params.warmup = 512, 1, False
    server = xllamacpp.Server(params)
    request = Request(f"{server.listening_address}/completion", json.dumps(body).encode())
    with urlopen(request) as response:
        return json.load(response)["tokens"]


def compare(
    engine: LlamaCppEngine, spec: str, keep: int, prompt: Sequence[int], text: Sequence[int]
) -> tuple[int, int]:
    """Drafts that were compared, and those that are others."""
    shared = DrafterResources(
        engine="llamacpp", files=engine.path, opened=engine, vocab_size=engine.vocab_size,
        shipped={"mtp": engine.path},
    )  # fmt: skip
    request = RequestContext(DraftKV(), sampling=Sampling(), prompt_length=len(prompt))
    (drafter,) = create(spec, shared, request)
    compared = others = at = 0
    tokens, accepted, block = [*prompt], len(prompt), Block(prompt, 1, prefill=True)
    with closing(engine.open()) as sequence:
        while True:
            result, start = engine.step([(sequence, block)]), sequence.length
            sequence.commit(accepted)
            drafter.observe(ComputedBlock(block.tokens, start, accepted, result.taps[0]))
            tokens.append(text[at])  # the target's own
            at += 1
            if at + keep + 1 > len(text):
                return compared, others
            draft = [*drafter.propose(tokens, DRAFTS).tokens]
            # The server takes no token that ends an answer.
            count = next((i for i, token in enumerate(draft[:keep]) if token in ENDS), keep)
            theirs = [*text[at : at + count]]
            compared += count
            others += sum(one != other for one, other in zip(draft, theirs, strict=False))
            block = Block([tokens[-1], *theirs, *draft[count:]], 1 + len(draft))
            tokens, at, accepted = [*tokens, *theirs], at + count, count + 1


def main() -> None:
    """Print for each form, library and number of tokens kept how many drafts are others."""
    chain.MIN_CHANCE = 0.0
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, files.COUNT - 3, n).tolist() for n in rng.integers(5, 150, 10)]
    body = {"n_predict": 64, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    folder = Path(tempfile.mkdtemp())
    other = write_tiny(folder / "target.gguf", sizes=files.SIZES_OF_TARGET)
    for form, keep in product(sys.argv[1:] or FORMS, (DRAFTS, 2)):
        spec, kind, write = FORMS[form]
        drafter = write(folder / f"{kind}.gguf", perfect=False)
        inside = form == "MTP"
        target, taps = (drafter, (3,)) if inside else (other, (0, 1, 2))
        bodies = [{**body, "prompt": prompt} for prompt in prompts]
        texts = [server_text(target, drafter, kind, keep, one) for one in bodies]
        for library in ["llama.cpp"] if inside else ["llama.cpp", "ik_llama.cpp"]:
            settings, binding = EngineSettings(taps=taps), load(library)
            with closing(LlamaCppEngine(target, 512, settings, binding=binding)) as engine:
                at = spec if inside else f"{spec}:{drafter}"
                pairs = zip(prompts, texts, strict=True)
                counts = np.sum([compare(engine, at, keep, *pair) for pair in pairs], axis=0)
            print(f"{form:9}{library:13}{keep} kept: {counts[1]} of {counts[0]} are others")


if __name__ == "__main__":
    main()
