"""`paceline models`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Option

from paceline.cli.console import json_text, print_table, print_value, progress_of
from paceline.cli.options import Output, command, default_model
from paceline.errors import ModelError

if TYPE_CHECKING:
    from paceline.drafters import HeadFacts
    from paceline.models import ModelEntry


_FITS = {True: "yes", False: "no", None: ""}


@command(examples=("paceline models", "paceline models --check"))
def models(
    *,
    check: Annotated[bool, Option("--check", help="compare every file's checksum")] = False,
    output: Output,
) -> int:
    """List installed models, and others by name."""
    from paceline.models import check_models, list_models

    if check:
        count = check_models(progress=progress_of(output))
        print_value(output, {"checked": count}, f"prepared models as they were made: {count}")
        return 0
    listed = [measured(model) for model in list_models()]
    pairs = [(model, exactness_of(model)) for model in listed]
    drafters = [*heads([model for model in listed if model.here])]
    if output.json:
        values = [
            {**asdict(model), "exactness": measured, "head": None} for model, measured in pairs
        ]
        print(json_text([*values, *map(_as_model, drafters)]))
        return 0
    _print_models(pairs, drafters)
    return 0


def measured(model: "ModelEntry") -> "ModelEntry":
    """Return a model with its size on disk, derived files included, and its device."""
    from paceline.engines.llamacpp.libraries import device_for
    from paceline.models import removal_of
    from paceline.runtime.load import packed_copies

    if not model.here and model.folder is None:
        return model
    size = removal_of([model]).with_paths(packed_copies).bytes_on_disk
    file = model.file or next(iter(model.folder.glob("*.gguf") if model.folder else ()), None)
    return replace(model, bytes=size, device=device_for(file) if file else None)


def _print_models(
    pairs: Sequence[tuple["ModelEntry", Sequence[Mapping[str, Any]]]], heads: Sequence["_Head"]
) -> None:
    from paceline.storage.files import megabytes

    default = default_model()

    def label(name: str) -> str:
        return f"{name} (default)" if name.partition("@")[0] == default else name

    def row(head: "_Head") -> list[str]:
        beside = "  + " if head.models else ""
        return [beside + head.listed.name, megabytes(head.listed.bytes), "", "", "", head.about]

    here = {model.name.partition("@")[0] for model, _ in pairs if model.here}
    rows = []
    for model, measured in pairs:
        if model.here or model.folder is not None:
            size, context = megabytes(model.bytes), str(model.context_length or "")
            exact = exactness_text(measured)
            fits = f"{_FITS[model.fits]}, {model.device}" if model.device else _FITS[model.fits]
            rows.append([label(model.name), size, context, fits, exact, model.about])
            rows += [row(head) for head in heads if model.name in head.models]
    rows += [row(head) for head in heads if not head.models]
    if rows:
        print_table(["model", "size", "context", "fits memory", "exact here", "about"], rows)
    absent = [
        [label(model.name), megabytes(model.to_fetch), _FITS[model.fits], model.about]
        for model, _ in pairs
        if not model.here and model.folder is None and model.name not in here
    ]
    if absent:
        print_table(["paceline pull", "to fetch", "fits memory", "about"], absent, gap=bool(rows))


class _Head(NamedTuple):
    """A drafter in the Hugging Face Hub's cache."""

    listed: "ModelEntry"
    models: Sequence[str]
    """Installed models of matching sizes."""
    facts: "HeadFacts | None" = None
    """Facts of the drafter; None: it cannot be read."""
    fault: str = ""
    """The error if it cannot be read."""

    @property
    def about(self) -> str:
        if (facts := self.facts) is None:
            return self.fault
        layers = f"{facts.layers} layers, " if facts.layers else ""
        sizes = f" for {layers}hidden size {facts.hidden_size} and {facts.vocab_size} tokens"
        use = f"--drafter {facts.kind}:{self.listed.name}"
        return f"{facts.form}{'' if self.models else sizes}: {use}"


def heads(models: Sequence["ModelEntry"]) -> Iterator[_Head]:
    """Yield the installed drafters, each with the listed models that it is for."""
    from paceline.drafters import read_facts
    from paceline.models import list_drafters
    from paceline.models.published import fits

    for listed in list_drafters():
        path = listed.file or listed.folder
        assert path is not None
        try:
            facts = read_facts(path)
        except ModelError as error:
            yield _Head(listed, (), fault="; ".join(str(error).split("\n")))
            continue
        if facts is not None:
            paths = {model.name: model.file if listed.file else model.folder for model in models}
            names = [name for name, path in paths.items() if path and fits(facts, path)]
            yield _Head(listed, names, facts)


def _as_model(head: _Head) -> dict[str, Any]:
    """Return a drafter in the list of models, as JSON."""
    facts = None if head.facts is None else head.facts._asdict()
    of_head = {"facts": facts, "fault": head.fault, "models": head.models}
    return {**asdict(head.listed), "about": head.about, "exactness": [], "head": of_head}


def exactness_of(model: "ModelEntry") -> list[dict[str, Any]]:
    """Return a model's measured exactness on this machine, as JSON: one entry per configuration."""
    from paceline.models import open_folder
    from paceline.runtime.exactness import stored_exactness

    if not model.here or model.folder is None:
        return []
    try:
        fingerprint = open_folder(model.folder, model.name).fingerprint
    except ModelError:
        return []
    return stored_exactness(fingerprint)


def exactness_text(measured: Sequence[Mapping[str, Any]]) -> str:
    """Return whether every condition measured with two rows holds, in a word or two."""
    exact = [profile for profile in measured if profile["engine"].get("min_rows") != "1"]
    failed = {
        name.replace("_", " ")
        for profile in exact
        for name, compared in profile["conditions"].items()
        if not compared["holds"]
    }
    if not exact:
        return "not measured"
    return f"not with another {', '.join(sorted(failed))}" if failed else "yes"
