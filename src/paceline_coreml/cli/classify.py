"""`paceline classify`: label texts with a Core ML token classifier."""

import sys
from time import perf_counter
from typing import Annotated, Any

from typer import Argument, Option

from paceline.cli.console import print_table, print_value, progress_of, read_stdin
from paceline.cli.options import ComputeUnits, Output, command
from paceline.errors import InvalidRequest
from paceline_coreml.cli.arguments import Artifact, open_artifact


@command()
def classify(
    *,
    model: Artifact,
    text: Annotated[
        list[str] | None,
        Argument(parser=str, help="texts; omit them, or pass -, to read one from stdin"),
    ] = None,
    tokens: Annotated[
        bool, Option("--tokens", help="print the label of every token instead of entities")
    ] = False,
    compute_units: Annotated[ComputeUnits, Option(help="compute units, on a Mac")] = "cpu-and-ne",
    output: Output,
) -> int:
    """Label the entities of texts with a Core ML token classifier."""
    if not text and sys.stdin.isatty():
        raise InvalidRequest("no text to classify; pass it as an argument, or pipe it in")
    texts = [read_stdin(quiet=output.quiet) if part == "-" else part for part in text or ["-"]]

    from paceline_coreml.engine.classifier import TextClassifier
    from paceline_coreml.engine.entities import Entity, entities, probabilities

    progress = progress_of(output)
    files = open_artifact(model, "a token classifier for Core ML")
    classifier = TextClassifier(files.folder, units=compute_units, on_message=progress.note)
    tokenizer = files.tokenizer
    encoded = [tokenizer.encode_with_offsets(part) for part in texts]
    kind = "tokens" if tokens else "entities"
    values: list[dict[str, Any]] = []
    begun = perf_counter()
    labelled = classifier.label([ids for ids, _ in encoded])
    seconds = perf_counter() - begun
    for content, (_, offsets), labels in zip(texts, encoded, labelled, strict=True):
        scores = probabilities(labels.scores)
        if tokens:
            places = zip(offsets, labels.labels, scores, strict=True)
            parts = [Entity(label, *place, float(score)) for place, label, score in places]
        else:
            parts = entities(content, offsets, labels.labels, scores.tolist())
        spans = [{**part._asdict(), "text": content[part.start : part.end]} for part in parts]
        values.append({"text": content, kind: spans})
    speed = {"seconds": seconds, "texts_per_second": len(texts) / seconds}
    about = {"model": model, "units": classifier.units}
    print_value(output, {**about, **speed, "texts": values}, "")
    if not output.json:
        rows = [
            [number, one["start"], one["end"], one["label"], f"{one['score']:.3f}", one["text"]]
            for number, value in enumerate(values, 1)
            for one in value[kind]
        ]
        print_table(["text", "start", "end", "label", "score", "characters"], rows)
        progress.note(
            f"{len(texts) / seconds:.1f} texts/s, {len(texts)} in {seconds:.2f} s on "
            f"{classifier.units}"
        )
    return 0
