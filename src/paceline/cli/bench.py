"""`paceline bench`: measurements."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from paceline.cli import declare, numbers
from paceline.cli.console import (
    check_writable,
    load_model,
    obey_offline,
    print_report,
    print_value,
    progress_of,
)
from paceline.cli.options import (
    ApiKey,
    MaxTokens,
    ModelOptions,
    Output,
    ResultFile,
    Seed,
    Suite,
    command,
    group,
)
from paceline.errors import InvalidRequest
from paceline.tools.measurement import Contenders, Measurement, ServerLoad

if TYPE_CHECKING:
    from paceline.runtime.model import Model

app = group("Measure.")

Drafters = Annotated[
    list[str], declare.several("--drafter", help="a drafter; may be repeated; default: auto")
]
Kinds = Annotated[
    list[str], declare.several("--kind", help="only this kind of prompt; may be repeated")
]
Results = Annotated[list[Path], Argument(parser=Path, metavar="FILE", help="JSON of `bench ...`")]
Rounds = Annotated[int, declare.count(help="repetitions of each measurement")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderArguments(Contenders):
    """Drafters and policies on the command line."""

    drafters: Drafters
    policies: Annotated[
        list[str],
        declare.several(
            "--policy",
            help="auto, fixed, adaptive or kelly, or with rows: fixed:8; may be repeated",
        ),
    ]
    blocks: Annotated[
        list[int],
        declare.several(
            "--block", parser=numbers.BLOCK, help="rows, for policies without them; may be repeated"
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementArguments(Measurement):
    """What is measured, on the command line."""

    rounds: Rounds = 3
    kinds: Kinds
    per_kind: Annotated[
        int | None, declare.count(help="only N prompts of each kind", metavar="N")
    ] = None
    suite: Suite = None
    max_tokens: MaxTokens = 128
    output: ResultFile = None

    def __post_init__(self) -> None:
        check_writable(self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepArguments(MeasurementArguments):
    """A measurement with the defaults of a sweep."""

    rounds: Rounds = 5
    per_kind: Annotated[
        int | None, declare.count(help="with --depth: N of each kind; default: 1")
    ] = None
    max_tokens: MaxTokens = 80


@command(app)
def run(
    *,
    drafter: Drafters,
    policy: Annotated[str, Option(help="auto, fixed, adaptive or kelly")] = "auto",
    limit: Annotated[
        int | None,
        declare.count(
            metavar="N",
            help="only N prompts: the same number of each kind, spread evenly over the file",
        ),
    ] = None,
    temperature: Annotated[float, Option(parser=numbers.TEMPERATURE, help="0 is greedy")] = 0.0,
    seed: Seed = 0,
    measurement: MeasurementArguments,
    model: ModelOptions,
    output: Output,
) -> int:
    """Compare drafters with plain decoding on a suite."""
    from paceline.tools.bench.run.command import bench_run

    report = bench_run(
        lambda rows: load_model(model, output, drafters=drafter, rows=rows),
        measurement,
        limit=limit,
        temperature=temperature,
        seed=seed,
        drafters=drafter or ["auto"],
        policy=policy,
        progress=progress_of(output),
    )
    return print_report(report, output, measurement.output)


@command(app)
def sweep(
    *,
    length: Annotated[
        list[Any],
        declare.several(
            parser=numbers.WholeOr(1, "max", "max", "max"),
            metavar="TOKENS",
            help="tokens of a text of code, or max; may be repeated; "
            "default: 100, 200, 372, 800, 1600, ... max",
        ),
    ],
    depth: Annotated[
        list[Any],
        declare.several(
            parser=numbers.WholeOr(0, "max", "max", "max"),
            metavar="TOKENS",
            help="tokens before the suite's questions instead, or max; may be repeated",
        ),
    ],
    temperature: Annotated[
        list[float],
        declare.several(parser=numbers.TEMPERATURE, help="may be repeated; default: greedy"),
    ],
    contenders: ContenderArguments,
    text: Annotated[
        Path | None, declare.file(help="repeat this text instead of paceline's own")
    ] = None,
    seed: Seed = 0,
    measurement: SweepArguments,
    model: ModelOptions,
    output: Output,
) -> int:
    """Compare by prompt length, or by context depth, and more."""
    from paceline.tools.bench.sweep.command import bench_sweep

    report = bench_sweep(
        lambda: load_model(model, output, drafters=contenders.drafters),
        contenders,
        measurement,
        lengths=length,
        depths=depth,
        temperatures=temperature,
        text=text,
        seed=seed,
        progress=progress_of(output),
    )
    return print_report(report, output, measurement.output)


@command(app)
def compare(
    *,
    results: Results,
    measure: Annotated[str, Option(help="the measure to compare")] = "ratio",
    anyway: Annotated[
        bool, Option("--anyway", help="also with another model or other prompts")
    ] = False,
    output: Output,
) -> int:
    """Put recorded results side by side."""
    from paceline.tools.bench.compare import bench_compare

    return print_report(bench_compare(results, measure=measure, anyway=anyway), output)


@command(app)
def report(
    *,
    results: Annotated[
        list[Path], Argument(parser=Path, metavar="FILE", help="JSON of `bench ...`, or of `plan`")
    ],
    folder: Annotated[
        Path,
        Option(
            "--output",
            parser=Path,
            metavar="PATH",
            help="a folder for page and pictures, or one .html",
        ),
    ],
    output: Output,
) -> int:
    """Draw recorded results: charts, and a page with them."""
    from paceline.tools.bench.report.command import bench_report

    paths = [str(path) for path in bench_report(results, folder)]
    print_value(output, {"written": paths}, "\n".join(paths))
    return 0


@command(app)
def simulate(
    *,
    texts: Annotated[
        list[Path],
        declare.several(
            parser=Path,
            metavar="FILE...",
            help="JSON lines with prompt and answer, a trace, a result, answers to train on, or "
            "text",
        ),
    ],
    raw: Annotated[bool, Option("--raw", help="prompts without the chat template")] = False,
    prompt_tokens: Annotated[
        int, declare.count(help="tokens of a plain text that are its prompt")
    ] = 100,
    contenders: ContenderArguments,
    cost: Annotated[
        str,
        Option(
            help="costs of calls: here, zaya, phi-4-mini, m5-max, milliseconds by rows such as "
            "1=12,8=15.4, or the file of a recorded plan"
        ),
    ] = "here",
    carry: Annotated[
        bool, Option("--carry", help="one process: a text learns from the texts before it")
    ] = False,
    measure: Annotated[
        bool,
        Option("--measure", help="without texts: answer a suite with the model, and simulate that"),
    ] = False,
    measurement: MeasurementArguments,
    model: ModelOptions,
    output: Output,
) -> int:
    """Answer recorded texts again, without their model."""
    from paceline.models import resolve
    from paceline.tools.bench.simulate.check import bench_simulate_check
    from paceline.tools.bench.simulate.command import bench_simulate

    if bool(texts) == measure:
        raise InvalidRequest("bench simulate needs either --texts, or --measure")
    obey_offline(model.offline)
    progress = progress_of(output)

    def load() -> "Model":
        return load_model(model, output, drafters=contenders.drafters)

    if measure:
        result = bench_simulate_check(
            load, contenders, measurement, model=model.model, progress=progress
        )
    else:
        result = bench_simulate(
            load,
            lambda: resolve(
                model.model, progress=progress, revision=model.revision, weights=model.weights
            ),
            contenders,
            model=model.model,
            texts=texts,
            raw=raw,
            prompt_tokens=prompt_tokens,
            cost=cost,
            carry=carry,
            progress=progress,
        )
    return print_report(result, output, measurement.output)


@command(app)
def trace(
    *,
    trace: Annotated[Path, Argument(parser=Path, metavar="FILE", help="a trace")],
    picture: Annotated[
        Path | None, declare.file("--output", help="draw it: a .png or an .html")
    ] = None,
    output: Output,
) -> int:
    """Show what `generate --trace` wrote."""
    from paceline.tools.bench.trace.command import bench_trace, show

    check_writable(picture)
    result, recorded = bench_trace(trace, picture)
    if output.json or picture is not None:
        print_value(output, result, str(picture))
    else:
        show(recorded)
    return 0


@command(app)
def peers(
    *,
    peer: Annotated[
        list[str],
        declare.several(
            metavar="NAME",
            help="openvino-genai, llama-cpp-python, transformers, mlx-lm, or the base URL of a "
            "server; may be repeated; default: all that are installed",
        ),
    ],
    draft_model: Annotated[
        str | None, Option(metavar="MODEL", help="a smaller model, for mlx-lm to draft with")
    ] = None,
    served_model: Annotated[
        str | None, Option(metavar="NAME", help="model of a server; default: its first")
    ] = None,
    api_key: ApiKey = None,
    plain: Annotated[
        str | None, Option(metavar="JSON", help="fields of a server's request without speculation")
    ] = None,
    speculation: Annotated[
        str | None, Option(metavar="JSON", help="fields of a server's request with speculation")
    ] = None,
    calls: Annotated[
        bool,
        Option(
            "--calls",
            help="instead of answers: calls of 1 to 16 rows, a prompt, start and memory, on the "
            "model's GGUF file",
        ),
    ] = False,
    measurement: MeasurementArguments,
    model: ModelOptions,
    output: Output,
) -> int:
    """Compare with other runtimes, and with servers."""
    if calls:
        if measurement.suite or measurement.kinds or measurement.per_kind:
            raise InvalidRequest("--calls has no prompts; leave out --suite, --kind and --per-kind")
        if model.weights:
            raise InvalidRequest("--calls compares a GGUF file as it is; leave out --weights")
        from paceline.tools.bench.peers.calls.command import bench_calls

        report = bench_calls(
            model.model,
            peers=peer,
            threads=model.threads,
            rounds=measurement.rounds,
            progress=progress_of(output),
        )
        return print_report(report, output, measurement.output)
    from paceline.tools.bench.peers.command import bench_peers
    from paceline.tools.bench.peers.server import Access

    result = bench_peers(
        lambda: load_model(model, output),
        measurement,
        peers=peer,
        access=Access(served_model, api_key, plain, speculation),
        draft=draft_model,
        threads=model.threads,
        progress=progress_of(output),
    )
    return print_report(result, output, measurement.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadArguments(ServerLoad):
    """A server and its requests, on the command line."""

    url: Annotated[str, Option(help="base URL of the server")] = "http://127.0.0.1:8000/v1"
    model: Annotated[str | None, Option(help="default: the server's first")] = None
    api_key: ApiKey = None
    clients: Annotated[
        list[int],
        declare.several(
            parser=numbers.COUNT, help="clients at once; may be repeated; default: 1, 8"
        ),
    ]
    rates: Annotated[
        list[float],
        declare.several("--rate", parser=numbers.RATE, help="requests/s; may be repeated"),
    ]
    requests: Annotated[int, declare.count(help="requests of each load")] = 32
    kinds: Kinds
    extra: Annotated[str, Option(metavar="JSON", help="more fields of every request")] = "{}"
    suite: Suite = None
    max_tokens: MaxTokens = 128


@command(app)
def serve(*, load: LoadArguments, result: ResultFile = None, output: Output) -> int:
    """Load a server: paceline's, or another OpenAI-compatible one."""
    from paceline.tools.bench.serve.command import bench_serve

    check_writable(result)
    return print_report(bench_serve(load, progress_of(output)), output, result)
