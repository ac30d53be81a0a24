"""The command line: one short function per command; parses, calls, prints.

Answers go to standard output, everything else to standard error. Exit codes: 0 done, 1 a check
failed, 2 the user's mistake, 130 stopped with Ctrl-C.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.arguments import SAMPLING, parser
from paceline.artifacts import write_json, writing
from paceline.errors import InvalidRequest, PacelineError

if TYPE_CHECKING:
    from paceline.bench.commands import Report
    from paceline.models import Progress
    from paceline.options import Options
    from paceline.runtime import Model


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    commands = {
        "pull": _pull,
        "models": _models,
        "convert": _convert,
        "generate": _generate,
        "chat": _chat,
        "bench run": _bench_run,
        "coreml lint": _coreml_lint,
        "coreml golden": _coreml_golden,
        "coreml residency": _coreml_residency,
        "train prompts": _train_prompts,
        "train answers": _train_answers,
        "train table": _train_table,
        "train dflash": _train_dflash,
        "verify": _verify,
        "plan": _plan,
    }
    options = parser(commands).parse_args(arguments)
    if isinstance(sys.stdout, TextIOWrapper):  # a terminal that lacks a letter shows another
        sys.stdout.reconfigure(errors="replace")
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\npaceline: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


def _pull(options: argparse.Namespace) -> int:
    from paceline.models import pull

    files = pull(options.model, progress=_progress(options))
    found = {
        "name": files.name,
        "folder": str(files.folder),
        "source": files.source,
        "license": files.facts.license,
        "context_length": files.context_length,
    }
    _print(options, found, f"{files.name} is ready in {files.folder}")
    return 0


def _models(options: argparse.Namespace) -> int:
    from paceline.models import check_models, list_models
    from paceline.models.cache import megabytes

    if options.check:
        count = check_models(progress=_progress(options))
        _print(options, {"checked": count}, f"{count} prepared models are as they were made")
        return 0
    found = list_models()
    if options.json:
        print(json.dumps([asdict(model) for model in found], default=str))
        return 0
    rows = [[m.name, megabytes(m.bytes) if m.here else "not here", m.about] for m in found]
    _table(["model", "size", "about"], rows)
    return 0


def _convert(options: argparse.Namespace) -> int:
    if options.to == "coreml":
        return _convert_to_core_ml(options)
    from paceline.models import convert

    strange = [name for name in _CORE_ML if getattr(options, name) is not None]
    if strange:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in strange)
        raise InvalidRequest(f"{names}: only with --to coreml")
    files = convert(
        options.source, options.weights, output=options.folder, progress=_progress(options)
    )
    found = {"name": files.name, "folder": str(files.folder)}
    _print(options, found, f"{files.name} is ready in {files.folder}; use it by that name")
    return 0


_CORE_ML = (
    *("rows", "functions", "slots", "topology", "megabytes", "head_rows", "taps", "routing"),
    *("keep", "temporary"),
)
"""Options of convert that only Core ML has."""


def _convert_to_core_ml(options: argparse.Namespace) -> int:
    from paceline.coreml import commands

    report = commands.convert(
        options.source,
        recipe={
            **_named(options, "weights", *_CORE_ML[:-2]),
            "keep": None if options.keep is None else tuple(options.keep),
        },
        output=options.folder,
        temporary=options.temporary,
        progress=_progress(options),
    )
    return _report(report, options)


def _coreml_lint(options: argparse.Namespace) -> int:
    from paceline.coreml import commands

    return _report(commands.lint(options.artifact), options)


def _coreml_golden(options: argparse.Namespace) -> int:
    from paceline.coreml import commands

    chosen = _named(options, "source", "tokens", "threshold", "rounding", "temporary")
    report = commands.golden(options.artifact, **chosen, progress=_progress(options))
    return _report(report, options)


def _coreml_residency(options: argparse.Namespace) -> int:
    from paceline.coreml import commands

    chosen = _named(options, "units", "recorded", "record")
    report = commands.residency(options.artifact, **chosen, progress=_progress(options))
    return _report(report, options)


def _generate(options: argparse.Namespace) -> int:
    prompt: Any = _prompt(options)
    if options.system is not None:
        if options.raw:
            raise InvalidRequest("--system needs the chat template; leave --raw away")
        prompt = [
            {"role": "system", "content": options.system},
            {"role": "user", "content": prompt},
        ]
    model = _load(options)
    with model.stream(prompt, **_request(options)) as stream:
        for step in stream:
            if not options.json:
                print(step.text, end="", flush=True)
    if options.json:
        print(json.dumps(stream.result.as_dict(), ensure_ascii=False))
        return 0
    print()
    _stats(stream.result.stats.line(), options)
    return 0


def _chat(options: argparse.Namespace) -> int:
    model = _load(options)
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    chat = model.conversation(system)
    with contextlib.suppress(ImportError):
        import_module("readline")  # line editing and history, where Python has it
    if sys.stdin.isatty():
        print("An empty line or Ctrl-D ends the chat; Ctrl-C stops an answer.", file=sys.stderr)
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            said = ""
        if not said.strip():
            return 0
        stream = chat.say(said, **_request(options))
        try:
            for step in stream:
                if not options.json:
                    print(step.text, end="", flush=True)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        stream.close()
        if options.json:
            print(json.dumps(stream.result.as_dict(), ensure_ascii=False), flush=True)
        else:
            print()
            _stats(stream.result.stats.line(), options)


def _bench_run(options: argparse.Namespace) -> int:
    from paceline.bench import commands

    _check_writable(options.output)
    report = commands.bench_run(
        lambda rows: _load(options, rows=rows),
        suite=options.suite,
        kinds=options.kind or [],
        per_kind=options.per_kind,
        drafters=options.drafter or ["auto"],
        policy=options.policy,
        rounds=options.rounds,
        max_tokens=options.max_tokens,
        progress=_progress(options),
    )
    return _report(report, options)


def _verify(options: argparse.Namespace) -> int:
    from paceline.bench import commands

    _check_writable(options.output)
    report = commands.verify(
        lambda: _load(options),
        suite=options.suite,
        max_tokens=options.max_tokens,
        whole=options.whole,
        drafters=options.drafter or [],
        progress=_progress(options),
    )
    return _report(report, options)


def _train_prompts(options: argparse.Namespace) -> int:
    from paceline.training import commands

    chosen = _named(options, "count", "temperature", "seed", "at_once", "threads")
    report = commands.prompts(options.target, options.out, **chosen, progress=_progress(options))
    return _report(report, options)


def _train_answers(options: argparse.Namespace) -> int:
    from paceline.training import commands

    chosen = _named(options, "max_tokens", "seed", "at_once", "threads")
    chosen["temperatures"] = options.temperature or [0.0]
    report = commands.answers(
        options.target, options.prompts, options.out, **chosen, progress=_progress(options)
    )
    return _report(report, options)


def _train_table(options: argparse.Namespace) -> int:
    from paceline.training import commands

    report = commands.table(
        options.target,
        _data(options),
        options.out,
        megabytes=options.megabytes,
        progress=_progress(options),
    )
    return _report(report, options)


def _train_dflash(options: argparse.Namespace) -> int:
    from paceline.training import commands

    commands.check_training(**_named(options, "block", "rate", "gamma", "device"))
    paces = "steps", "texts", "anchors", "gamma", "rate", "seed", "evaluate_every"
    report = commands.dflash(
        options.target,
        _data(options),
        options.out,
        **_named(options, "layers", "block", "taps", "vocab", "device"),
        schedule=_named(options, *paces),
        progress=_progress(options),
    )
    return _report(report, options)


def _data(options: argparse.Namespace) -> list[Path]:
    """The folders of answers to learn from; made first where only prompts were given."""
    from paceline.training import commands

    folders = list(options.data or [])
    if options.prompts:
        made = options.out / "answers"
        commands.answers(options.target, options.prompts, made, progress=_progress(options))
        folders.append(made)
    if not folders:
        raise InvalidRequest("nothing to learn from; give --data ANSWERS or --prompts FILE")
    return folders


def _plan(options: argparse.Namespace) -> int:
    from paceline.bench import commands

    return _report(commands.plan(_load(options), again=options.again), options)


def _prompt(options: argparse.Namespace) -> str:
    """The prompt: the argument, a file, or standard input."""
    if options.prompt is not None and options.file is not None:
        raise InvalidRequest("give the prompt as an argument or with --file, not both")
    if options.file is not None:
        try:
            return str(options.file.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidRequest(f"cannot read {options.file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{options.file} is not UTF-8 text: {error.reason}") from error
    if options.prompt not in (None, "-"):
        return str(options.prompt)
    if sys.stdin.isatty() and options.prompt is None:
        raise InvalidRequest("there is no prompt; give it as an argument, with --file, or piped in")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"standard input is not UTF-8 text: {error.reason}") from error


def _request(options: argparse.Namespace) -> "Options":
    names = [name.replace("-", "_") for name, _, _ in SAMPLING]
    names += ["max_tokens", "drafter", "policy", "max_block", "probe"]
    chosen: Any = {
        name: value for name, value in _named(options, *names).items() if value is not None
    }
    if options.stop:
        chosen["stop"] = options.stop
    if options.logit_bias:
        chosen["logit_bias"] = dict(options.logit_bias)
    chosen["ignore_eos"] = options.ignore_eos
    chosen["raw"] = getattr(options, "raw", False)
    request: Options = chosen
    return request


def _load(options: argparse.Namespace, rows: int | None = None) -> "Model":
    from paceline.runtime import load

    chosen = getattr(options, "drafter", None) or "auto"  # bench run takes several
    drafters = [chosen] if isinstance(chosen, str) else list(chosen)
    if getattr(options, "probe", None) is not None:
        drafters.append(options.probe)

    return load(
        options.model,
        engine=options.engine,
        rows=options.rows if rows is None else rows,
        cache_tokens=options.cache_tokens,
        threads=options.threads,
        drafters=drafters,
        progress=_progress(options),
    )


def _named(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names}


def _progress(options: argparse.Namespace) -> "Progress":
    from paceline.models import Progress

    return Progress(quiet=getattr(options, "quiet", False))


def _stats(line: str, options: argparse.Namespace) -> None:
    if not options.quiet:
        print(f"[{line}]", file=sys.stderr)


def _print(options: argparse.Namespace, value: Any, text: str) -> None:
    """Print `value` with --json, else `text`."""
    if options.json:
        print(json.dumps(value, ensure_ascii=False))
    elif text:
        print(text)


def _report(report: "Report", options: argparse.Namespace) -> int:
    """Write and print what a command found out; returns its exit code."""
    if getattr(options, "output", None) is not None:
        with writing(options.output):
            write_json(options.output, report.value)
    _print(options, report.value, report.text)
    if not options.json:
        for title, head, rows in report.tables:
            print(f"\n{title}")
            _table(head, rows)
    return 0 if report.passed else 1


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _check_writable(path: Path | None) -> None:
    """Find out before minutes of work that their result could not be kept."""
    if path is None:
        return
    if path.is_dir():
        raise InvalidRequest(f"cannot write {path}: it is a folder")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise InvalidRequest(f"cannot write {path}: {path.parent} is not a folder to write to")
