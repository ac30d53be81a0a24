"""The commands that measure and check: bench, verify, plan.

As in `cli.py`: each parses, calls, prints. What they call is imported when they run.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.cli.console import (
    check_writable,
    load_model,
    named,
    print_report,
    print_value,
    progress_of,
)
from paceline.errors import InvalidRequest, ModelError

if TYPE_CHECKING:
    from paceline.models import Listed


def exactness_of(model: "Listed") -> list[dict[str, Any]]:
    """What was measured of a model on this machine: an entry for each way to run it, as JSON."""
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


def exact_in_words(measured: Sequence[Mapping[str, Any]]) -> str:
    """Whether all that was measured with two rows holds; in a word or two."""
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


def bench_run(options: argparse.Namespace) -> int:
    """`bench run`."""
    from paceline.tools.bench.run.command import bench_run as run

    check_writable(options.output)
    report = run(
        lambda rows: load_model(options, rows=rows),
        suite=options.suite,
        kinds=options.kind or [],
        per_kind=options.per_kind,
        limit=options.limit,
        drafters=options.drafter or ["auto"],
        policy=options.policy,
        rounds=options.rounds,
        max_tokens=options.max_tokens,
        output=options.output,
        progress=progress_of(options),
    )
    return print_report(report, options)


def bench_sweep(options: argparse.Namespace) -> int:
    """`bench sweep`."""
    from paceline.tools.bench.sweep.command import bench_sweep as sweep

    check_writable(options.output)
    report = sweep(
        lambda: load_model(options),
        lengths=options.length or [],
        depths=options.depth or [],
        kinds=options.kind or [],
        drafters=options.drafter or [],
        policies=options.policy or [],
        blocks=options.block or [],
        temperatures=options.temperature or [],
        **named(options, "text", "suite", "per_kind", "seed", "rounds", "max_tokens", "output"),
        progress=progress_of(options),
    )
    return print_report(report, options)


def bench_compare(options: argparse.Namespace) -> int:
    """`bench compare`."""
    from paceline.tools.bench.compare import bench_compare as compare

    report = compare(options.results, measure=options.measure, anyway=options.anyway)
    return print_report(report, options)


def bench_report(options: argparse.Namespace) -> int:
    """`bench report`."""
    from paceline.tools.bench.report.command import bench_report as report

    made = report(options.results, options.output)
    print_value(options, {"written": [str(path) for path in made]}, "\n".join(map(str, made)))
    return 0


def bench_simulate(options: argparse.Namespace) -> int:
    """`bench simulate`."""
    from paceline.models import resolve
    from paceline.tools.bench.simulate.check import bench_simulate_check as measure
    from paceline.tools.bench.simulate.command import bench_simulate as simulate

    if bool(options.texts) == options.measure:
        raise InvalidRequest("bench simulate needs either --texts, or --measure")
    check_writable(options.output)
    settings = {
        **named(options, "model"),
        "drafters": options.drafter or [],
        "policies": options.policy or [],
        "blocks": options.block or [],
        "progress": progress_of(options),
    }
    if options.measure:
        asked = named(options, "suite", "per_kind", "rounds", "max_tokens", "output")
        report = measure(lambda: load_model(options), kinds=options.kind or [], **asked, **settings)
    else:
        report = simulate(
            lambda: load_model(options),
            lambda: resolve(options.model, progress=progress_of(options)),
            **named(options, "texts", "raw", "prompt_tokens", "cost", "carry"),
            **settings,
        )
    return print_report(report, options)


def bench_trace(options: argparse.Namespace) -> int:
    """`bench trace`."""
    from paceline.tools.bench.trace.command import bench_trace as trace
    from paceline.tools.bench.trace.command import show

    check_writable(options.output)
    found, recorded = trace(options.trace, options.output)
    if options.json:
        print_value(options, found, "")
    elif options.output is not None:
        print_value(options, found, str(options.output))
    else:
        show(recorded)
    return 0


def bench_peers(options: argparse.Namespace) -> int:
    """`bench peers`."""
    from paceline.tools.bench.peers.command import bench_peers as peers
    from paceline.tools.bench.peers.server import Access

    check_writable(options.output)
    report = peers(
        lambda: load_model(options),
        peers=options.peer or [],
        access=Access(options.served_model, options.api_key, options.plain, options.speculation),
        draft=options.draft_model,
        kinds=options.kind or [],
        **named(options, "threads", "suite", "per_kind", "rounds", "max_tokens", "output"),
        progress=progress_of(options),
    )
    return print_report(report, options)


def bench_serve(options: argparse.Namespace) -> int:
    """`bench serve`."""
    from paceline.tools.bench.serve.command import bench_serve as serve

    check_writable(options.output)
    report = serve(
        **named(options, "url", "model", "requests", "suite", "max_tokens", "extra"),
        key=options.api_key,
        clients=options.clients or ([] if options.rate else [1, 8]),
        rates=options.rate or [],
        kinds=options.kind or [],
        progress=progress_of(options),
    )
    return print_report(report, options)


def verify(options: argparse.Namespace) -> int:
    """`verify`."""
    from paceline.tools.bench.verify.command import verify as run

    check_writable(options.output)
    report = run(
        lambda: load_model(options),
        suite=options.suite,
        max_tokens=options.max_tokens,
        whole=options.whole,
        drafters=options.drafter or [],
        output=options.output,
        progress=progress_of(options),
    )
    return print_report(report, options)


def plan(options: argparse.Namespace) -> int:
    """`plan`."""
    from paceline.tools.bench.plan.command import plan as run

    check_writable(options.output)
    return print_report(run(load_model(options), again=options.again), options)
