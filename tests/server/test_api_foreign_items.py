"""Items, blocks and parts from other models and servers in a client's history end no chat."""

import json
import re
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
from openai.types.responses import Response
from openai.types.responses.response_input_item_param import ResponseInputItemParam

from support.scripted import DONE, always, calling_ls, engine_of, prompt_of
from support.server import Running, good

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
PNG = "data:image/png;base64,iVBORw0KGgo="
USER = {"role": "user", "content": "First."}
LAST = {"role": "user", "content": "Last."}
IMAGE = "[image omitted: this model reads text]"


@pytest.fixture
def server(scripted_server: Running) -> Iterator[Running]:
    with calling_ls(scripted_server) as instance:
        engine_of(instance).rules = [always(DONE)]
        yield instance


def post(server: Running, path: str, body: dict[str, Any]) -> Any:
    return good(server.post(path, {"max_tokens": 64, **body} if path != RESPONSES else body))


def call(name: str, arguments: str, output: str = "") -> list[str]:
    """Return the text of a call and of its result in a prompt."""
    words = [f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>']
    return [*words, f"<tool_response>\n{output}\n</tool_response>"] if output else words


def omitted(kind: str) -> str:
    return f"[{kind} omitted: this model reads text]"


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "id": f"id_{kind}", **fields}


SHOWN = {"type": "input_image", "image_url": PNG}
SAID = {"type": "input_text", "text": "said"}
EXEC = {"type": "exec", "command": ["ls"], "env": {}}
PATCH = {"type": "delete_file", "path": "a.txt"}
ACTION = {"type": "search", "query": "q"}
SHELL = {"stdout": "out", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}


def pair(kind: str, call: dict[str, Any], **output: Any) -> list[dict[str, Any]]:
    """Return an item with a call and the one with its output."""
    output_kind = f"{kind}_output".replace("search_call", "search")
    return [item(kind, call_id="c", **call), {"type": output_kind, "call_id": "c", **output}]


PATCHED = {"name": "apply_patch", "input": "*** Begin\n+a"}
SEARCH = {"arguments": {"query": "q"}, "execution": "client"}
SCREEN = {"type": "computer_screenshot", "image_url": PNG}
LOGS = {"type": "logs", "logs": "2"}
FOUND_TOOL = {"type": "function", "name": "found"}
ASK = {"name": "ask", "server_label": "s", "arguments": '{"a": 1}'}

ITEMS: dict[str, tuple[list[dict[str, Any]], list[str], int]] = {
    "message": (
        [{"type": "message", "role": "user", "content": [SAID, SHOWN]}],
        [f"said\n{IMAGE}"],
        1,
    ),
    "function_call": (
        pair("function_call", {"name": "f", "arguments": "{}"}, output=[SAID, SHOWN]),
        call("f", "{}", f"said\n{IMAGE}"),
        1,
    ),
    "custom_tool_call": (
        pair("custom_tool_call", PATCHED, output="made"),
        call("apply_patch", r'{"input": "*** Begin\n+a"}', "made"),
        0,
    ),
    "local_shell_call": (
        [
            item("local_shell_call", call_id="c", action=EXEC),
            {"type": "local_shell_call_output", "id": "c", "output": "out"},
        ],
        call("local_shell", json.dumps(EXEC), "out"),
        0,
    ),
    "shell_call": (
        pair("shell_call", {"action": {"commands": ["ls"]}}, output=[SHELL]),
        call("shell", '{"commands": ["ls"]}', json.dumps(SHELL)),
        0,
    ),
    "apply_patch_call": (
        pair("apply_patch_call", {"operation": PATCH}, status="completed"),
        call("apply_patch", json.dumps(PATCH), "completed"),
        0,
    ),
    "tool_search_call": (
        pair("tool_search_call", SEARCH, tools=[FOUND_TOOL]),
        call("tool_search", '{"query": "q"}', json.dumps(FOUND_TOOL)),
        0,
    ),
    "tool_search_output": (  # OpenAI's server ran the search
        [
            item("tool_search_call", call_id=None, **SEARCH),
            item("tool_search_output", call_id=None, tools=[FOUND_TOOL]),
        ],
        [
            *call("tool_search", '{"query": "q"}', omitted("result of tool_search_call")),
            omitted("tool_search_output"),
        ],
        2,
    ),
    "an output without its call": (
        [
            item("of_next_year", call_id="c", a=1),
            item("of_next_year_output", call_id="c", output=""),
        ],
        [omitted("of_next_year"), omitted("of_next_year_output")],
        2,
    ),
    "an output of an unknown form": (
        pair("next_call", {"input": "a"}, data="x"),
        call("next", '{"input": "a"}', omitted("next_call_output")),
        1,
    ),
    "computer_call": (
        pair("computer_call", {"action": {"type": "screenshot"}}, output=SCREEN),
        [*call("computer", '{"type": "screenshot"}'), omitted("computer_screenshot")],
        1,
    ),
    "program": (
        pair("program", {"code": "1 + 1", "fingerprint": "x"}, result="2"),
        call("program", '{"code": "1 + 1"}', "2"),
        0,
    ),
    "web_search_call": (
        [item("web_search_call", action=ACTION, status="completed")],
        call("web_search", json.dumps(ACTION), omitted("result of web_search_call")),
        1,
    ),
    "file_search_call": (
        [item("file_search_call", queries=["q"], results=[{"text": "found"}])],
        call("file_search", '{"queries": ["q"]}', '{"text": "found"}'),
        0,
    ),
    "code_interpreter_call": (
        [item("code_interpreter_call", code="2", outputs=[LOGS, {"type": "image", "url": PNG}])],
        call("code_interpreter", '{"code": "2"}', f"{json.dumps(LOGS)}\n{IMAGE}"),
        1,
    ),
    "mcp_call": ([item("mcp_call", **ASK, output="told")], call("s__ask", '{"a": 1}', "told"), 0),
    "image_generation_call": (
        [item("image_generation_call", result="iVBORw0KGgo=", revised_prompt="a cat")],
        call(
            "image_generation",
            '{"revised_prompt": "a cat"}',
            omitted("result of image_generation_call"),
        ),
        1,
    ),
    "additional_tools": (
        [item("additional_tools", role="developer", tools=[{"type": "function", "name": "more"}])],
        ['"name": "more"'],
        0,
    ),
    "reasoning": (
        [
            item("reasoning", summary=[{"type": "summary_text", "text": "hm"}], content=None),
            item("reasoning", summary=[], encrypted_content="gAAAA"),
        ],
        ["hm\n"],
        0,
    ),
    **{
        kind: ([item(kind, **fields)], [omitted(kind)], 1)
        for kind, fields in {
            "compaction": {"encrypted_content": "gAAAA"},
            "configuration_update": {"reasoning": {"effort": "high"}},
            "mcp_list_tools": {"server_label": "s", "tools": []},
            "mcp_approval_request": ASK,
            "mcp_approval_response": {"approval_request_id": "a", "approve": True},
            "of_next_year": {"any": [{"thing": None}]},
        }.items()
    },
}
"""Type -> the items, their words in a prompt, and the number of parts that become markers."""


def types_of(union: Any) -> set[str]:
    """Values of the field `type` of the members of a union."""
    hints = (get_type_hints(member).get("type") for member in get_args(union))
    return {value for hint in hints if hint for value in _literals(hint)}


def _literals(hint: Any) -> list[str]:
    values = [_literals(arg) if get_args(arg) else [arg] for arg in get_args(hint)]
    return [value for inner in values for value in inner if isinstance(value, str)]


def test_every_openai_item_type_is_tested():
    tried = {str(entry.get("type")) for items, *_ in ITEMS.values() for entry in items}
    others = {"item_reference", "compaction_trigger"}  # an id of ours, and a request
    assert types_of(ResponseInputItemParam) - tried - others == set()


@pytest.mark.parametrize("kind", ITEMS)
def test_a_foreign_item_becomes_text_in_its_place(server: Running, kind: str):
    items, words, marks = ITEMS[kind]
    reply = post(server, RESPONSES, {"input": [USER, *items, LAST]})
    Response.model_validate(reply, strict=True)
    prompt = prompt_of(server)
    assert "assistant\n\n" not in prompt or kind == "reasoning"
    places = [prompt.find(word) for word in ("First.", *words, "Last.")]
    assert -1 not in places, prompt
    assert places == sorted(places) or kind == "additional_tools", prompt
    assert PNG not in prompt
    assert len(reply.get("ignored_items", ())) == marks
    again = post(server, RESPONSES, {"input": "On.", "previous_response_id": reply["id"]})
    assert "ignored_items" not in again
    if kind == "message":
        return  # the user's own
    alone = post(server, RESPONSES, {"input": [USER, *items]})  # the last item is not a message
    assert alone["status"] == "completed"


TEXT = {"type": "text", "text": "said"}
IMAGE_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}
PLAIN = {"type": "document", "title": "T", "source": {"type": "text", "data": "the text"}}
NESTED = {"type": "document", "source": {"type": "content", "content": [TEXT, IMAGE_BLOCK]}}
FOUND = {"type": "search_result", "source": "http://s", "title": "T", "content": [TEXT]}
WEB = {"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "xx"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
SERVER_USE = {"type": "server_tool_use", "id": "t", "name": "web_search", "input": {"query": "q"}}


def result(kind: str, content: Any) -> dict[str, Any]:
    return {"type": kind, "tool_use_id": "t", "content": content}


BLOCKS: list[tuple[list[dict[str, Any]], list[str], int]] = [
    ([TEXT, IMAGE_BLOCK], [f"said\n{IMAGE}"], 1),
    ([PDF], [omitted("document")], 1),
    ([PLAIN], ["T\nthe text"], 0),
    ([NESTED], [f"said\n{IMAGE}"], 1),
    ([FOUND], ["T\nhttp://s\nsaid"], 0),
    ([{"type": "container_upload", "file_id": "f"}], [omitted("container_upload")], 1),
    ([{"type": "of_next_year"}], [omitted("of_next_year")], 1),
]
"""Blocks of an earlier message, their words in a prompt, and the number of markers."""

ANSWERS: list[tuple[list[dict[str, Any]], list[str], int]] = [
    *BLOCKS,
    ([{"type": "redacted_thinking", "data": "xx"}, TEXT], ["said"], 0),
    ([{"type": "thinking", "thinking": "hm", "signature": "s"}, TEXT], ["hm", "said"], 0),
    ([{"type": "compaction", "content": "a summary"}], ["a summary"], 0),
    ([{"type": "fallback", "from": {}, "to": {}}, TEXT], [omitted("fallback")], 1),
    ([{"type": "mcp_tool_listing", "tools": []}, TEXT], [omitted("mcp_tool_listing")], 1),
    (
        [SERVER_USE, result("web_search_tool_result", [WEB]), TEXT],
        [
            *call("web_search", '{"query": "q"}'),
            '<tool_response>\n{"type": "web_search_result", "title": "T", "url": "u"}',
            "said",
        ],
        0,
    ),
    *(
        ([{**SERVER_USE, "type": use}, result(kind, content), TEXT], [*words, "said"], marks)
        for use, kind, content, words, marks in (
            ("mcp_tool_use", "mcp_tool_result", [TEXT], ["<tool_response>\nsaid"], 0),
            (
                "server_tool_use",
                "web_fetch_tool_result",
                {"type": "web_fetch_result", "url": "u", "content": PDF},
                [omitted("document")],
                1,
            ),
            (
                "server_tool_use",
                "bash_code_execution_tool_result",
                {"type": "bash_code_execution_result", "stdout": "out", "content": []},
                ['"stdout": "out"'],
                0,
            ),
            ("server_tool_use", "code_execution_tool_result", {"stdout": "o"}, ['"o"'], 0),
            ("server_tool_use", "text_editor_code_execution_tool_result", {"a": 1}, ['"a"'], 0),
            (
                "server_tool_use",
                "tool_search_tool_result",
                {"tool_references": [{"type": "tool_reference", "tool_name": "x"}]},
                ['"tool_name": "x"'],
                0,
            ),
            ("server_tool_use", "advisor_tool_result", {"text": "advice"}, ["advice"], 0),
        )
    ),
]
RESULTS: list[tuple[Any, list[str], int]] = [
    *BLOCKS[:5],
    ([{"type": "tool_reference", "tool_name": "x"}], ['"tool_name": "x"'], 0),
    ([{"type": "browser_state", "tabs": []}], ['"tabs": []'], 0),
    ("", [], 0),
]


@pytest.mark.parametrize("where", ["user", "assistant", "result"])
def test_a_block_in_an_earlier_message_or_result_becomes_text_in_its_place(
    server: Running, where: str
):
    table = {"user": BLOCKS, "assistant": ANSWERS, "result": RESULTS}[where]
    for content, words, marks in table:
        turns: list[dict[str, Any]] = [USER, {"role": where, "content": content}, LAST]
        if where == "result":
            returned = result("tool_result", content)
            turns = [USER, {"role": "assistant", "content": [USE]}]
            turns += [{"role": "user", "content": [returned, {"type": "text", "text": "Last."}]}]
        reply = post(server, MESSAGES, {"messages": turns})
        prompt = prompt_of(server)
        places = [prompt.find(word) for word in ("First.", *words, "Last.")]
        assert -1 not in places, prompt
        assert places == sorted(places), prompt
        assert len(reply.get("ignored_items", ())) == marks, reply
        count = server.post(f"{MESSAGES}/count_tokens", {"messages": turns})
        assert (
            count.json()["input_tokens"]
            == reply["usage"]["input_tokens"] + (reply["usage"]["cache_read_input_tokens"])
        )


IMAGE_PART = {"type": "image_url", "image_url": {"url": PNG}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
FILE = {"type": "file", "file": {"file_data": "x"}}
CUSTOM = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_parts_of_earlier_chat_messages_and_results_are_marked(server: Running):
    called = {"role": "assistant", "content": None, "tool_calls": [CUSTOM]}
    answer = {"role": "tool", "tool_call_id": "c", "content": [TEXT, IMAGE_PART]}
    for part, mark in ((IMAGE_PART, "image"), (AUDIO, "audio"), (FILE, "file")):
        turns = [{"role": "user", "content": [TEXT, part]}, called, answer]
        for more in ([], [LAST]):
            reply = post(server, CHAT, {"messages": [*turns, *more]})
            assert reply["ignored_items"] == [
                f"messages[0].content[1]: {mark}",
                "messages[2].content[1]: image",
            ]
            assert f"said\n{omitted(mark)}" in prompt_of(server)
            assert f"<tool_response>\nsaid\n{IMAGE}\n" in prompt_of(server)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, {"messages": [LAST, {"role": "user", "content": [TEXT, IMAGE_PART]}]}, "content[1]"),
        (CHAT, {"messages": [LAST, {"role": "user", "content": [AUDIO]}]}, "content[0]"),
        (CHAT, {"messages": [LAST, {"role": "user", "content": [{"a": 1}]}]}, "content[0]"),
        (
            CHAT,
            {
                "messages": [
                    LAST,
                    {"role": "user", "content": [FILE]},
                    {"role": "assistant", "content": ""},
                ]
            },
            "content[0]",
        ),
        (MESSAGES, {"messages": [LAST, {"role": "user", "content": [IMAGE_BLOCK]}]}, "content[0]"),
        (
            MESSAGES,
            {"messages": [LAST, {"role": "user", "content": [TEXT, NESTED]}]},
            "content[1].source.content[1]",
        ),
        (RESPONSES, {"input": [LAST, {"role": "user", "content": [SAID, SHOWN]}]}, "content[1]"),
        (RESPONSES, {"input": [LAST, {"type": "compaction_trigger"}]}, ""),
    ],
)
def test_an_unsupported_part_of_a_user_message_is_rejected_with_its_path(
    server: Running, path: str, body: dict[str, Any], named: str
):
    response = server.post(path, {"max_tokens": 9, **body} if path != RESPONSES else body)
    assert response.status_code == 400
    field = "input" if path == RESPONSES else "messages"
    error = response.json()["error"]
    where = f"{field}[1].{named}".removesuffix(".")
    assert error["message"].startswith(where)
    assert error.get("param", where) == where


@pytest.mark.parametrize("kind", ["reasoning", "additional_tools"])
def test_an_input_without_a_message_is_rejected(server: Running, kind: str):
    for more in ({}, {"instructions": "Be brief."}, {"store": False}):
        response = server.post(RESPONSES, {"input": [item(kind)], **more})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "input")


def test_claude_code_can_parse_the_unsupported_part_error(server: Running):
    """The pattern of version 2.1.197, which then resends the message without the part."""
    pattern = r"messages[.[](\d+)[\].]+content[.[](\d+)[\].]+(image|document|pdf)"
    for block in (IMAGE_BLOCK, PDF):
        turns = [USER, {"role": "user", "content": [TEXT, block]}]
        response = server.post(MESSAGES, {"messages": turns, "max_tokens": 9})
        found = re.match(pattern, response.json()["error"]["message"])
        assert found
        assert found.groups() == ("1", "1", block["type"])


def test_a_file_next_to_a_tool_result_does_not_count_as_the_users(server: Running):
    """Claude Code sends the pages of a PDF there."""
    turns = [USER, {"role": "assistant", "content": [USE]}]
    turns += [{"role": "user", "content": [result("tool_result", "read"), PDF]}]
    reply = post(server, MESSAGES, {"messages": turns})
    assert reply["ignored_items"] == ["messages[2].content[1]: document"]
