"""Gates before a conversion: one layer of random or of real weights, converted and checked.

A whole model takes an hour to convert and to compile, and one operation that leaves the Neural
Engine spoils it. So a layer of the model's shape comes first, then one with its weights.
"""

from paceline_coreml.probe.layer_shape import LayerShape, parse_shape
from paceline_coreml.probe.report import ProbeOptions, probe_layer, probe_shape, run_gates

__all__ = [
    "LayerShape",
    "ProbeOptions",
    "parse_shape",
    "probe_layer",
    "probe_shape",
    "run_gates",
]
