"""The `openvino` engine: PagedAttention on the CPU, several sequences a call, prefixes shared."""

from paceline.engines.openvino.engine import OpenVinoEngine

__all__ = ["OpenVinoEngine"]
