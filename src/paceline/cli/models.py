"""`paceline models`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from paceline.cli.console import print_table, print_value, progress_of
from paceline.cli.options import Output, command, group
from paceline.errors import ModelError

if TYPE_CHECKING:
    from paceline.models import Listed

app = group()

_FITS = {True: "yes", False: "no", None: ""}


@command(app)
def models(
    *,
    check: Annotated[bool, Option("--check", help="compare every file's checksum")] = False,
    output: Output,
) -> int:
    """List the models that are here or have a short name."""
    from paceline.models import check_models, list_models
    from paceline.models.cache import megabytes

    if check:
        count = check_models(progress=progress_of(output))
        print_value(output, {"checked": count}, f"{count} prepared models are as they were made")
        return 0
    found = [(model, exactness_of(model)) for model in list_models()]
    if output.json:
        values = [{**asdict(model), "exactness": measured} for model, measured in found]
        print(json.dumps(values, default=str))
        return 0
    rows = [
        [
            model.name,
            megabytes(model.bytes) if model.here else "not here",
            _FITS[model.fits],
            exactness_text(measured),
            model.about,
        ]
        for model, measured in found
    ]
    print_table(["model", "size", "fits memory", "exact here", "about"], rows)
    return 0


def exactness_of(model: "Listed") -> list[dict[str, Any]]:
    """Measured exactness of a model on this machine, as JSON: an entry for each way to run it."""
    from paceline.engines.profile import stored_profiles
    from paceline.models import cache_dir
    from paceline.models.files import open_folder

    if not model.here or model.folder is None:
        return []
    try:
        fingerprint = open_folder(model.folder, model.name).fingerprint
    except ModelError:
        return []
    return [
        {
            "engine": engine,
            "conditions": {name: each.as_dict() for name, each in found.compared.items()},
        }
        for engine, found in stored_profiles(fingerprint, cache_dir() / "measurements")
    ]


def exactness_text(measured: Sequence[Mapping[str, Any]]) -> str:
    """Whether every condition holds that was measured with two rows, in a word or two."""
    exact = [each for each in measured if each["engine"].get("min_rows") != "1"]
    failed = {
        name.replace("_", " ")
        for each in exact
        for name, found in each["conditions"].items()
        if not found["holds"]
    }
    if not exact:
        return "not measured"
    return f"not with another {', '.join(sorted(failed))}" if failed else "yes"
