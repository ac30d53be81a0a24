"""The drafters of a model's answers: shared resources, learned statistics, and files.

`load` makes one `Drafting` for each model. Only this module resolves `auto` to drafters.

`paceline learn` makes drafters for a model. For each format of its weights, a small file names the
drafters that `auto` uses; one rename replaces it. The folder of a model has their sources, and
belongs to the learner.

Invariants: learning changes the drafts, never a token of an answer; a missing or corrupt file is
ignored, and ends no answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from paceline import drafters
from paceline.decoding.auto import Acceptance
from paceline.decoding.costs import CostTable
from paceline.drafters import (
    AnswerHistory,
    DrafterResources,
    DrafterSpec,
    DraftKV,
    DraftModel,
    Fault,
    GuardedDrafter,
    Probe,
    RequestContext,
)
from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.engines.costs import StoredCosts, measure
from paceline.errors import ModelError
from paceline.models import QUIET, ModelFiles, Progress, cache_dir, resolve, resolve_drafter
from paceline.models.published import Installed
from paceline.runtime.answer import Answer, AnswerRequest
from paceline.runtime.exactness import MEASUREMENTS
from paceline.runtime.kept import FOLDER, KeptAnswers, Stored, model_named_in
from paceline.runtime.request import Request, RequestDrafters
from paceline.storage.files import read_json, write_json
from paceline.storage.manifest import MANIFEST

HEADER = "learnt.json"
"""Names the model of a learner's folder."""

_LEARNED, _INSTALLED = "learnt", "installed"


class Drafting:
    """The drafters of all requests to one model."""

    def __init__(
        self, files: ModelFiles, progress: Progress = QUIET, *, keep: bool = False
    ) -> None:
        """Open nothing yet; `use` comes before the first answer. `keep`: see `KeptAnswers`."""
        self.files, self.progress = files, progress
        self.kept: KeptAnswers | None = None
        self.acceptance = Acceptance()  # of earlier answers' drafts
        self.resources = DrafterResources(
            target=files.name,
            engine=files.engine,
            files=files.path,
            shipped=drafters.shipped(files.name, files.path, files.engine)
            | installed_drafters(files),
            find=lambda name: resolve_drafter(name, progress, gguf=files.engine == "llamacpp"),
            open_model=self._open_model,
        )
        self.published = Installed(files, progress)
        self._keeps = keep
        self._cost: Callable[[], CostTable] | None = None
        self._slots = 0

    def use(self, engine: Engine, cost: Callable[[], CostTable]) -> None:
        """Draft for an engine, whose weights heads share; `cost` returns its forward-pass costs."""
        self._cost = cost
        if self.resources.opened is engine:
            return
        self.resources.opened, self.resources.heads = engine, {}
        self.resources.vocab_size, self._slots = engine.vocab_size, engine.free_slots
        if self._keeps and self.kept is None:
            name, fingerprint = self.files.name, self.files.fingerprint
            folder = cache_dir() / FOLDER
            self.kept = KeptAnswers(name, fingerprint, engine.vocab_size, self.progress, folder)

    def without_history(self) -> "Drafting":
        """Return another with the same drafters open, and without learned statistics or history."""
        other = Drafting(self.files, self.progress)
        other.resources = replace(self.resources, history=AnswerHistory())
        other.published = self.published
        return other

    def resolve(
        self, spec: DrafterSpec, *, private: bool = True, prediction: bool = False
    ) -> DrafterSpec:
        """Replace `auto` with this model's drafters; `private`: without the answer history.

        If the answer has a `prediction`, its drafter comes first.
        """
        published = self.published.specs(self.resources) if spec.auto else ()
        kinds = {*self.resources.shipped, *published}
        if self.kept is not None and self.kept.text is not None and not private:
            kinds.add("kept")
        return spec.resolve(kinds, prediction=prediction)

    def prepare(self, specs: Sequence[DrafterSpec]) -> set[int]:
        """Find the files of drafters; return the layers whose hidden states they read.

        Raises InvalidRequest if this model does not have such a drafter, and ModelError if one
        cannot be found or read, or does not fit the model.
        """
        resolved = [self.resolve(spec) for spec in specs]
        for part in (part for spec in resolved for part in spec.parts):
            if part.kind == "model":
                _draft_files(part.name, self.files, self.progress)
        return {tap for spec in resolved for tap in drafters.taps(spec, self.resources)}

    def open(self, spec: DrafterSpec) -> None:
        """Read and compile a drafter's files. Raises as `prepare` does."""
        for opened in drafters.create(self.resolve(spec), self.resources):
            opened.close()

    def taps(self, request: Request) -> set[int]:
        """Return the layers whose hidden states a request's drafters read. Raises ModelError."""
        specs = filter(None, (request.drafter, request.probe))
        return {tap for spec in specs for tap in drafters.taps(spec, self.resources)}

    def slots(self, drafter: DrafterSpec) -> int | None:
        """Return the KV slots of the drafter's own model, for all requests; None if not open."""
        return drafters.slots(drafter, self.resources)

    def of_request(self, queued: AnswerRequest, memory: DraftKV, fault: Fault) -> RequestDrafters:
        """Make the drafters of a request, and their policy; see `Model._open_answer`."""
        request, prompt_length = queued.request, len(queued.tokens)
        kept = None if self.kept is None or request.private else self.kept.text
        alone = RequestContext(prompt_length=prompt_length, sampling=request.sampling, kept=kept)
        prediction = request.prediction[: self.resources.opened.context_length]
        context = replace(alone, kv=memory, prediction=prediction)
        asked = drafters.create(request.drafter, self.resources, context)
        guarded = [GuardedDrafter(drafter, fault) for drafter in asked]
        watched = drafters.create(request.probe or DrafterSpec(), self.resources, alone)
        probes = [Probe(drafter, request.max_block - 1) for drafter in watched]
        acceptance = self.acceptance.discounted()
        policy = request.policy_for(queued.model.costs.table, acceptance, prompt_length)
        return RequestDrafters(guarded, probes, policy, acceptance)

    def learn(self, answer: Answer) -> None:
        """Learn from an answer that has ended, for the drafts of later ones."""
        self.acceptance = answer.drafters.acceptance
        assert answer.result is not None
        if answer.request.drafter.uses_earlier_answers:
            self.resources.history.add(answer.result.token_ids)
        if self.kept is not None and not answer.request.private and not answer.failed:
            self.kept.add(answer.result)

    def _open_model(self, name: str) -> DraftModel:
        """Open another model to draft with. Raises ModelError if its vocabulary differs."""
        assert self._cost is not None
        files = _draft_files(name, self.files, self.progress)
        # All requests of a batch draft at once.
        cache_tokens = max(files.context_length, self._slots)
        settings = EngineSettings(min_rows=1, cache_tokens=cache_tokens)
        engine = open_engine(files.engine, files.path, files.context_length, settings)
        folder = cache_dir() / MEASUREMENTS
        costs = StoredCosts(engine, files.fingerprint, files.weights_bytes, folder)
        if not costs.is_known:  # no answer runs it alone, and the policy needs its costs
            measure(engine, costs)
            costs.store()
        cost = costs.table()
        worth = min(cost(1) / self._cost()(1), 1.0)
        return DraftModel(engine, cost, worth, slots=engine.free_slots)


def _draft_files(name: str, target: ModelFiles, progress: Progress) -> ModelFiles:
    """Return the files of another model to draft with. Raises ModelError if it cannot draft."""
    files = resolve(name, progress=progress)
    ours, theirs = target.tokenizer.vocabulary, files.tokenizer.vocabulary
    if ours != theirs:
        differing = sum(theirs.get(token) != number for token, number in ours.items())
        raise ModelError(
            f"{files.name} cannot draft for {target.name}: {differing} of {len(ours)} "
            f"tokens are not the same, and it has {len(theirs)}"
        )
    return files


def learned_dir() -> Path:
    return cache_dir() / _LEARNED


def installed_drafters(files: ModelFiles) -> dict[str, Path]:
    """Return kind -> folder of the installed drafters that were learned for a model."""
    # A forgotten drafter's folder is gone; heads that earlier versions made have no manifest.
    return {kind: path for kind, path in _installed(files).items() if (path / MANIFEST).is_file()}


def install(files: ModelFiles, kind: str, folder: Path) -> None:
    """Let `auto` use the drafter in `folder`, in place of one of its kind. Raises OSError."""
    path = _index(files.fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    folders = {kind: str(folder) for kind, folder in {**_installed(files), kind: folder}.items()}
    write_json(path, {"model": files.name, "drafters": folders})


def _installed(files: ModelFiles) -> dict[str, Path]:
    try:
        drafters = read_json(_index(files.fingerprint))["drafters"]
        return {str(kind): Path(folder) for kind, folder in drafters.items()}
    except (ModelError, AttributeError, KeyError, TypeError):
        return {}


def _index(fingerprint: str) -> Path:
    return learned_dir() / _INSTALLED / f"{fingerprint[:24]}.json"


def all_learned() -> list[Stored]:
    """Return the learned drafters of each model, by the model's name."""
    folders = [
        path for path in learned_dir().glob("*") if path.name != _INSTALLED and path.is_dir()
    ]
    headers = {folder: folder / HEADER for folder in sorted(folders)}
    headers |= {path: path for path in sorted((learned_dir() / _INSTALLED).glob("*.json"))}
    paths: dict[str, list[Path]] = {}
    for path, header in headers.items():
        paths.setdefault(model_named_in(header), []).append(path)
    return [Stored(model, tuple(paths[model])) for model in sorted(paths)]


def learned_of(model: str) -> list[Path]:
    """Return the paths of a model's learned drafters; its name is case-insensitive."""
    named = (learnt for learnt in all_learned() if learnt.model.casefold() == model.casefold())
    return [path for learnt in named for path in learnt.paths]
