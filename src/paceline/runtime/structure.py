"""The structure of an answer, from options: a JSON schema, a regular expression or a grammar."""

from collections.abc import Callable

from paceline.constraints.grammar import Grammars
from paceline.decoding.types import Constraint
from paceline.options import Options


def structure(options: Options, grammars: Callable[[], Grammars]) -> Constraint | None:
    """Compile the structure that checked options give an answer; None: they give it none.

    Raises:
        InvalidRequest: it is invalid, matches nothing, or is too complex.
        MissingExtra: llguidance is not installed.
        ModelError: llguidance cannot use the model's tokenizer.
    """
    if (schema := options.get("json_schema")) is not None:
        return grammars().json_schema(schema)
    if (regex := options.get("regex")) is not None:
        return grammars().regex(regex)
    if (grammar := options.get("grammar")) is not None:
        return grammars().lark(grammar)
    return None
