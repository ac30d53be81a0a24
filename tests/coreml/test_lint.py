"""Every rule of `coreml lint`: a planted fault breaks its rule, a near miss does not."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("coremltools")

from paceline.errors import ModelError  # noqa: E402
from paceline_coreml.lint import Finding, lint, report, run_rules  # noqa: E402
from paceline_coreml.lint.run_rules import RULES  # noqa: E402
from support import mil  # noqa: E402
from support.coreml_lint_plants import (  # noqa: E402
    COMMON,
    LARGE,
    PLANTS,
    Plant,
    X,
    convolution,
    half,
    normal,
)

pytestmark = pytest.mark.coreml


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
    assert others <= {planted.also, "unseen-operation"}
    rule = next(one for one in RULES if one.name == planted.rule)
    assert {one.verdict for one in named} == {rule.verdict}
    assert report(path).passed == all(one.verdict != "fail" for one in found)


def test_every_rule_has_a_planted_fault():
    assert {one.name for one in RULES} == {one.rule for one in PLANTS} | LARGE


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


NEAR_MISSES: dict[str, Callable[..., Any]] = {
    "a scaled square": lambda mb, hidden: mb.reduce_mean(
        x=mb.mul(
            x=(small := mb.real_div(x=hidden, y=mb.reduce_max(x=hidden, axes=[1], keep_dims=True))),
            y=small,
        ),
        axes=[1],
    ),
    "the square of a projection": lambda mb, hidden: mb.reduce_sum(
        x=mb.pow(x=convolution(mb, hidden, normal(8, 64, 1, 1)), y=np.float16(2)), axes=[1]
    ),
    "a square root": lambda mb, hidden: mb.reduce_sum(
        x=mb.pow(x=hidden, y=np.float16(0.5)), axes=[1]
    ),
    "a product of computed tensors": lambda mb, hidden: mb.matmul(
        x=hidden, y=hidden, transpose_y=True
    ),
    "-1e4": lambda mb, hidden: mb.add(x=hidden, y=np.float16(-1e4)),
    "groups of several channels": lambda mb, hidden: mb.conv(
        x=hidden, weight=normal(64, 2, 1, 1), groups=32, pad_type="valid"
    ),
    "8 bits with a scale per channel": lambda mb, hidden: convolution(
        mb,
        hidden,
        mb.constexpr_blockwise_shift_scale(
            data=np.zeros((8, 64, 1, 1), np.int8),
            scale=normal(8, 1, 1, 1),
            name="layers_0_experts_gates_0_weight",
        ),
    ),
    "a constant top-k": lambda mb, hidden: mb.add(
        x=hidden, y=mb.topk(x=normal(1, 64, 1, 2), k=1, axis=-1)[0]
    ),
}


@pytest.mark.parametrize("what", NEAR_MISSES)
def test_a_near_miss_is_not_a_fault(what: str, tmp_path: Path):
    path = mil.save_program(tmp_path / "model.mlpackage", NEAR_MISSES[what], X)
    assert {one.rule for one in lint(path)} <= COMMON | {"unseen-operation"}


# --- sizes


def fill_up(package: Path, megabytes: int) -> None:
    """Grow a package with a sparse file."""
    with (package / "Data" / "weights.filler").open("wb") as file:
        file.truncate(megabytes << 20)


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
    monkeypatch.setattr(run_rules, "size_of", lambda _: 800 << 20)
    (found,) = [one for one in lint(tiny_core_ml) if one.rule == "process"]
    assert (found.shard, found.verdict) == (tiny_core_ml.name, "warn")
    assert found.what == "3200 MB; expected 3072 or less"


def test_an_incomplete_artifact_is_rejected(tiny_core_ml: Path, tmp_path: Path):
    import shutil

    copy = Path(shutil.copytree(tiny_core_ml, tmp_path / "copy"))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["layer_shards"][1]["start"] -= 1
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match="layer 1"):
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


def test_neither_torch_nor_coremltools_is_loaded(tiny_core_ml: Path):
    code = (
        "import sys, pathlib; from paceline_coreml.lint import report; "
        f"report(pathlib.Path({str(tiny_core_ml)!r})); "
        "print([name for name in ('coremltools', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
