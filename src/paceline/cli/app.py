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
from dataclasses import asdict, replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import bench as lab
from paceline.cli import workshops
from paceline.cli.arguments import MAX_TOKENS, SAMPLING, parser
from paceline.cli.console import (
    check_writable,
    load_model,
    named,
    print_ending,
    print_stats,
    print_table,
    print_value,
    progress_of,
    shower,
)
from paceline.errors import InvalidRequest, MissingExtra, PacelineError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from paceline.decoding.step import Step
    from paceline.runtime.model import Model
    from paceline.runtime.options import Options
    from paceline.runtime.stream import Stream


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    commands = {
        "pull": _pull,
        "models": _models,
        "convert": _convert,
        "generate": _generate,
        "chat": _chat,
        "serve": _serve,
        "bench run": lab.bench_run,
        "bench sweep": lab.bench_sweep,
        "bench compare": lab.bench_compare,
        "bench report": lab.bench_report,
        "bench simulate": lab.bench_simulate,
        "bench trace": lab.bench_trace,
        "bench peers": lab.bench_peers,
        "bench serve": lab.bench_serve,
        "coreml lint": workshops.coreml_lint,
        "coreml golden": workshops.coreml_golden,
        "coreml residency": workshops.coreml_residency,
        "train prompts": workshops.train_prompts,
        "train answers": workshops.train_answers,
        "train table": workshops.train_table,
        "train dflash": workshops.train_dflash,
        "verify": lab.verify,
        "plan": lab.plan,
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

    files = pull(options.model, progress=progress_of(options))
    found = {
        "name": files.name,
        "folder": str(files.folder),
        "source": files.source,
        "license": files.facts.license,
        "context_length": files.context_length,
    }
    print_value(options, found, f"{files.name} is ready in {files.folder}")
    return 0


def _models(options: argparse.Namespace) -> int:
    from paceline.models import check_models, list_models
    from paceline.models.cache import megabytes

    if options.check:
        count = check_models(progress=progress_of(options))
        print_value(options, {"checked": count}, f"{count} prepared models are as they were made")
        return 0
    found = [(model, lab.exactness_of(model)) for model in list_models()]
    if options.json:
        values = [{**asdict(model), "exactness": measured} for model, measured in found]
        print(json.dumps(values, default=str))
        return 0
    rows = [
        [
            m.name,
            megabytes(m.bytes) if m.here else "not here",
            lab.exact_in_words(measured),
            m.about,
        ]
        for m, measured in found
    ]
    print_table(["model", "size", "exact here", "about"], rows)
    return 0


def _convert(options: argparse.Namespace) -> int:
    if options.to == "coreml":
        return workshops.convert_to_core_ml(options)
    from paceline.models import convert

    strange = [name for name in workshops.CORE_ML_OPTIONS if getattr(options, name) is not None]
    if strange:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in strange)
        raise InvalidRequest(f"{names}: only with --to coreml")
    files = convert(
        options.source, options.weights, output=options.folder, progress=progress_of(options)
    )
    found = {"name": files.name, "folder": str(files.folder)}
    print_value(options, found, f"{files.name} is ready in {files.folder}; use it by that name")
    return 0


def _generate(options: argparse.Namespace) -> int:
    prompt: Any = _prompt(options)
    if options.system is not None:
        if options.raw:
            raise InvalidRequest("--system needs the chat template; leave --raw away")
        prompt = [
            {"role": "system", "content": options.system},
            {"role": "user", "content": prompt},
        ]
    expected = None if options.prediction is None else _text_of(options.prediction)
    check_writable(options.trace)
    request = _request(options)
    model = _model_to_answer(options)
    if expected is not None:
        request["prediction"] = model.files.tokenizer().encode(expected)
    with (
        model.stream(prompt, **request) as stream,
        _traced(options, model, stream, request) as steps,
    ):
        show = shower(options, model, stream)
        for step in steps:
            show(step)
    if options.json:
        # With its prompt an answer can be simulated.
        prompt_token_ids = stream.tokens[: stream.result.prompt_tokens]
        found = {**stream.result.as_dict(), "prompt_token_ids": prompt_token_ids}
        print(json.dumps(found, ensure_ascii=False))
        return 0
    print()
    print_ending(stream.result, options)
    print_stats(stream.result.line(), options)
    return 0


def _chat(options: argparse.Namespace) -> int:
    from paceline.cli.chat import chat
    from paceline.runtime.options import check

    request = _request(options)
    check(request)  # before the model is loaded
    return chat(options, request, _model_to_answer(options))


def _serve(options: argparse.Namespace) -> int:
    from importlib.util import find_spec

    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise MissingExtra("serving needs: pip install 'paceline[serve]'")
    from paceline.runtime.options import check
    from paceline.server.api_keys import api_keys
    from paceline.server.run import CONTEXTS, serve
    from paceline.server.settings import Settings

    speculation = named(options, "drafter", "policy", "max_block")
    chosen: Any = {name: value for name, value in speculation.items() if value is not None}
    check(chosen)  # before the model is loaded
    settings = Settings(
        name=options.name,
        aliases=tuple(options.alias or ()),
        api_keys=api_keys(options.api_key or (), options.api_key_file, os.environ),
        hosts=None if options.allow_host is None else tuple(options.allow_host),
        anyone=options.anyone,
        origins=tuple(options.origin or ()),
        max_waiting=options.queue,
        max_running=options.at_once,
        request_seconds=options.timeout,
        grace_seconds=options.grace,
        **speculation,
    )
    serve(load_model(options, contexts=CONTEXTS), options.host, options.port, settings)
    return 0


def _prompt(options: argparse.Namespace) -> str:
    """The prompt: the argument, a file, or standard input."""
    if options.prompt is not None and options.file is not None:
        raise InvalidRequest("give the prompt as an argument or with --file, not both")
    if options.file is not None:
        return _text_of(options.file)
    if options.prompt not in (None, "-"):
        return str(options.prompt)
    if sys.stdin.isatty() and options.prompt is None:
        raise InvalidRequest("there is no prompt; give it as an argument, with --file, or piped in")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"standard input is not UTF-8 text: {error.reason}") from error


def _traced(
    options: argparse.Namespace, model: "Model", stream: "Stream", request: "Options"
) -> "AbstractContextManager[Iterable[Step]]":
    """The steps of an answer, written to --trace as they come."""
    if options.trace is None:
        return contextlib.nullcontext(stream)
    from paceline.runtime.trace import Trace

    return Trace(options.trace, model, stream, request)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not UTF-8 text: {error.reason}") from error


def _model_to_answer(options: argparse.Namespace) -> "Model":
    """The model, with a limit of tokens for answers that have none."""
    model = load_model(options)
    model.defaults = replace(model.defaults, fallback={"max_tokens": MAX_TOKENS})
    return model


def _request(options: argparse.Namespace) -> "Options":
    names = [name.replace("-", "_") for name, _, _ in SAMPLING]
    names += ["max_tokens", "drafter", "policy", "max_block", "probe"]
    chosen: Any = {
        name: value for name, value in named(options, *names).items() if value is not None
    }
    if options.max_tokens == -1:
        chosen["max_tokens"] = None
    detect = options.repetition_detection
    chosen["repetition_detection"] = not options.ignore_eos if detect is None else detect
    if options.stop:
        chosen["stop"] = options.stop
    if options.logit_bias:
        chosen["logit_bias"] = dict(options.logit_bias)
    if options.chat_template_kwargs is not None:
        chosen["template_kwargs"] = options.chat_template_kwargs
    chosen["think"] = options.think
    chosen["ignore_eos"] = options.ignore_eos
    chosen["raw"] = getattr(options, "raw", False)
    request: Options = chosen
    return request
