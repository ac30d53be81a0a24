"""A folder of OpenVINO IR, made of the tiny GGUF file by OpenVINO GenAI in a process of its own."""

import subprocess
import sys
from pathlib import Path

from paceline.models import ModelFiles, resolve
from support.checkpoints import write_checkpoint

_EXPORT = """
import sys, openvino_genai
openvino_genai.LLMPipeline(sys.argv[1], "CPU", enable_save_ov_model=True)
"""


def write_ir(folder: Path, files: ModelFiles) -> ModelFiles:
    """Make `folder` of a tiny model in a GGUF file; returns it as resolved."""
    write_checkpoint(folder, files)
    (folder / "model.safetensors").unlink()
    gguf = folder / "model.gguf"
    gguf.write_bytes(files.path.read_bytes())
    subprocess.run([sys.executable, "-c", _EXPORT, str(gguf)], check=True, capture_output=True)
    gguf.unlink()
    return resolve(str(folder), folder.parent / "cache")
