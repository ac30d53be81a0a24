"""`paceline models`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Option

from paceline.cli.console import print_table, print_value, progress_of
from paceline.cli.options import Output, command, default_model, group
from paceline.errors import ModelError

if TYPE_CHECKING:
    from paceline.drafters.networks.target import TargetSizes
    from paceline.models import Listed

app = group()

_FITS = {True: "yes", False: "no", None: ""}


@command(app, examples=("paceline models", "paceline models --check"))
def models(
    *,
    check: Annotated[bool, Option("--check", help="compare every file's checksum")] = False,
    head: Annotated[
        str | None,
        Option("--head", metavar="PATH|NAME", help="which models here a head for drafting fits"),
    ] = None,
    output: Output,
) -> int:
    """List the models that are here, and others by name.

    Also heads for drafting in the hub's cache.
    """
    from paceline.models import check_models, list_models

    if check:
        count = check_models(progress=progress_of(output))
        print_value(output, {"checked": count}, f"{count} prepared models are as they were made")
        return 0
    listed = [_measured(model) for model in list_models()]
    if head is not None:
        return _print_fits(head, listed, output)
    pairs = [(model, exactness_of(model)) for model in listed]
    heads = _heads(_cached_heads(), listed)
    if output.json:
        values = [
            {**asdict(model), "exactness": measured, "head": None} for model, measured in pairs
        ]
        print(json.dumps([*values, *map(_as_model, heads)], default=str))
        return 0
    _print_models(pairs, heads)
    return 0


def _measured(model: "Listed") -> "Listed":
    """A model with the size that it has on this disk, with what was made of it."""
    from paceline.models import removal_of
    from paceline.runtime.load import packed_copies

    if not model.here and model.folder is None:
        return model
    return replace(model, bytes=removal_of([model]).with_paths(packed_copies).bytes_on_disk)


def _print_models(
    pairs: Sequence[tuple["Listed", Sequence[Mapping[str, Any]]]], heads: Sequence["_Head"]
) -> None:
    from paceline.storage.files import megabytes

    def form_of(name: str) -> str:
        """The short name of which this one is a form, with other weights."""
        return name.partition("@")[0]

    default = default_model()
    here = {form_of(model.name) for model, _ in pairs if model.here}
    rows = [
        [
            f"{model.name} (default)" if form_of(model.name) == default else model.name,
            megabytes(model.bytes),
            "" if model.context_length is None else str(model.context_length),
            _FITS[model.fits],
            exactness_text(measured),
            model.about,
        ]
        for model, measured in pairs
        if model.here or model.folder is not None
    ]
    for head in heads:
        fitting = ", ".join(head.fits) or "no model that is here"
        about = (
            head.fault or f"{head.form} head for {fitting}: --drafter {head.drafter}:{head.name}"
        )
        rows.append([head.name, megabytes(head.bytes), "", "", "", about])
    if rows:
        print_table(["model", "size", "context", "fits memory", "exact here", "about"], rows)
    absent = [
        [
            f"{model.name} (default)" if model.name == default else model.name,
            megabytes(model.to_fetch),
            _FITS[model.fits],
            model.about,
        ]
        for model, _ in pairs
        if not model.here and model.folder is None and model.name not in here
    ]
    if absent:
        print_table(["paceline pull", "to fetch", "fits memory", "about"], absent, gap=bool(rows))


class _Head(NamedTuple):
    """A head and the models here that it fits."""

    name: str
    folder: Path
    bytes: int
    form: str = ""
    drafter: str = ""
    fits: Sequence[str] = ()
    others: Mapping[str, str] = MappingProxyType({})
    """Model that it does not fit -> why, in a line."""
    fault: str = ""
    """Why it cannot be read; empty: it can."""


def _cached_heads() -> list[tuple[str, Path]]:
    from paceline.drafters.heads import is_head
    from paceline.models import cached_drafters

    return [(name, folder) for name, folder in cached_drafters() if is_head(folder)]


def _heads(folders: Sequence[tuple[str, Path]], listed: Sequence["Listed"]) -> list[_Head]:
    """Compare heads, by name, with every model that is here."""
    shapes = {model.name: _shape_of(model) for model in listed} if folders else {}
    return [_head_of(name, folder, shapes) for name, folder in folders]


def _head_of(name: str, folder: Path, shapes: Mapping[str, "TargetSizes | None"]) -> _Head:
    from paceline.drafters.heads import misfit, read_facts

    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    try:
        facts = read_facts(folder)
    except ModelError as error:
        return _Head(name, folder, size, fault="; ".join(str(error).split("\n")))
    whys = {
        model: misfit(folder, facts, shape) for model, shape in shapes.items() if shape is not None
    }
    fits = [model for model, why in whys.items() if why is None]
    others = {model: why for model, why in whys.items() if why is not None}
    return _Head(name, folder, size, facts.form, facts.drafter, fits, others)


def _shape_of(model: "Listed") -> "TargetSizes | None":
    """Sizes of a model that is here; None: it cannot be read."""
    from paceline.drafters.networks.target import sizes_of
    from paceline.models import open_folder

    path = model.file
    try:
        if path is None and model.here and model.folder is not None:
            path = open_folder(model.folder, model.name).path
        return None if path is None else sizes_of(path)
    except ModelError:
        return None


def _as_model(head: _Head) -> dict[str, Any]:
    """A head in the list of models, as JSON."""
    from paceline.models import Listed

    about = {"form": head.form, "drafter": head.drafter, "fits": head.fits, "fault": head.fault}
    return {
        **asdict(Listed(head.name, True, f"{head.form} head", head.folder, head.bytes)),
        "exactness": [],
        "head": about,
    }


def _print_fits(name: str, listed: Sequence["Listed"], output: Output) -> int:
    """Print which of the models that are here a head fits, and why the others are not for it."""
    from paceline.models import resolve_drafter

    folder = resolve_drafter(name, progress_of(output))
    (head,) = _heads([(name, folder)], listed)
    if head.fault:
        raise ModelError(head.fault)
    if output.json:
        print(json.dumps({"name": name, **_as_model(head)["head"], "others": dict(head.others)}))
        return 0
    print(f"{name} is a {head.form} head, for --drafter {head.drafter}:{name}")
    for model in head.fits:
        print(f"fits {model}")
    for model, why in head.others.items():
        print(f"not {model}: {why.split(': ', 1)[-1]}")
    return 0


def exactness_of(model: "Listed") -> list[dict[str, Any]]:
    """Measured exactness of a model on this machine, as JSON: an entry for each way to run it."""
    from paceline.models import open_folder
    from paceline.runtime.profile import stored_exactness

    if not model.here or model.folder is None:
        return []
    try:
        fingerprint = open_folder(model.folder, model.name).fingerprint
    except ModelError:
        return []
    return stored_exactness(fingerprint)


def exactness_text(measured: Sequence[Mapping[str, Any]]) -> str:
    """Whether every condition holds that was measured with two rows, in a word or two."""
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
