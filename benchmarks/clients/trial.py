"""Shared by the trials of real clients: a server, a client in its own environment, a verdict.

A trial is a script: `python benchmarks/clients/NAME.py`. It starts `paceline serve` on a free port
(or uses the one at --url), installs its client from PyPI, runs it, and prints the outcome of every
check. It exits with 1 if one failed.
"""

import argparse
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from server import Server, served

_CLIENT_SECONDS = 1800.0

_NO_PROXY = "http://127.0.0.1:9"
"""Nothing listens there: what a client would send to other machines ends here."""


@dataclass
class Trial:
    """A running server, a folder for the client, and the faults found so far."""

    server: Server
    folder: Path
    """Working folder of the client."""
    commands: Path
    """Folder of the client's commands."""
    faults: list[str] = field(default_factory=list)

    def run(
        self, command: str, *arguments: str, stdin: str = "", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the client with `stdin` as input, and check that it exits with 0.

        It has an empty home, no access to other machines, a dummy key, and the environment's
        `variables`.
        """
        done = subprocess.run(
            [self.commands / command, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            cwd=self.folder,
            env={
                "PATH": f"{self.commands}:/usr/bin:/bin",
                "HOME": str(self.folder),
                "HF_HUB_OFFLINE": "1",
                **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), _NO_PROXY),
                "NO_PROXY": "127.0.0.1,localhost",
                "OPENAI_API_KEY": "none",
                **variables,
            },
            timeout=_CLIENT_SECONDS,
            check=False,
        )
        if done.returncode:
            print(done.stdout[-4000:], done.stderr[-4000:], sep="\n")
        self.equal(done.returncode, 0, f"{command} exits with 0")
        return done

    def check(self, right: bool, what: str) -> None:
        """Print a check, and note a failed one."""
        print(f"{'right' if right else 'WRONG'}: {what}", flush=True)
        if not right:
            self.faults.append(what)

    def equal(self, found: object, expected: object, what: str) -> None:
        """Check that a value is the expected one."""
        self.check(found == expected, what)
        if found != expected:
            print(f"    found    {found!r}\n    expected {expected!r}", flush=True)


def main(
    about: str | None,
    packages: Sequence[str],
    work: Callable[[Trial], None],
    serve: Sequence[str] = (),
    script: Path | None = None,
) -> None:
    """Main function of a trial: set up, `work`, and exit.

    Args:
        about: the script's docstring.
        packages: what to install, as pip takes it.
        work: runs the checks.
        serve: further arguments of `paceline serve`.
        script: a script that serves in its place.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--url", help="ask this server, which has the default model (.../v1)")
    parser.add_argument("--work", type=Path, help="keep the client and its files in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        home = (options.work or Path(temporary)).resolve()
        name = Path(sys.argv[0]).stem
        commands = installed(home / f"{name}-client", packages) if packages else Path()
        folder = home / name
        folder.mkdir(parents=True, exist_ok=True)
        started = nullcontext(Server(options.url)) if options.url else served(serve, script)
        with started as server:
            trial = Trial(server, folder, commands)
            work(trial)
            trial.equal(
                httpx.get(f"{server.root}/health").status_code, 200, "the server is healthy"
            )
            left = [server.metric(f"paceline_requests_{each}") for each in ("running", "waiting")]
            trial.equal(left, [0.0, 0.0], "no request is left in the server")
        if not options.url:
            trial.equal(server.ended, 0, "the server ends on SIGTERM")
    print(f"{len(trial.faults)} checks failed" if trial.faults else "all checks passed")
    sys.exit(bool(trial.faults))


def installed(folder: Path, packages: Sequence[str]) -> Path:
    """Install packages in their own environment; returns the folder of its commands."""
    commands = folder / "bin"
    if not folder.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([commands / "pip", "install", "--quiet", *packages], check=True)
    return commands
