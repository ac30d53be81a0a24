"""File names of an OpenVINO model, as its exporters write them; the reason in its errors."""

GRAPH = "openvino_model.xml"
LANGUAGE = "openvino_language_model.xml"
"""The decoder of a model that also sees images; its input is embeddings."""
EMBEDDINGS = "openvino_text_embeddings_model.xml"
"""The embeddings of text, beside `LANGUAGE`."""


def weights_of(graph: str) -> str:
    """Name of a graph's file of weights."""
    return graph.removesuffix(".xml") + ".bin"


def reason_of(error: Exception) -> str:
    """The last line of OpenVINO's message, which has the reason."""
    return str(error).strip().splitlines()[-1]
