"""What is left of a model's engine once the model is closed."""

from typing import Any

from paceline.errors import InvalidRequest


class Closed:
    """Stands in for parts of a closed model: any use of it is refused by name."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        raise InvalidRequest(f"{self._model} is closed; load it again")
