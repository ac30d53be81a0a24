"""Every rule of `coreml lint`: a planted fault breaks its rule, a near miss does not."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import types

from paceline.errors import ModelError
from paceline_coreml.lint import Finding, lint, report, weights
from paceline_coreml.lint.run_rules import RULES
from support import mil
from support.process import python

pytestmark = pytest.mark.coreml

COMMON = {"small"}
"""Rules that every package of a few operations breaks."""

LARGE = {"large", "process"}
"""Rules about the size of packages; see test_lint."""


def half(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float16)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float16)


X = {"hidden": half(1, 64, 1, 1)}
"""Input of most programs: one row, so that no rule about rows applies."""
STATE = {"k": (1, 2, 32, 32)}
ROWS = {"hidden": half(1, 64, 1, 1), "rope_cos": half(1, 16)}


@dataclass(frozen=True, eq=False)
class Plant:
    """A program with a fault."""

    rule: str
    build: Callable[..., Any]
    inputs: Mapping[str, np.ndarray] = field(default_factory=lambda: X)
    states: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    flexible: Mapping[str, int] = field(default_factory=dict)
    also: str = ""
    """Another rule that the same program breaks."""
    change: Callable[[Any], object] | None = None
    """An edit of the saved specification."""
    where: str | None = None
    """The place that the finding must name."""

    def __str__(self) -> str:
        return self.rule


def array_of(spec: Any, name: str) -> Any:
    return next(one for one in spec.description.input if one.name == name).type.multiArrayType


def unknown(spec: Any) -> None:
    mil.operation(spec, "softmax").type = "softmax_unknown"


def without_bound(spec: Any) -> None:
    array_of(spec, "hidden").shapeRange.sizeRanges[2].upperBound = -1


def with_list(spec: Any) -> None:
    array = array_of(spec, "hidden")
    array.ClearField("shapeRange")
    for rows in (1, 4):
        array.enumeratedShapes.shapes.add(shape=[1, 64, rows, 1])


def of_float32(spec: Any) -> None:
    spec.description.state[0].type.stateType.arrayType.dataType = 65568  # FLOAT32


def wide_update(spec: Any) -> None:
    mil.operation(spec, "mul").outputs[0].type.tensorType.dataType = 11  # FLOAT32


def narrow(spec: Any) -> None:
    mil.operation(spec, "silu").outputs[0].type.tensorType.dimensions[2].constant.size = 1


def silu(mb: Any, *values: Any) -> list[Any]:
    return [mb.silu(x=value, name=f"act{at}") for at, value in enumerate(values)]


def kept(mb: Any, hidden: Any, *rest: Any) -> list[Any]:
    """Doubles the last value, a state."""
    *others, state = rest
    mb.coreml_update_state(state=state, value=mb.mul(x=mb.read_state(input=state), y=np.float16(2)))
    return silu(mb, hidden, *others)


def many(mb: Any, hidden: Any, *states: Any) -> Any:
    for state in states:
        doubled = kept(mb, hidden, state)
    return doubled


def shifted(mb: Any, hidden: Any, window: Any) -> Any:
    old = mb.read_state(input=window)
    rest = mb.slice_by_index(x=old, begin=[0, 0, 1], end=[1, 64, 32])
    row = mb.reshape(x=hidden, shape=[1, 64, 1])
    mb.coreml_update_state(state=window, value=mb.concat(values=[rest, row], axis=2, name="moved"))
    return silu(mb, hidden)


def in_part(mb: Any, hidden: Any, window: Any) -> Any:
    row = mb.reshape(x=hidden, shape=[1, 1, 64])
    new = mb.slice_update(
        x=mb.read_state(input=window), update=row, begin=[0, 3, 0], end=[1, 4, 64], name="part"
    )
    mb.coreml_update_state(state=window, value=new)
    return silu(mb, hidden)


def branch(mb: Any, hidden: Any) -> Any:
    return mb.cond(
        pred=mb.greater(x=mb.reduce_max(x=hidden, keep_dims=False), y=np.float16(0)),
        _true_fn=lambda: mb.mul(x=hidden, y=np.float16(2)),
        _false_fn=lambda: mb.mul(x=hidden, y=np.float16(3)),
    )


def convolution(mb: Any, hidden: Any, weight: Any) -> Any:
    return mb.conv(x=hidden, weight=weight, pad_type="valid")


def scaled(mb: Any, hidden: Any, data: Any, *scales: int, name: str = "weight") -> Any:
    """A convolution with weights that have scales."""
    weight = mb.constexpr_blockwise_shift_scale(data=data, scale=normal(*scales, 1, 1), name=name)
    return convolution(mb, hidden, weight)


def table(mb: Any) -> Any:
    indices = np.zeros((8, 64, 1, 1), np.uint8).astype(types.np_uint4_dtype)
    return mb.constexpr_lut_to_dense(indices=indices, lut=normal(1, 1, 1, 1, 16, 1))


BYTES = np.zeros((8, 64, 1, 1), np.int8)
FOUR_BITS = BYTES.astype(types.np_int4_dtype)
EXPERT = "layers_0_experts_gates_0_weight"

PLANTS = [
    # operations
    Plant(
        "linear",
        lambda mb, x: mb.linear(x=x, weight=normal(8, 1), name="projection"),
        where="projection",
        also="unknown-operation",
    ),
    Plant("linear", lambda mb, x: mb.matmul(x=x, y=normal(1, 1, 1, 64))),
    Plant("topk", lambda mb, x: mb.topk(x=x, k=2, axis=1)[0], also="whole-numbers"),
    Plant("host-operation", lambda mb, x: mb.reduce_argmax(x=x, axis=1), also="whole-numbers"),
    Plant("control-flow", branch, also="unknown-operation"),
    Plant(
        "control-flow",
        lambda mb, x, size: mb.reshape(x=x, shape=mb.add(x=size, y=np.int32(0))),
        {**X, "size": np.zeros(2, np.int32)},
        also="whole-numbers",
    ),
    Plant(
        "depthwise",
        lambda mb, x: mb.conv(x=x, weight=normal(64, 1, 1, 1), groups=64, pad_type="valid"),
    ),
    Plant(
        "unknown-operation",
        lambda mb, x: mb.softmax(x=x, axis=1, name="weights"),
        change=unknown,
        where="weights",
    ),
    # precision
    Plant(
        "float16",
        lambda mb, x: mb.cast(x=mb.silu(x=mb.cast(x=x, dtype="fp32"), name="wide"), dtype="fp16"),
        also="cast",
        where="wide",
    ),
    Plant("cast", lambda mb, x: mb.cast(x=x, dtype="fp16"), {"x": np.zeros((1, 8), np.float32)}),
    Plant(
        "whole-numbers",
        lambda mb, x, n: [mb.silu(x=x), mb.add(x=n, y=np.int32(1))],
        {**X, "n": np.zeros(1, np.int32)},
    ),
    Plant(
        "overflow",
        lambda mb, x: mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[1], name="squares"),
        where="squares",
    ),
    Plant(
        "overflow",
        lambda mb, x: mb.reduce_sum(
            x=mb.pow(x=mb.reshape(x=x, shape=[1, 8, 8, 1]), y=np.float16(2)), axes=[1]
        ),
    ),
    Plant(
        "infinity",
        lambda mb, x: mb.add(
            x=x, y=mb.const(val=np.full((1, 64, 1, 1), -np.inf, np.float16), name="mask")
        ),
        where="mask",
    ),
    # shapes
    Plant("rank", lambda mb, x: mb.reshape(x=x, shape=[1, 2, 4, 8, 1])),
    Plant("axis-length", silu, {"mask": half(1, 1, 1, 16385)}),
    Plant(
        "channels",
        lambda mb, x: convolution(mb, x, normal(1, 65537, 1, 1)),
        {"hidden": half(1, 65537, 1, 1)},
    ),
    Plant("unbounded", silu, flexible={"hidden": 2}, change=without_bound, where="hidden"),
    Plant("listed-shapes", kept, X, STATE, {"hidden": 2}, change=with_list, where="hidden"),
    Plant(
        "mixed-inputs",
        silu,
        {**X, "other": half(1, 64, 1, 1)},
        flexible={"hidden": 2, "other": 2},
        change=with_list,
    ),
    Plant("mixed-inputs", kept, {**X, "scale": half(1, 64, 1, 1)}, STATE, {"hidden": 2}),
    Plant(
        "whole-input",
        lambda mb, ids, k: kept(mb, mb.cast(x=ids, dtype="fp16"), k),
        {"ids": np.zeros((1, 1), np.int32)},
        STATE,
        {"ids": 1},
        also="cast",
        where="ids",
    ),
    # states
    Plant("state-type", kept, X, STATE, change=of_float32, where="k"),
    Plant("state-width", kept, X, {"k": (1, 2, 32, 40)}, where="k"),
    Plant("over-40-states", many, X, {f"k{layer}": (1, 32) for layer in range(41)}),
    Plant("state-shift", shifted, X, {"window": (1, 64, 32)}, where="moved"),
    Plant("state-part", in_part, X, {"window": (1, 32, 64)}, where="part"),
    Plant("state-update-type", kept, X, STATE, also="float16", change=wide_update),
    # weights
    Plant(
        "int4-blocks", lambda mb, x: scaled(mb, x, FOUR_BITS, 8, 2, name="blocks"), where="blocks"
    ),
    Plant("table-scale", lambda mb, x: scaled(mb, x, table(mb), 8, 1)),
    Plant(
        "table-state", lambda mb, x, k: [convolution(mb, x, table(mb)), *kept(mb, x, k)], X, STATE
    ),
    Plant("expert-scale", lambda mb, x: scaled(mb, x, BYTES, 1, 1, name=EXPERT), where=EXPERT),
    Plant("small", silu),
    # rows; see test_lint_row_order for models
    Plant(
        "row-order",
        lambda mb, x, cos: [mb.reshape(x=x, shape=[1, -1, 4, 16], name="by_head"), *silu(mb, cos)],
        ROWS,
        flexible={"hidden": 2, "rope_cos": 0},
        where="by_head",
    ),
    Plant(
        "row-order-unknown",
        lambda mb, x: mb.reverse(x=x, axes=[2], name="backwards"),
        flexible={"hidden": 2},
        also="unknown-operation",
        where="backwards",
    ),
    Plant("declared-shape", silu, flexible={"hidden": 2}, change=narrow, where="act0"),
]


@pytest.mark.parametrize("planted", PLANTS, ids=str)
def test_an_injected_fault_breaks_its_rule(planted: Plant, tmp_path: Path):
    path = mil.save_program(
        tmp_path / "model.mlpackage",
        planted.build,
        planted.inputs,
        states=planted.states,
        flexible=planted.flexible,
    )
    if planted.change:
        mil.edit(path, planted.change)
    found = lint(path)
    named = [one for one in found if one.rule == planted.rule]
    assert named, f"{planted.rule} is not among {[one.rule for one in found]}"
    if planted.where is not None:
        assert planted.where in {one.where for one in named}
    assert {one.shard for one in found} == {"model.mlpackage"}
    others = {one.rule for one in found} - COMMON - {planted.rule, "row-order-unknown"}
    assert others <= {planted.also}
    assert report(path).passed == all(one.verdict != "fail" for one in found)


def test_every_lint_rule_has_a_test_a_source_and_a_description():
    assert {one.name for one in RULES} == {one.rule for one in PLANTS} | LARGE
    assert len({one.name for one in RULES}) == len(RULES)
    for one in RULES:
        assert one.source
        assert one.meaning.endswith("."), one.name


def test_a_valid_package_has_no_findings(tmp_path: Path):
    wide, narrow = normal(8192, 1024, 1, 1), normal(1024, 8192, 1, 1)

    def build(mb: Any, hidden: Any) -> Any:
        inner = mb.silu(x=mb.conv(x=hidden, weight=wide, pad_type="valid"))
        return mb.add(x=hidden, y=mb.conv(x=inner, weight=narrow, pad_type="valid"))

    path = mil.save_program(tmp_path / "clean.mlpackage", build, {"hidden": half(1, 1024, 1, 32)})
    assert lint(path) == []
    found = report(path)
    assert found.passed
    assert found.tables == []
    assert found.text.startswith("lint: clean.mlpackage passes: 0 fail, 0 warn")


NEAR_MISSES: dict[str, Callable[..., Any]] = {
    "the square of a projection": lambda mb, hidden: mb.reduce_sum(
        x=mb.pow(x=convolution(mb, hidden, normal(8, 64, 1, 1)), y=np.float16(2)), axes=[1]
    ),
    "a square root": lambda mb, hidden: mb.reduce_sum(
        x=mb.pow(x=hidden, y=np.float16(0.5)), axes=[1]
    ),
    "groups of several channels": lambda mb, hidden: mb.conv(
        x=hidden, weight=normal(64, 2, 1, 1), groups=32, pad_type="valid"
    ),
    "a constant top-k": lambda mb, hidden: mb.add(
        x=hidden, y=mb.topk(x=normal(1, 64, 1, 2), k=1, axis=-1)[0]
    ),
}


@pytest.mark.parametrize("what", NEAR_MISSES)
def test_a_near_miss_is_not_reported(what: str, tmp_path: Path):
    path = mil.save_program(tmp_path / "model.mlpackage", NEAR_MISSES[what], X)
    assert {one.rule for one in lint(path)} <= COMMON


# --- sizes


def fill_up(package: Path, megabytes: int) -> None:
    """Grow a package with a sparse file."""
    with (package / "Data" / "weights.filler").open("wb") as file:
        file.truncate(megabytes << 20)


@pytest.mark.parametrize(
    ("megabytes", "rules"), [(13, {"small": "warn"}), (1500, {}), (2049, {"large": "warn"})]
)
def test_package_size_is_checked(megabytes: int, rules: dict[str, str], tmp_path: Path):
    path = mil.save_program(tmp_path / "model.mlpackage", lambda mb, hidden: mb.silu(x=hidden), X)
    fill_up(path, megabytes)
    assert {one.rule: one.verdict for one in lint(path)} == rules


# --- artifacts


def test_a_converted_artifact_passes(tiny_core_ml: Path):
    found = lint(tiny_core_ml)
    assert [one for one in found if one.verdict == "fail"] == []
    shards = {path.name for path in tiny_core_ml.glob("*.mlpackage")}
    assert len(shards) == 4
    assert {one.shard for one in found} == shards
    assert report(tiny_core_ml).passed


def test_all_packages_of_an_artifact_share_a_process(
    tiny_core_ml: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(weights, "size_of", lambda _: 800 << 20)
    (found,) = [one for one in lint(tiny_core_ml) if one.rule == "process"]
    assert (found.shard, found.verdict) == (tiny_core_ml.name, "warn")
    assert found.what == "3200 MB; expected at most 3072"


def test_an_incomplete_artifact_is_rejected(tiny_core_ml: Path, tmp_path: Path):
    copy = Path(shutil.copytree(tiny_core_ml, tmp_path / "copy"))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["layer_shards"][1]["start"] -= 1
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match="layers 1 to 2"):
        lint(copy)
    with pytest.raises(ModelError, match=r"manifest\.json: No such file"):
        report(tmp_path)
    with pytest.raises(ModelError, match=r"none\.mlpackage"):
        lint(tmp_path / "none.mlpackage")


def test_a_report_has_text_tables_and_json(tmp_path: Path):
    path = mil.save_program(
        tmp_path / "model.mlpackage",
        lambda mb, hidden: [
            mb.linear(x=mb.linear(x=hidden, weight=normal(8, 1)), weight=normal(8, 8)),
            mb.topk(x=hidden, k=2, axis=1)[0],
        ],
        X,
    )
    found = report(path)
    assert not found.passed
    assert found.text.startswith("lint: model.mlpackage does NOT pass: 3 fail, 2 warn")
    assert "\nlinear: Make every projection a 1x1 convolution." in found.text
    ((_, head, lines),) = found.tables
    assert head[:3] == ["verdict", "package", "rule"]
    assert [line[2] for line in lines[:2]] == ["linear", "topk"]
    assert "and 1 more" in lines[0][3]
    assert [line[0] for line in lines] == sorted(
        (line[0] for line in lines), key=["fail", "warn"].index
    )
    value = json.loads(json.dumps(found.value))
    assert value["counts"]["fail"] == 3
    assert Finding(**value["findings"][0]) == lint(path)[0]


def test_neither_torch_nor_coremltools_is_loaded(tiny_core_ml: Path):
    code = (
        "import sys, pathlib; from paceline_coreml.lint import report; "
        f"report(pathlib.Path({str(tiny_core_ml)!r})); "
        "print([name for name in ('coremltools', 'torch') if name in sys.modules])"
    )
    done = python("-c", code)
    assert (done.stdout, done.stderr) == ("[]\n", "")
