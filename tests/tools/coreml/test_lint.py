"""Every rule of `coreml lint`: a fault is planted for each, and called by the rule's name."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("coremltools")

from coremltools.converters.mil.mil import types  # noqa: E402

from paceline.errors import ModelError  # noqa: E402
from paceline.tools.coreml.lint import Finding, lint, report, run_rules  # noqa: E402
from paceline.tools.coreml.lint.run_rules import RULES  # noqa: E402
from support import mil  # noqa: E402
from support.coreml import tiny_artifact  # noqa: E402

pytestmark = pytest.mark.coreml

COMMON = {"small", "padding", "flexible"}
"""What every package of a few operations is told."""


def half(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float16)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float16)


X = {"hidden": half(1, 64, 1, 1)}
"""What most programs here take: one row, so that nothing is said of rows."""


@dataclass(frozen=True, eq=False)
class Plant:
    """A program with a fault."""

    rule: str
    build: Callable[..., Any]
    inputs: Mapping[str, np.ndarray] = field(default_factory=lambda: X)
    states: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    flexible: Mapping[str, int] = field(default_factory=dict)
    also: frozenset[str] = frozenset()
    """Other rules that the same program breaks."""
    change: Callable[[Any], object] | None = None
    """What is done to the saved specification."""
    where: str | None = None
    """What the finding must name, if the name is given here."""

    def __str__(self) -> str:
        return self.rule


PLANTS: list[Plant] = []


def plant(rule: str, build: Callable[..., Any], *also: str, **more: Any) -> None:
    PLANTS.append(Plant(rule, build, also=frozenset(also), **more))


def operation(spec: Any, kind: str) -> Any:
    function = spec.mlProgram.functions["main"]
    operations = function.block_specializations[function.opset].operations
    return next(op for op in operations if op.type == kind)


# --- operations

plant(
    "linear",
    lambda mb, hidden: mb.linear(x=hidden, weight=normal(8, 1), name="projection"),
    where="projection",
)
plant("linear", lambda mb, hidden: mb.matmul(x=hidden, y=normal(1, 1, 1, 64)))
plant("topk", lambda mb, hidden: mb.topk(x=hidden, k=2, axis=1)[0], "whole-numbers")
plant(
    "host-operation",
    lambda mb, hidden: mb.gather(x=hidden, indices=np.array([3, 1], np.int32), axis=1),
)
plant("host-operation", lambda mb, hidden: mb.reduce_argmax(x=hidden, axis=1), "whole-numbers")


def branch(mb: Any, hidden: Any) -> Any:
    large = mb.greater(x=mb.reduce_max(x=hidden, keep_dims=False), y=np.float16(0))
    return mb.cond(
        pred=large,
        _true_fn=lambda: mb.mul(x=hidden, y=np.float16(2)),
        _false_fn=lambda: mb.mul(x=hidden, y=np.float16(3)),
    )


plant("control-flow", branch, "unseen-operation")
plant(
    "control-flow", lambda mb, hidden: mb.non_zero(x=hidden), "unknown-operation", "whole-numbers"
)
plant(
    "control-flow",
    lambda mb, hidden, size: mb.reshape(x=hidden, shape=mb.add(x=size, y=np.int32(0))),
    "whole-numbers",
    inputs={**X, "size": np.zeros(2, np.int32)},
)
plant(
    "depthwise",
    lambda mb, hidden: mb.conv(x=hidden, weight=normal(64, 1, 1, 1), groups=64, pad_type="valid"),
)


def of_tomorrow(spec: Any) -> None:
    operation(spec, "softmax").type = "softmax_of_tomorrow"


plant(
    "unknown-operation",
    lambda mb, hidden: mb.softmax(x=hidden, axis=1, name="weights"),
    change=of_tomorrow,
    where="weights",
)
plant("unseen-operation", lambda mb, hidden: mb.mul(x=mb.erf(x=hidden), y=np.float16(2)))

# --- numbers

plant(
    "float16",
    lambda mb, hidden: mb.cast(
        x=mb.silu(x=mb.cast(x=hidden, dtype="fp32"), name="wide"), dtype="fp16"
    ),
    "cast",
    where="wide",
)
plant("cast", lambda mb, x: mb.cast(x=x, dtype="fp16"), inputs={"x": np.zeros((1, 8), np.float32)})
plant(
    "whole-numbers",
    lambda mb, hidden, n: [mb.silu(x=hidden), mb.add(x=n, y=np.int32(1))],
    inputs={**X, "n": np.zeros(1, np.int32)},
)
plant(
    "overflow",
    lambda mb, hidden: mb.reduce_mean(x=mb.mul(x=hidden, y=hidden), axes=[1], name="squares"),
    where="squares",
)
plant(
    "overflow",
    lambda mb, hidden: mb.reduce_sum(
        x=mb.pow(x=mb.reshape(x=hidden, shape=[1, 8, 8, 1]), y=np.float16(2)), axes=[1]
    ),
)
plant(
    "overflow",
    lambda mb, hidden: mb.reduce_sum_square(x=mb.add(x=hidden, y=normal(1, 64, 1, 1)), axes=[1]),
    "unseen-operation",
)
plant(
    "infinity",
    lambda mb, hidden: mb.add(
        x=hidden, y=mb.const(val=np.full((1, 64, 1, 1), -np.inf, np.float16), name="mask")
    ),
    where="mask",
)
plant(
    "infinity",
    lambda mb, hidden: mb.clip(x=hidden, alpha=np.float16(0), beta=np.float16(np.inf)),
    "unseen-operation",
)

# --- shapes

plant("rank", lambda mb, hidden: mb.reshape(x=hidden, shape=[1, 2, 4, 8, 1]))
plant("axis-length", lambda mb, mask: mb.silu(x=mask), inputs={"mask": half(1, 1, 1, 16385)})
plant(
    "channels",
    lambda mb, hidden: mb.conv(x=hidden, weight=normal(1, 65537, 1, 1), pad_type="valid"),
    inputs={"hidden": half(1, 65537, 1, 1)},
)
plant("padding", lambda mb, hidden: mb.silu(x=hidden))
plant("flexible", lambda mb, hidden: mb.silu(x=hidden), flexible={"hidden": 2})


def array_of(spec: Any, name: str) -> Any:
    return next(one for one in spec.description.input if one.name == name).type.multiArrayType


def without_bound(spec: Any) -> None:
    array_of(spec, "hidden").shapeRange.sizeRanges[2].upperBound = -1


plant(
    "unbounded",
    lambda mb, hidden: mb.silu(x=hidden),
    flexible={"hidden": 2},
    change=without_bound,
    where="hidden",
)


def with_list(spec: Any) -> None:
    array = array_of(spec, "hidden")
    array.ClearField("shapeRange")
    for rows in (1, 4):
        array.enumeratedShapes.shapes.add(shape=[1, 64, rows, 1])


def kept(mb: Any, hidden: Any, *rest: Any) -> list[Any]:
    *others, state = rest
    old = mb.read_state(input=state)
    mb.coreml_update_state(state=state, value=mb.mul(x=old, y=np.float16(2)))
    return [mb.silu(x=one) for one in (hidden, *others)]


STATE = {"k": (1, 2, 32, 32)}
plant("listed-shapes", kept, states=STATE, flexible={"hidden": 2}, change=with_list, where="hidden")
plant(
    "mixed-inputs",
    lambda mb, hidden, other: [mb.silu(x=hidden), mb.silu(x=other)],
    inputs={**X, "other": half(1, 64, 1, 1)},
    flexible={"hidden": 2, "other": 2},
    change=with_list,
)
plant(
    "mixed-inputs",
    kept,
    inputs={**X, "scale": half(1, 64, 1, 1)},
    states=STATE,
    flexible={"hidden": 2},
)
plant(
    "whole-input",
    lambda mb, ids, k: kept(mb, mb.cast(x=ids, dtype="fp16"), k),
    "cast",
    inputs={"ids": np.zeros((1, 1), np.int32)},
    states=STATE,
    flexible={"ids": 1},
    where="ids",
)

# --- states


def of_float32(spec: Any) -> None:
    spec.description.state[0].type.stateType.arrayType.dataType = 65568  # FLOAT32


plant("state-type", kept, states=STATE, change=of_float32, where="k")
plant("state-width", kept, states={"k": (1, 2, 32, 40)}, where="k")


def three(mb: Any, hidden: Any, *states: Any) -> Any:
    for state in states:
        kept(mb, hidden, state)
    return mb.silu(x=hidden)


plant("state-count", three, states=dict.fromkeys(("k", "v", "window"), (1, 32)))


def shifted(mb: Any, hidden: Any, window: Any) -> Any:
    old = mb.read_state(input=window)
    rest = mb.slice_by_index(x=old, begin=[0, 0, 1], end=[1, 64, 32])
    row = mb.reshape(x=hidden, shape=[1, 64, 1])
    mb.coreml_update_state(state=window, value=mb.concat(values=[rest, row], axis=2, name="moved"))
    return mb.silu(x=hidden)


plant("state-shift", shifted, states={"window": (1, 64, 32)}, where="moved")


def in_part(mb: Any, hidden: Any, window: Any) -> Any:
    old = mb.read_state(input=window)
    row = mb.reshape(x=hidden, shape=[1, 1, 64])
    new = mb.slice_update(x=old, update=row, begin=[0, 3, 0], end=[1, 4, 64], name="part")
    mb.coreml_update_state(state=window, value=new)
    return mb.silu(x=hidden)


plant("state-part", in_part, states={"window": (1, 32, 64)}, where="part")


def wide_update(spec: Any) -> None:
    operation(spec, "mul").outputs[0].type.tensorType.dataType = 11  # FLOAT32


plant("state-update-type", kept, "float16", states=STATE, change=wide_update)

# --- weights


def convolution(mb: Any, hidden: Any, weight: Any) -> Any:
    return mb.conv(x=hidden, weight=weight, pad_type="valid")


def blocks(mb: Any, hidden: Any) -> Any:
    data = np.zeros((8, 64, 1, 1), np.int8).astype(types.np_int4_dtype)
    return convolution(
        mb,
        hidden,
        mb.constexpr_blockwise_shift_scale(data=data, scale=normal(8, 2, 1, 1), name="blocks"),
    )


def table(mb: Any) -> Any:
    indices = np.zeros((8, 64, 1, 1), np.uint8).astype(types.np_uint4_dtype)
    return mb.constexpr_lut_to_dense(indices=indices, lut=normal(1, 1, 1, 1, 16, 1))


def scaled_table(mb: Any, hidden: Any) -> Any:
    scaled = mb.constexpr_blockwise_shift_scale(data=table(mb), scale=normal(8, 1, 1, 1))
    return convolution(mb, hidden, scaled)


def one_scale(mb: Any, hidden: Any) -> Any:
    data = np.zeros((8, 64, 1, 1), np.int8)
    weight = mb.constexpr_blockwise_shift_scale(
        data=data, scale=normal(1, 1, 1, 1), name="layers_0_experts_gates_0_weight"
    )
    return convolution(mb, hidden, weight)


plant("int4-blocks", blocks, where="blocks")
plant("table-scale", scaled_table)
plant(
    "table-state",
    lambda mb, hidden, k: [convolution(mb, hidden, table(mb)), *kept(mb, hidden, k)],
    states=STATE,
)
plant("expert-scale", one_scale, where="layers_0_experts_gates_0_weight")
plant("small", lambda mb, hidden: mb.silu(x=hidden))


# --- rows, in the small; see test_lint_rows for models


def rows(count: int = 1) -> Mapping[str, np.ndarray]:
    return {"hidden": half(1, 64, count, 1), "rope_cos": half(count, 16)}


FLEXIBLE = {"hidden": 2, "rope_cos": 0}
plant(
    "row-order",
    lambda mb, hidden, rope_cos: [
        mb.reshape(x=hidden, shape=[1, -1, 4, 16], name="by_head"),
        mb.silu(x=rope_cos),
    ],
    inputs=rows(),
    flexible=FLEXIBLE,
    where="by_head",
)
plant(
    "row-order",
    lambda mb, hidden, rope_cos: mb.mul(
        x=mb.transpose(
            x=mb.reshape(x=hidden, shape=[1, 4, 4, 16]), perm=[0, 2, 1, 3], name="by_head"
        ),
        y=rope_cos,
        name="turned",
    ),
    inputs=rows(4),
    where="turned",
)
plant(
    "row-order",
    lambda mb, hidden, rope_cos: [
        mb.reshape(x=hidden, shape=[1, 1, -1, 1], name="flat"),
        mb.silu(x=rope_cos),
    ],
    inputs=rows(),
    flexible=FLEXIBLE,
    where="flat",
)
plant(
    "row-order-unknown",
    lambda mb, hidden: mb.reverse(x=hidden, axes=[2], name="backwards"),
    "unknown-operation",
    flexible={"hidden": 2},
    where="backwards",
)
plant("row-order-unknown", lambda mb, x: mb.silu(x=x), inputs={"x": half(1, 64, 4, 1)})


def narrow(spec: Any) -> None:
    made = operation(spec, "silu").outputs[0].type.tensorType.dimensions[2]
    made.constant.size = 1


plant(
    "declared-shape",
    lambda mb, hidden: mb.silu(x=hidden, name="act"),
    flexible={"hidden": 2},
    change=narrow,
    where="act",
)


@pytest.mark.parametrize("planted", PLANTS, ids=str)
def test_a_planted_fault_breaks_its_rule(planted: Plant, tmp_path: Path):
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
    assert others <= planted.also | {"unseen-operation"}
    rule = next(one for one in RULES if one.name == planted.rule)
    assert {one.verdict for one in named} == {rule.verdict}
    assert report(path).passed == all(one.verdict != "fail" for one in found)


def test_every_rule_has_a_planted_fault():
    elsewhere = {"large", "over-250-mb", "process"}
    assert {one.name for one in RULES} == {one.rule for one in PLANTS} | elsewhere


def test_only_high_confidence_fails_and_every_rule_has_a_source():
    for one in RULES:
        assert one.verdict != "fail" or one.confidence == "high", one.name
        assert one.verdict == "warn" or one.confidence != "medium" or one.verdict == "info"
        assert one.source
        assert one.meaning.endswith("."), one.name
    assert len({one.name for one in RULES}) == len(RULES)


def test_a_package_that_breaks_no_rule_has_no_findings(tmp_path: Path):
    wide, narrow = normal(8192, 1024, 1, 1), normal(1024, 8192, 1, 1)

    def build(mb: Any, hidden: Any) -> Any:
        inner = mb.silu(x=mb.conv(x=hidden, weight=wide, pad_type="valid"))
        return mb.add(x=hidden, y=mb.conv(x=inner, weight=narrow, pad_type="valid"))

    path = mil.save_program(tmp_path / "clean.mlpackage", build, {"hidden": half(1, 1024, 1, 32)})
    assert lint(path) == []
    found = report(path)
    assert found.passed
    assert found.tables == []
    assert found.text.startswith("lint: clean.mlpackage passes: 0 fail, 0 warn, 0 info")


NEIGHBOURS: dict[str, Callable[..., Any]] = {
    "what is divided before may be squared": lambda mb, hidden: mb.reduce_mean(
        x=mb.mul(
            x=(small := mb.real_div(x=hidden, y=mb.reduce_max(x=hidden, axes=[1], keep_dims=True))),
            y=small,
        ),
        axes=[1],
    ),
    "so may what comes out of a projection": lambda mb, hidden: mb.reduce_sum(
        x=mb.pow(x=convolution(mb, hidden, normal(8, 64, 1, 1)), y=np.float16(2)), axes=[1]
    ),
    "a root is no square": lambda mb, hidden: mb.reduce_sum(
        x=mb.pow(x=hidden, y=np.float16(0.5)), axes=[1]
    ),
    "products of what is computed are no projections": lambda mb, hidden: mb.matmul(
        x=hidden, y=hidden, transpose_y=True
    ),
    "-1e4 is a number": lambda mb, hidden: mb.add(x=hidden, y=np.float16(-1e4)),
    "groups of several channels are not depthwise": lambda mb, hidden: mb.conv(
        x=hidden, weight=normal(64, 2, 1, 1), groups=32, pad_type="valid"
    ),
    "8 bits with a scale for each channel": lambda mb, hidden: convolution(
        mb,
        hidden,
        mb.constexpr_blockwise_shift_scale(
            data=np.zeros((8, 64, 1, 1), np.int8),
            scale=normal(8, 1, 1, 1),
            name="layers_0_experts_gates_0_weight",
        ),
    ),
    "a constant is made once": lambda mb, hidden: mb.add(
        x=hidden, y=mb.topk(x=normal(1, 64, 1, 2), k=1, axis=-1)[0]
    ),
}


@pytest.mark.parametrize("what", NEIGHBOURS)
def test_a_near_miss_is_not_a_fault(what: str, tmp_path: Path):
    path = mil.save_program(tmp_path / "model.mlpackage", NEIGHBOURS[what], X)
    assert {one.rule for one in lint(path)} <= COMMON | {"unseen-operation"}


def test_a_state_written_whole_through_a_mask_is_not_a_shift(tmp_path: Path):
    def build(mb: Any, hidden: Any, k: Any) -> Any:
        old = mb.read_state(input=k)
        new = mb.add(x=mb.mul(x=old, y=np.float16(0.5)), y=hidden)
        whole = mb.slice_update(
            x=old, update=new, begin=[0] * 4, end=[1, 64, 1, 32], begin_mask=[True] * 4,
            end_mask=[True] * 4,
        )  # fmt: skip
        mb.coreml_update_state(state=k, value=whole)
        return mb.silu(x=hidden)

    path = mil.save_program(tmp_path / "model.mlpackage", build, X, states={"k": (1, 64, 1, 32)})
    assert {one.rule for one in lint(path)} <= COMMON


# --- sizes


def fill_up(package: Path, megabytes: int) -> None:
    """Make a package as large, without taking the space."""
    with (package / "Data" / "weights.filler").open("wb") as file:
        file.truncate(megabytes << 20)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_artifact(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("megabytes", "rule", "verdict"),
    [
        (13, "small", "warn"),
        (100, None, None),
        (1500, "over-250-mb", "info"),
        (2049, "large", "warn"),
    ],
)
def test_the_size_of_a_package_is_checked(
    megabytes: int, rule: str | None, verdict: str | None, tmp_path: Path
):
    path = mil.save_program(tmp_path / "model.mlpackage", lambda mb, hidden: mb.silu(x=hidden), X)
    fill_up(path, megabytes)
    found = {one.rule: one.verdict for one in lint(path)}
    sizes = {name: found[name] for name in ("small", "large", "over-250-mb") if name in found}
    assert sizes == ({rule: verdict} if rule else {})


# --- artifacts


def test_a_converted_artifact_passes(artifact: Path):
    found = lint(artifact)
    assert [one for one in found if one.verdict == "fail"] == []
    shards = {path.name for path in artifact.glob("*.mlpackage")}
    assert len(shards) == 4
    assert {one.shard for one in found} == shards
    assert report(artifact).passed


def test_all_packages_of_an_artifact_share_a_process(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_rules, "bytes_of", lambda _: 800 << 20)
    (found,) = [one for one in lint(artifact) if one.rule == "process"]
    assert (found.shard, found.verdict) == (artifact.name, "warn")
    assert found.what == "3200 MB; expected 3072 or less"


def test_an_incomplete_artifact_is_rejected(artifact: Path, tmp_path: Path):
    import shutil

    copy = Path(shutil.copytree(artifact, tmp_path / "copy"))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["layer_shards"][1]["start"] -= 1
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match="begins at layer 1, which the shard before it holds too"):
        lint(copy)
    with pytest.raises(ModelError, match=r"manifest\.json: No such file"):
        report(tmp_path)
    with pytest.raises(ModelError, match=r"none\.mlpackage is no folder"):
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
    assert "\nlinear: A projection that is not a convolution." in found.text
    ((_, head, lines),) = found.tables
    assert head[:3] == ["verdict", "package", "rule"]
    assert [line[2] for line in lines[:2]] == ["linear", "topk"]
    assert "and 1 more" in lines[0][3]
    assert [line[0] for line in lines] == sorted(
        (line[0] for line in lines), key=["fail", "warn", "info"].index
    )
    value = json.loads(json.dumps(found.value))
    assert value["counts"]["fail"] == 3
    assert Finding(**value["findings"][0]) == lint(path)[0]


def test_neither_torch_nor_coremltools_is_loaded(artifact: Path):
    code = (
        "import sys, pathlib; from paceline.tools.coreml.lint import report; "
        f"report(pathlib.Path({str(artifact)!r})); "
        "print([name for name in ('coremltools', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
