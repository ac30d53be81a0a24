"""Packages of Python for models with tools write a file, each over every API that it knows.

    python benchmarks/clients/agent_sdks.py

The model is scripted, so this is a test of the server's forms. Each package has an environment of
its own; a program in programs/ does the task, whole and streamed.
"""

from pathlib import Path

from scripted_server import ANSWER, CONTENT, FILE
from trial import Trial, installed, main

HERE = Path(__file__).parent
PACKAGES = {
    "openai_sdk": (["openai==3.57.*"], 6),
    "anthropic_sdk": (["anthropic==2.14.*"], 2),
    "agents_sdk": (["openai-agents==0.24.*"], 4),
    "litellm_sdk": (["litellm==1.110.*", "mcp"], 4),  # it imports mcp without requiring it
    "langchain_sdk": (["langchain-openai==1.7.*"], 4),
}
"""Program -> its packages, and how often it does the task."""


def work(trial: Trial) -> None:
    """Run each program."""
    for program, (packages, times) in PACKAGES.items():
        package = packages[0]
        trial.commands = installed(trial.folder / program, packages)
        written = trial.folder / FILE
        written.unlink(missing_ok=True)
        done = trial.run("python", str(HERE / "programs" / f"{program}.py"), trial.server.url)
        print(done.stdout, end="")
        trial.equal(done.stdout.count(ANSWER), times, f"{package} answers from the tool's result")
        found = written.read_text() if written.exists() else None
        trial.equal(found, CONTENT, f"{package} has written the file")


if __name__ == "__main__":
    main(__doc__, [], work, script=HERE / "scripted_server.py")
