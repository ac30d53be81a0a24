import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session")
def quiet_coremltools() -> Iterator[None]:
    """coremltools says much about versions and progress, none of which is about these tests."""
    pytest.importorskip("torch")
    logging.getLogger("coremltools").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("coremltools")
        yield


@pytest.fixture(scope="session")
def block_model(quiet_coremltools: None) -> Any:
    """A transformer block as coremltools converts it. Treat it as read-only."""
    from rehearsal_modules import Block, converted

    return converted(Block())


@pytest.fixture(scope="session")
def block_package(block_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("block") / "block.mlpackage"
    block_model.save(str(path))
    return path


@pytest.fixture(scope="session")
def compressed(block_model: Any) -> Callable[[str], Any]:
    """The block with compressed weights, each way once; see `COMPRESSIONS`."""
    from rehearsal_modules import COMPRESSIONS

    return functools.cache(lambda name: COMPRESSIONS[name](block_model))


@pytest.fixture(scope="session")
def save_program(
    quiet_coremltools: None, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Saves a MIL program as it is built: no pass of the converter changes it."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb  # noqa: N813
    from coremltools.converters.mil.mil import types

    def save(
        build: Callable[..., Any],
        inputs: Mapping[str, np.ndarray],
        *,
        target: str = "iOS18",
        states: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> Path:
        """`build` gets the builder and a variable for each input and each state."""
        specs = [
            mb.TensorSpec(one.shape, types.numpy_type_to_builtin_type(one.dtype))
            for one in inputs.values()
        ]
        specs += [mb.StateTensorSpec(shape, types.fp16) for shape in states.values()]
        # The builder takes the names of inputs from the function's arguments.
        arguments = ", ".join([*inputs, *states])
        scope: dict[str, Any] = {"build": build, "mb": mb}
        exec(f"def program({arguments}): return build(mb, {arguments})", scope)
        opset = ct.target[target]
        program = mb.program(input_specs=specs, opset_version=opset)(scope["program"])
        model = ct.convert(
            program,
            convert_to="mlprogram",
            pass_pipeline=ct.PassPipeline.EMPTY,
            compute_precision=ct.precision.FLOAT32,
            minimum_deployment_target=opset,
            skip_model_load=True,
        )
        path = tmp_path_factory.mktemp("program") / "model.mlpackage"
        model.save(str(path))
        return path

    return save
