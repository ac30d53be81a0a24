"""What the drafters of all requests to a model share, and a draft model beside its target."""

from collections.abc import Callable

from paceline import drafters as drafting
from paceline.decoding.costs import CostTable
from paceline.drafters import DrafterResources, DraftModel
from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.engines.costs import StoredCosts, measure, warm_up
from paceline.errors import ModelError
from paceline.models import ModelFiles, Progress, cache_dir, resolve, resolve_drafter
from paceline.runtime.exactness import MEASUREMENTS
from paceline.runtime.learnt import installed_drafters


def drafter_resources(files: ModelFiles, progress: Progress) -> DrafterResources:
    """Return what the drafters of all requests to a model share."""
    shipped = drafting.shipped(files.name, files.path, files.engine)
    return DrafterResources(
        target=files.name,
        engine=files.engine,
        files=files.path,
        shipped=shipped | installed_drafters(files),
        find=lambda name: resolve_drafter(name, progress),
    )


def warmed_up(engine: Engine, progress: Progress) -> Engine:
    """Return the engine, after the calls that pack its weights; otherwise the first token waits."""
    if engine.warm_rows:
        with progress.task("packing weights", len(engine.warm_rows), unit="calls") as update:
            warm_up(engine, engine.warm_rows, update)
    return engine


def draft_files(name: str, target: ModelFiles, progress: Progress) -> ModelFiles:
    """Return the files of another model to draft with. Raises ModelError if it cannot draft."""
    files = resolve(name, progress=progress)
    ours, theirs = target.tokenizer().vocabulary, files.tokenizer().vocabulary
    if ours != theirs:
        differing = sum(theirs.get(token) != number for token, number in ours.items())
        raise ModelError(
            f"{files.name} cannot draft for {target.name}: {differing} of {len(ours)} "
            f"tokens are not the same, and it has {len(theirs)}"
        )
    return files


def open_draft_model(
    name: str,
    target: ModelFiles,
    slots: int,
    target_cost: Callable[[], CostTable],
    progress: Progress,
) -> DraftModel:
    """Open another model to draft with.

    Args:
        name: the draft model's name or path.
        target: the model that it drafts for.
        slots: KV slots of the target: all requests of a batch draft at once.
        target_cost: returns the seconds of the target's calls.
        progress: gets the progress of long work.

    Raises:
        ModelError: its vocabulary is not the target's.
    """
    files = draft_files(name, target, progress)
    settings = EngineSettings(min_rows=1, cache_tokens=max(files.context_length, slots))
    opened = open_engine(files.engine, files.path, files.context_length, settings)
    engine = warmed_up(opened, progress)
    folder = cache_dir() / MEASUREMENTS
    costs = StoredCosts(engine, files.fingerprint, files.weights_bytes, folder)
    if not costs.known:  # nobody else runs it, and its drafts are asked for by what they cost
        measure(engine, costs)
        costs.store()
    cost = costs.table()
    worth = min(cost(1) / target_cost()(1), 1.0)
    return DraftModel(engine, cost, worth, slots=engine.free_slots)
