"""How peers are chosen, asked and compared, with peers of our own making."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest, ModelError
from paceline.models import ModelFiles
from paceline.runtime.model import Model
from paceline.storage.report import Report
from paceline.verify.suite import SuitePrompt
from paceline_lab import client
from paceline_lab.bench.record import Row, parse_record
from paceline_lab.bench.turns import PromptTurn
from paceline_lab.cli.options import MeasurementArguments
from paceline_lab.cli.peers import peers as command
from paceline_lab.client import AS_SERVED, Access
from paceline_lab.peers import llama_server
from paceline_lab.peers.llama_server import LlamaServer, ServerBinary
from paceline_lab.peers.measure import (
    DECODE,
    OWN,
    WHOLE,
    PacelinePeer,
    Peer,
    PeerAnswer,
    PeerContender,
    ServerPeer,
    contenders_of,
    measure,
)
from paceline_lab.peers.summary import is_exact, speeds, tables
from support.faulty import FaultyEngine, other_picks_when_drafting
from support.reports import report_of
from support.server import running

TEXT = "this is one and the user, this is one and the user"
PROMPT = SuitePrompt("one", "chat", [{"role": "user", "content": TEXT}])
QUESTION = PromptTurn("one", PROMPT, 1, PROMPT.messages, [1, 2, 3])


def answered(*tokens: int, seconds: float = 1.0, **more: Any) -> PeerAnswer:
    return PeerAnswer(" ".join(map(str, tokens)), tokens, len(tokens), 0.1, seconds, **more)


@dataclass
class Fake:
    """Gives the answers it has for a mode, one after the other and then again."""

    answers: Mapping[str, Sequence[PeerAnswer]]
    name: str = "fake"
    settings: Mapping[str, Any] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)

    @property
    def modes(self) -> Sequence[str]:
        return tuple(self.answers)

    def answer(self, question: PromptTurn, max_tokens: int, mode: str) -> PeerAnswer:
        given = self.answers[mode]
        turn = self.asked.count((question.name, mode))
        self.asked.append((question.name, mode))
        return replace(given[turn % len(given)])


PACELINE = Fake({"plain": [answered(7, 8, 9)], "auto": [answered(7, 8, 9, seconds=0.5)]})


def rows_of(peer: Peer, rounds: int = 1) -> dict[str, Row]:
    ours = [PeerContender(mode, "plain", PACELINE, mode) for mode in PACELINE.modes]
    theirs = contenders_of(PACELINE, [peer])[2:]  # type: ignore[arg-type]
    return {
        row.contender: row
        for row in measure(QUESTION, [*ours, *theirs], rounds=rounds, max_tokens=9)
    }


def test_speeds_are_relative_to_our_and_the_peers_plain_decoding():
    found = rows_of(Fake({"plain": [answered(7, 8, 9, seconds=4)], "lookup": [answered(7, 8, 9)]}))
    assert [*found] == ["plain", "auto", "fake, plain", "fake, lookup"]
    assert found["fake, lookup"].measures == {
        "decode_tokens_per_second": [2.0],
        "first_token_seconds": [0.1],
        "decode_seconds": [1.0],
        "answer_tokens_per_second": [3 / 1.1],
        "ratio": [1.0],
        OWN: [4.0],
    }
    assert OWN not in found["fake, plain"].measures
    assert found["auto"].measures["ratio"] == found["auto"].measures[OWN] == [2.0]


def test_ratios_are_computed_within_a_round():
    slow, fast = answered(7, 8, 9, seconds=4), answered(7, 8, 9, seconds=1)
    found = rows_of(Fake({"plain": [slow, fast], "lookup": [fast, slow]}), rounds=2)
    assert found["fake, lookup"].measures[OWN] == [4.0, 0.25]
    assert found["fake, plain"].measures["ratio"] == [0.25, 1.0]


@pytest.mark.parametrize(("lookup", "same"), [([(7, 8)], True), ([(7, 8), (7, 8, 9)], False)])
def test_outputs_are_compared_with_the_peers_own(lookup: list[tuple[int, ...]], same: bool):
    peer = Fake({"plain": [answered(7, 8)], "lookup": [answered(*t) for t in lookup]})
    assert rows_of(peer, rounds=2)["fake, lookup"].facts["same_tokens"] is same


def test_a_response_without_decode_steps_has_no_speed_and_is_allowed():
    found = rows_of(Fake({"plain": [answered(7)], "lookup": [answered(7, 8)]}))
    assert DECODE not in found["fake, plain"].measures
    assert found["fake, plain"].measures[WHOLE] == [1 / 1.1]
    assert OWN not in found["fake, lookup"].measures
    assert found["fake, lookup"].measures["ratio"] == [0.5]
    assert "-" in lines_of([*found.values()])["fake, plain"]


def test_the_summary_has_changed_outputs_and_speed_over_plain_decoding():
    def rows(case: str, own: float, *, kept: bool) -> list[Row]:
        facts, other = {"same_tokens": True}, {"same_tokens": kept}
        return [
            Row(case, "chat", "plain", {DECODE: [10.0]}, facts=facts),
            Row(case, "chat", "auto", {DECODE: [20.0], OWN: [2.0]}, facts=facts),
            Row(case, "chat", "x, lookup", {DECODE: [5.0], OWN: [own]}, facts=other),
        ]

    found = [*rows("a", 0.5, kept=True), *rows("b", 2, kept=True), *rows("c", 32, kept=False)]
    lookup = speeds(found)["contenders"]["x, lookup"]
    assert lookup["over_own_plain"] == pytest.approx((0.5 * 2 * 32) ** (1 / 3))
    assert lookup["texts_changed"] == 1
    assert lines_of(found)["x, lookup"] == ["x, lookup", "1 of 3", "3.17"]
    assert is_exact(found), "only paceline is held to it"
    assert not is_exact([replace(row, facts={"same_tokens": False}) for row in found])


def test_server_speeds_are_relative_to_plain_with_and_without_loops():
    loop, text = [1] * 20, list(range(20))

    def row(case: str, name: str, *rates: float, tokens: Sequence[int] = (), **more: Any) -> Row:
        facts = {"same_tokens": True, "token_ids": tokens}
        measures = {DECODE: rates, WHOLE: [rate / 2 for rate in rates]}
        return Row(case, "chat", name, measures, facts=facts, **more)

    measured = [
        row("a", "plain", 10, 30, tokens=text),
        row("b", "plain", 10, 10, tokens=loop),
        row("a", "llama-server, plain", 5, 10),
        row("b", "llama-server, plain", 5, 5),
        row("a", "llama-server, ngram-mod", 5, 10, counts={"drafted": 9, "accepted": 3}),
        row("b", "llama-server, ngram-mod", 40, 40),
    ]
    value = speeds(measured)
    assert value["reference"] == "llama-server, plain"
    assert value["loops"] == ["b"]
    lookup = value["contenders"]["llama-server, ngram-mod"]
    assert lookup["over_reference"] == pytest.approx({"mean": 8**0.5, "median": 4.5, "least": 1})
    assert lookup["without_loops"] == pytest.approx({"mean": 1, "median": 1, "least": 1})
    assert lookup["tokens_per_second"] == (7.5 + 40) / 2
    ours = value["contenders"]["plain"]
    assert ours["over_reference"]["median"] == pytest.approx((2.5 + 2) / 2), "within a round"
    assert ours["whole_answer"] == pytest.approx((2.5 * 2) ** 0.5)
    _, _, lines = next(tables(measured))
    assert lines[2][-1] == "3 of 9"
    assert speeds(measured[:2])["reference"] == "plain"


def lines_of(rows: Sequence[Row]) -> dict[str, Sequence[str]]:
    found = [*tables(rows)]
    assert all(len(line) == len(head) for _, head, lines in found for line in lines)
    return {line[0]: line for line in found[-1][2]}


def test_a_failing_peer_is_reported_with_the_question():
    class Broken(Fake):
        def answer(self, question: PromptTurn, max_tokens: int, mode: str) -> PeerAnswer:
            raise RuntimeError("out of\nmemory")

    with pytest.raises(ModelError, match="fake, plain fails at one: out of memory"):
        rows_of(Broken({"plain": []}))


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Peer], None]:
    binary = ServerBinary(Path("llama-server"), "1", ())
    monkeypatch.setattr(llama_server, "server_binary", lambda _: binary)
    return lambda peer: monkeypatch.setattr(llama_server, "LlamaServer", lambda *_, **__: peer)


def bench(model: Model, suite: Path, peers: Sequence[str] = (), **options: Any) -> Report:
    settings = {"suite": suite, "rounds": 1, "max_tokens": 6, **options}
    asked = {"peer": [*peers], "access": Access(), "measurement": MeasurementArguments(**settings)}
    return report_of(command, lambda *_: model, **asked)


def test_a_run_covers_every_peer_mode_prompt_and_round(
    model: Model, suite_file: Path, peers: Callable[[Peer], None]
):
    fake = Fake({"plain": [answered(7, 8)], "lookup": [answered(7, 9)]})
    peers(fake)
    report = bench(model, suite_file, rounds=2)
    record = parse_record(json.loads(json.dumps(report.value)), "it")
    assert record.contenders == ["plain", "auto", "fake, plain", "fake, lookup"]
    assert record.cases == ["one", "two", "three"]
    assert all(len(row.measures["ratio"]) == 2 for row in record.rows)
    found = record.summary["speeds"]["contenders"]
    assert [found[name]["texts_changed"] for name in record.contenders] == [0, 0, 0, 3]
    assert len(fake.asked) == 2 * (1 + 2 * 3), "once before, then twice a prompt"
    assert report.passed, "it is no fault of ours"


def test_a_run_fails_if_our_speculation_changes_a_token(
    model: Model, suite_file: Path, peers: Callable[[Peer], None], monkeypatch: pytest.MonkeyPatch
):
    peers(Fake({"plain": [answered(7)]}))
    liar = Model(model.files, FaultyEngine(model.engine, other_picks_when_drafting))
    generate = Model.generate

    def drafting(self: Model, prompt: Any, **options: Any) -> Any:
        drafts = {"drafter": "suffix", "policy": "fixed"} if options["drafter"] == "auto" else {}
        return generate(self, prompt, **{**options, **drafts})

    monkeypatch.setattr(Model, "generate", drafting)
    assert not bench(liar, suite_file, max_tokens=60).passed


def test_an_unknown_peer_is_rejected(model: Model, suite_file: Path):
    with pytest.raises(InvalidRequest, match="no peer is called 'ollama'; expected llama-server"):
        bench(model, suite_file, peers=["http://127.0.0.1:1/v1", "ollama"])


@pytest.fixture
def question(model: Model) -> PromptTurn:
    return replace(QUESTION, tokens=model.tokens(TEXT))


def test_each_request_to_our_peer_starts_without_history(model: Model, question: PromptTurn):
    tokens, ours = question.tokens, PacelinePeer(model)
    first, second, auto = (ours.answer(question, 40, mode) for mode in ("plain", "plain", "auto"))
    assert first.tokens == model.generate(tokens, max_tokens=40, drafter="none").token_ids
    assert first.same(second)
    assert first.same(auto)
    assert first.first_token_seconds > 0
    assert auto.rate


def test_a_peer_rejects_a_model_in_another_format(tiny_files: ModelFiles):
    checkpoint, binary = replace(tiny_files, weights=None), ServerBinary(Path("it"), "1", ())
    with pytest.raises(ModelError, match="is not a GGUF file"):
        LlamaServer(checkpoint, binary, 9, threads=None, on_message=print)


def test_our_server_is_measured_with_and_without_speculation(
    model: Model, question: PromptTurn, monkeypatch: pytest.MonkeyPatch
):
    expected = model.generate(TEXT, max_tokens=24)
    sent: list[dict[str, Any]] = []
    ask = client._send

    async def spy(http: Any, endpoint: client.ServedModel, *rest: Any) -> Any:
        sent.append(dict(endpoint.fields))
        return await ask(http, endpoint, *rest)

    monkeypatch.setattr(client, "_send", spy)
    with running(model) as server:
        peer = ServerPeer(f"{server.url}/v1/", Access())
        assert peer.modes == ("plain", "speculation")
        assert f"http://{peer.name}" == f"{server.url}/v1"
        for mode in peer.modes:
            found = peer.answer(question, 24, mode)
            assert (found.text, found.tokens, found.count) == (expected.text, None, 24)
            assert found.rate is not None
            assert found.first_token_seconds > 0
        with pytest.raises(ModelError, match="nobody"):
            ServerPeer(f"{server.url}/v1", Access("nobody")).answer(question, 4, "plain")
        server.rest()
    assert sent[0]["speculation"] == {"drafter": "none"}
    assert "speculation" not in sent[1]


def test_a_foreign_server_is_measured_as_served():
    assert ServerPeer("http://127.0.0.1:1/v1", Access("some-model")).modes == (AS_SERVED,)
