"""The list of models: one form for OpenAI's clients and for Anthropic's.

The two forms share no field with different values, so that an entry has the fields of both.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any


def model_entry(name: str, created: int = 0, **more: Any) -> dict[str, Any]:
    """The entry of a model; `created` is in seconds since 1970, 0 if it is unknown."""
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    anthropic = {"type": "model", "display_name": name, "created_at": at}
    openai = {"object": "model", "created": created, "owned_by": "paceline", "root": name}
    return {"id": name, **openai, **anthropic, **more}


def model_list(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The list of all entries, which is Anthropic's first and last page."""
    ids = [entry["id"] for entry in entries]
    page = {
        "has_more": False,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }
    return {"object": "list", "data": [*entries], **page}
