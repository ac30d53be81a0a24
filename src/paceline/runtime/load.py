"""Loads a model by name or path: finds its files, opens its engine, and joins them in a `Model`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from time import perf_counter
from typing import Never

from paceline.decoding.types import FINAL_NORM
from paceline.drafters import DrafterSpec
from paceline.engines import EngineSettings, check_engine, check_settings, open_engine
from paceline.engines.base import Engine
from paceline.errors import InvalidRequest, did_you_mean
from paceline.models import (
    DEFAULT_MODEL,
    QUIET,
    ModelFiles,
    Progress,
    cache_dir,
    resolve,
    start_templates,
)
from paceline.runtime.drafting import Drafting
from paceline.runtime.exactness import MEASUREMENTS
from paceline.runtime.model import Model
from paceline.runtime.renamed import accept_renamed
from paceline.runtime.request import Defaults, defaults_of

PACKED = "packed"
"""Folder of the cache with copies of weights in an engine's own format."""


@accept_renamed(rows="min_rows", kv="kv_cache_type")
def load(
    name_or_path: str | Path = DEFAULT_MODEL,
    *,
    engine: str = "auto",
    min_rows: int = 2,
    cache_tokens: int | None = None,
    contexts: int = 1,
    parallel: int = 1,
    threads: int | None = None,
    device: str = "auto",
    kv_cache_type: str | None = None,
    compute_units: str | None = None,
    drafters: Sequence[str] = ("auto",),
    generation_config: str = "auto",
    revision: str | None = None,
    keep: bool = False,
    embeddings: bool = False,
    check: Callable[[ModelFiles], object] | None = None,
    progress: Progress = QUIET,
    **unknown: Never,
) -> Model:
    """Load a model; download it first if necessary.

    Args:
        name_or_path: a name (`smollm2-135m`), the path of a GGUF file, a name on the Hugging Face
            Hub (`owner/name`, `owner/name:Q4_K_M`), or an Ollama model.
        engine: `llamacpp`, `mlx`, or that of an installed package, such as `coreml`;
            `auto`: the engine for the model's files, llamacpp for a GGUF file.
        min_rows: minimum rows of a sequence in a forward pass. 2 is exact, 1 is not.
        cache_tokens: KV slots of all sequences together; None: `contexts` full contexts, at most
            2 GiB, or for several contexts a quarter of the machine's memory.
        contexts: see `cache_tokens`; for many requests at once.
        parallel: requests that share forward passes, if the library supports it.
        threads: CPU threads; None: the engine's own choice.
        device: for GGUF files `cpu`, `gpu`, or the name of a llama.cpp device; `auto`: a GPU if
            there is one and the whole model fits into its memory.
        kv_cache_type: `q8_0`: keys and values in half the memory; None: the library's own.
        compute_units: on macOS the devices for Core ML: `all`, `cpu-only`, `cpu-and-gpu` or
            `cpu-and-ne`, the default.
        drafters: drafters of later requests, opened now; others may open the engine again.
        generation_config: `auto`: options missing in a request come from the registry, else
            from the model's own files; `none`: from neither, which is greedy.
        revision: branch, tag or commit of a model on the Hugging Face Hub; None: the main branch.
        keep: save the tokens of answers in the cache folder, for all processes of this user, and
            draft later answers from them; `Model.flush` waits until they are counted.
        embeddings: open the engine for `Model.embed`, which otherwise opens it again.
        check: called with the model's files before its engine is opened; an error it raises ends
            the load.
        progress: receives the progress of long work.
        unknown: raises an error, which suggests a similar setting.

    Raises:
        ModelNotFound: there is no such model.
        ModelError: it cannot be downloaded, read or run.
        InvalidRequest: a setting is out of range.
    """
    started = perf_counter()
    for name in unknown:
        hint = did_you_mean(name, [one for one in signature(load).parameters if one != "unknown"])
        raise InvalidRequest(f"load has no setting {name!r}; {hint}see help(paceline.load)")
    if generation_config not in ("auto", "none"):
        raise InvalidRequest(f"generation_config is {generation_config!r}; expected auto or none")
    settings = EngineSettings(
        cache_tokens=cache_tokens,
        contexts=contexts,
        parallel=parallel,
        min_rows=min_rows,
        threads=threads,
        device=device,
        kv_cache_type=kv_cache_type,
        compute_units=compute_units,
        measurements=cache_dir() / MEASUREMENTS,
        packed=cache_dir() / PACKED,
        progress=progress,
    )
    if engine != "auto":  # before anything is downloaded
        check_engine(engine)
        check_settings(engine, settings)
    files = resolve(str(name_or_path), progress=progress, engine=engine, revision=revision)
    if files.chat_template is not None:
        start_templates()  # ready when the tokenizer is
    _ = files.tokenizer  # read now rather than with the first prompt
    if check is not None:
        check(files)

    def open_with(taps: tuple[int, ...]) -> Engine:
        tapped = replace(settings, taps=taps)
        return open_engine(files.engine, files.path, files.context_length, tapped)

    drafting = Drafting(files, progress, keep=keep)
    specs = [DrafterSpec.parse(name) for name in drafters]
    taps = drafting.prepare(specs)
    if embeddings and files.facts.pooling is not None:
        taps.add(FINAL_NORM)
    defaults = defaults_of(files) if generation_config == "auto" else Defaults()
    opened = open_with(tuple(sorted(taps)))
    if min_rows < 2 and (fault := getattr(opened, "single_row_fault", "")):
        raise InvalidRequest(fault)
    model = Model(files, opened, defaults=defaults, drafting=drafting, open_with=open_with)
    for spec in specs:  # else opening counts as time to the first token
        drafting.open(spec)
    model.load_seconds = perf_counter() - started
    return model


def packed_copies(weights: Iterable[Path]) -> list[Path]:
    """Return the packed copies of GGUF files, and the files that name their sources."""
    names = {bytes(path) for path in weights} | {bytes(path.resolve()) for path in weights}
    sources = (cache_dir() / PACKED).glob("*.source")
    copies = [path for path in sources if path.read_bytes() in names]
    return [part for path in copies for part in (path.with_suffix(".gguf"), path)]
