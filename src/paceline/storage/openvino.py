"""Names of the files of an OpenVINO model, as its exporters write them."""

GRAPH = "openvino_model.xml"
LANGUAGE = "openvino_language_model.xml"
"""The decoder of a model that also sees images; its input is embeddings."""
EMBEDDINGS = "openvino_text_embeddings_model.xml"
"""The embeddings of text, beside `LANGUAGE`."""


def weights_of(graph: str) -> str:
    """Name of a graph's file of weights."""
    return graph.removesuffix(".xml") + ".bin"
