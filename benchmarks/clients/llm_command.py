"""Simon Willison's `llm` against the server: chat, JSON schema, completions, responses.

    python benchmarks/clients/llm_command.py

Its output must equal the answers of paceline's Python API to the same prompts, streamed or not, and
in the second turn of a chat.
"""

import json

from trial import Trial, main

import paceline
from paceline.models import DEFAULT_MODEL

QUESTION = "Name three rivers in Europe."
MORE = "And which of them is the longest?"
SYSTEM = "You answer in few words."
TOKENS = 40
KINDS = {
    "chat": {"supports_schema": True},
    "completion": {"completion": True},
    "responses": {"responses": True},
}


def work(trial: Trial) -> None:
    """Check each kind of request."""
    model = paceline.load()
    _set_up(trial)
    known = [{"role": "system", "content": SYSTEM}]
    asked = [*known, {"role": "user", "content": QUESTION}]
    expected = model.generate(asked, max_tokens=TOKENS, drafter="none", temperature=0.0).text
    limits = ("-o", "temperature", "0", "-o", "max_tokens", str(TOKENS))
    for more in ((), ("--no-stream",)):
        done = trial.run("llm", "-m", "chat", "-s", SYSTEM, *limits, *more, QUESTION)
        trial.equal(
            done.stdout.rstrip("\n"),
            expected.rstrip("\n"),
            f"llm answers{' at once' if more else ''}",
        )
    done = trial.run("llm", "-c", *limits, MORE)
    turns = [*asked, {"role": "assistant", "content": expected}]
    second = model.generate(
        [*turns, {"role": "user", "content": MORE}],
        max_tokens=TOKENS,
        drafter="none",
        temperature=0.0,
    ).text
    trial.equal(done.stdout.rstrip("\n"), second.rstrip("\n"), "llm -c goes on")
    stdin = f"{QUESTION}\n{MORE}\nexit\n"
    done = trial.run("llm", "chat", "-m", "chat", "-s", SYSTEM, *limits, stdin=stdin)
    for text, turn in ((expected, "first"), (second, "second")):
        trial.check(text.strip() in done.stdout, f"llm chat answers the {turn} time")
    done = trial.run("llm", "-m", "chat", "--schema", "name, age int", "Invent a young dog.")
    dog = json.loads(done.stdout)
    types = [type(dog.get(name)) for name in ("name", "age")]
    trial.equal(types, [str, int], "llm --schema gets the types of the schema")
    done = trial.run("llm", "-m", "responses", "-s", SYSTEM, *limits, QUESTION)
    trial.equal(done.stdout.rstrip("\n"), expected.rstrip("\n"), "llm gets a response")
    raw = model.generate(
        QUESTION, raw=True, max_tokens=TOKENS, drafter="none", temperature=0.0
    ).text
    done = trial.run("llm", "-m", "completion", *limits, QUESTION)
    trial.equal(done.stdout.rstrip("\n"), raw.rstrip("\n"), "llm completes")


def _set_up(trial: Trial) -> None:
    """Write `llm`'s file of additional models; JSON is valid YAML."""
    models = [
        {"model_id": name, "model_name": DEFAULT_MODEL, "api_base": trial.server.url, **more}
        for name, more in KINDS.items()
    ]
    folder = trial.folder / ".config" / "io.datasette.llm"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "extra-openai-models.yaml").write_text(json.dumps(models), encoding="utf-8")


if __name__ == "__main__":
    main(__doc__, ["llm==0.36.*"], work)
