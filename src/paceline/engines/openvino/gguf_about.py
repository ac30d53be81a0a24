"""What a GGUF file says of its model, checked, for graphs that are built here."""

from pathlib import Path

from paceline.errors import ModelError
from paceline.storage.gguf_file import GgufFile, NumberArray

_MOST = 1 << 31


class About:
    """What the file says of the model."""

    def __init__(self, file: GgufFile, path: Path) -> None:
        """Of the `file` at `path`."""
        self._fields, self._path = file.fields, path
        self.arch = file.fields["general.architecture"]
        """The family."""

    def number(self, name: str, default: float | None = None) -> float:
        """The value of `name`, a positive number."""
        value = self._fields.get(f"{self.arch}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST:
            raise self._wrong(name, value, "a positive number")
        return value

    def count(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = _MOST
    ) -> int:
        """The value of `name`, an integer from `least` to `most`."""
        value = self._fields.get(f"{self.arch}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong(name, value, f"an integer from {least} to {most}")
        return value

    def by_layer(self, name: str, layers: int) -> list[int]:
        """A whole number per layer; a single one is for all."""
        value = self._fields.get(f"{self.arch}.{name}")
        if isinstance(value, NumberArray) and len(value.values) == layers:
            return [self._heads(name, int(number)) for number in value.values]
        if isinstance(value, int) and 0 < value < _MOST:
            return [value] * layers
        raise self._wrong(name, value, f"{layers} numbers, one a layer")

    def _heads(self, name: str, value: int) -> int:
        if not 0 <= value < _MOST:
            raise self._wrong(name, value, f"numbers from 0 to {_MOST}")
        return value

    def _wrong(self, name: str, value: object, expected: str) -> ModelError:
        value = value.values.tolist() if isinstance(value, NumberArray) else value
        shown = "is missing" if value is None else f"is {str(value)[:80]}"
        return ModelError(f"{self._path}: {self.arch}.{name} {shown}; expected {expected}")
