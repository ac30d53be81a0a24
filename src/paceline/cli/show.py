"""`paceline show`."""

from typing import TYPE_CHECKING, Any

from paceline.cli.console import obey_offline, print_value
from paceline.cli.models import exactness_text, heads, measured
from paceline.cli.options import ModelArgument, Output, command

if TYPE_CHECKING:
    from paceline.models import ModelFiles


@command(examples=("paceline show", "paceline show qwen3-0.6b --json"))
def show(*, model: ModelArgument, output: Output) -> int:
    """Show a model's context, template, special tokens, settings and drafters.

    Weights are neither downloaded nor loaded.
    """
    obey_offline(True)
    from paceline.models import list_models, resolve
    from paceline.storage.files import megabytes

    listed = next((one for one in list_models() if one.name == model), None)
    if listed is not None and not listed.here and listed.folder is None:
        size = megabytes(listed.to_fetch)
        facts = {"name": model, "installed": False, "about": listed.about, "bytes": listed.to_fetch}
        text = f"{model}: {listed.about}; not installed: `paceline pull {model}` downloads {size}"
    else:
        facts = _facts(resolve(model))
        installed = [listed] if listed else []
        facts["on_disk"] = sum(measured(one).bytes for one in installed) or facts["bytes"]
        facts["drafters"] = [head.about for head in heads(installed) if head.models]
        text = "\n".join(
            f"{name:<16}{value}" for name, value in _for_people(facts).items() if value
        )
    print_value(output, facts, text)
    return 0


def _facts(files: "ModelFiles") -> dict[str, Any]:
    """Return the facts of an installed model that need no engine, for JSON."""
    from paceline.drafters import DrafterSpec
    from paceline.engines.llamacpp.libraries import device_for
    from paceline.models.published import published_for
    from paceline.runtime.drafting import Drafting
    from paceline.runtime.exactness import stored_exactness
    from paceline.runtime.request import defaults_of

    settings = defaults_of(files).resolve({}).items()
    published = next(iter(published_for(files)), None)
    return {
        "name": files.name,
        "installed": True,
        "source": files.source,
        "license": files.facts.license,
        "engine": files.engine,
        "device": files.weights and device_for(files.weights),
        "path": str(files.path),
        "bytes": files.weights_bytes,
        "context_length": files.context_length,
        "vocabulary": files.tokenizer.vocab_size,
        "special_tokens": files.tokenizer.special_tokens(),
        "end_tokens": [*files.stop_token_ids],
        "chat_template": files.chat_template,
        "reasoning": files.thinking.form is not None,
        "pooling": files.facts.pooling,
        "settings": {name: one._asdict() for name, one in settings if one.source != "fallback"},
        "drafter": Drafting(files).resolve(DrafterSpec.parse("auto")).without_folders,
        "published": published and published.line(files.name, published.size()),
        "exactness": stored_exactness(files.fingerprint),
    }


def _for_people(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts for people: long ones are shortened."""
    from paceline.storage.files import megabytes

    settings, template = facts["settings"].items(), facts["chat_template"] or ""
    names = {number: name for name, number in facts["special_tokens"].items()}
    short = {
        **{name: megabytes(facts[name]) for name in ("bytes", "on_disk")},
        "special_tokens": str(len(names)),
        "end_tokens": ", ".join(f"{names.get(one, '')} ({one})" for one in facts["end_tokens"]),
        "chat_template": f"{len(template)} characters, tools: {'tools' in template}",
        "settings": ", ".join(f"{name} {one['value']} ({one['source']})" for name, one in settings),
        "drafters": "; ".join(facts["drafters"]),
        "exactness": exactness_text(facts["exactness"]),
    }
    return {**facts, **short, "installed": None}
