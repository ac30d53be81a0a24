from dataclasses import dataclass, field

import pytest

from paceline.errors import InvalidRequest, ModelError
from paceline.storage.validation import validated
from support.errors import raises


@dataclass(frozen=True)
class Part:
    size: int
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size is {self.size}; expected 1 or more")


@dataclass(frozen=True)
class Whole:
    name: str
    share: float
    parts: list[Part] = field(default_factory=list)


def test_json_is_converted_to_a_dataclass():
    value = {"name": "a", "share": 1, "parts": [{"size": 2, "names": ["b"]}], "more": 0}
    assert validated(Whole, value, "x.json") == Whole("a", 1.0, [Part(2, ("b",))])


def test_all_errors_are_reported_together():
    value = {"share": "1", "parts": [{"size": 2.5}, {"size": 0}]}
    with pytest.raises(ModelError) as caught:
        validated(Whole, value, "x.json", error=ModelError)
    first, *faults = str(caught.value).splitlines()
    assert first.startswith("x.json")
    places = [line.strip().partition(":")[0] for line in faults]
    assert places == ["name", "share", "parts.0.size", "parts.1"]
    assert "not '1'" in faults[1]
    assert "size is 0; expected 1 or more" in faults[3]


def test_an_error_is_one_line_with_the_start_of_the_value():
    with raises(InvalidRequest, "x.json", "share"):
        validated(Whole, {"name": "a", "share": None}, "x.json")
    with raises(InvalidRequest, "x.json"):
        validated(Whole, [1], "x.json")
    with pytest.raises(InvalidRequest) as caught:
        validated(Whole, {"name": "a", "share": "9" * 10_000}, "x.json")
    assert len(str(caught.value)) < 200
