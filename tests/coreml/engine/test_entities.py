import numpy as np
import pytest

from paceline_coreml.engine.entities import entities, probabilities


def found(text: str, *tokens: tuple[str, str]) -> list[tuple[str, str]]:
    """Label and characters of the entities; `tokens`: characters and label of each token."""
    offsets, end = [], 0
    for characters, _ in tokens:
        offsets.append((end, end + len(characters)))
        end += len(characters)
    labels = [label for _, label in tokens]
    parts = entities(text, offsets, labels, [0.5] * len(labels))
    return [(each.label, text[each.start : each.end]) for each in parts]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (("O", "O", "O"), []),
        (("B-x", "I-x", "E-x"), [("x", "a b c")]),
        (("S-x", "S-x", "O"), [("x", "a"), ("x", "b")]),
        (("B-x", "B-x", "I-x"), [("x", "a"), ("x", "b c")]),
        (("E-x", "I-x", "O"), [("x", "a"), ("x", "b")]),
        (("I-x", "I-y", "I-y"), [("x", "a"), ("y", "b c")]),
        (("x", "x", "O"), [("x", "a b")]),
        (("B-x", "O", "I-x"), [("x", "a"), ("x", "c")]),
    ],
)
def test_entities_are_the_spans_of_their_tokens(labels: tuple[str, ...], expected: list[object]):
    assert found("a b c", *zip(("a", " b", " c"), labels, strict=True)) == expected


def test_white_space_is_not_an_entity_and_scores_are_mean_probabilities():
    assert found(" a ", ("", "B-x"), (" ", "S-x"), ("a", "S-x"), (" ", "O")) == [("x", "a")]
    (one,) = entities("ab", [(0, 1), (1, 2)], ["B-x", "E-x"], [1.0, 0.5])
    assert one == ("x", 0, 2, 0.75)
    logits = np.array([[0.0, 0.0], [np.log(3), 0.0], [1e4, 0.0]], np.float32)
    np.testing.assert_allclose(probabilities(logits), [0.5, 0.75, 1.0], rtol=1e-6)
