"""Joins the metrics of several models: each value gets its model's name as a label."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

__all__ = ["CONTENT_TYPE", "labelled"]

_OWN = {
    "loads": "Models loaded since the start",
    "errors": "Requests that ended with an error before a model had them",
}


class _Families(CollectorRegistry):
    """Metrics that were read."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """All metrics; called by the Prometheus client."""
        yield from self._families


def labelled(texts: Mapping[str, str], counters: Mapping[str, int]) -> bytes:
    """Metrics in Prometheus' text format.

    `texts`: a model's name -> the metrics of its server; `counters`: the values of `_OWN`.
    """
    families: dict[str, Metric] = {}
    for model, text in texts.items():
        for family in text_string_to_metric_families(text):
            joined = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                joined.samples.append(sample._replace(labels={**sample.labels, "model": model}))
    for name, value in counters.items():
        families[name] = CounterMetricFamily(f"paceline_router_{name}", _OWN[name], value)
    return generate_latest(_Families(families.values()))
