"""`dsserve chat`: what it sends, what it shows, and what it says when something is wrong."""

from __future__ import annotations

import io
import json

import httpx
import pytest
from rich.console import Console

from dsserve.cli import chat
from dsserve.cli.chat import Session, answer, run_slash_command
from dsserve.cli.chat_client import ChatClient, ChatFailed
from dsserve.cli.main import main

DONE = "data: [DONE]\n\n"


def event(**delta) -> str:
    finish_reason = delta.pop("finish_reason", None)
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


class Server:
    """An OpenAI server that gives prepared answers and notes what it is asked."""

    def __init__(self, *answers: str, status: int = 200) -> None:
        self.answers = list(answers)
        self.status = status
        self.bodies: list[dict] = []
        self.headers: list[httpx.Headers] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.headers.append(request.headers)
        if request.url.path == "/v1/models":
            return httpx.Response(self.status, json={"data": [{"id": "some-model"}]})
        self.bodies.append(json.loads(request.content))
        return httpx.Response(self.status, text=self.answers.pop(0))

    def client(self, url: str = "http://server", key: str | None = None) -> ChatClient:
        return ChatClient(url, key, transport=httpx.MockTransport(self))


def console() -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        color_system="standard",
        width=80,
        highlight=False,
    )


def shown(terminal: Console) -> str:
    assert isinstance(terminal.file, io.StringIO)
    return terminal.file.getvalue()


def session() -> Session:
    return Session({"model": "some-model"})


def test_an_answer_is_shown_with_its_thinking_dimmed_and_kept():
    server = Server(
        ": keep-alive\n\n"
        + event(role="assistant", content="")
        + event(reasoning_content="let me [see]")
        + event(content="four", finish_reason="stop")
        + 'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'
        + DONE
    )
    talk, terminal = session(), console()
    answer(server.client(), talk, "2+2?", terminal)
    assert "\x1b[2mlet me [see]\x1b[0m" in shown(terminal)
    assert "four" in shown(terminal)
    assert talk.messages == [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "four", "reasoning_content": "let me [see]"},
    ]
    assert run_slash_command(talk, "/usage") == "prompt 3 tokens (0 cached), answer 2 tokens"


def test_the_conversation_and_the_settings_are_sent():
    server = Server(event(content="a", finish_reason="stop") + DONE, event(content="b") + DONE)
    talk, terminal = session(), console()
    run_slash_command(talk, "/system be brief")
    run_slash_command(talk, "/effort low")
    answer(server.client(), talk, "one", terminal)
    run_slash_command(talk, "/think off")
    answer(server.client(), talk, "two", terminal)
    first, second = server.bodies
    assert first["stream"] is True
    assert first["reasoning_effort"] == "low"
    assert first["thinking"] == {"type": "enabled"}
    assert [turn["role"] for turn in first["messages"]] == ["system", "user"]
    assert second["thinking"] == {"type": "disabled"}
    assert "reasoning_effort" not in second
    assert [turn["content"] for turn in second["messages"]] == ["be brief", "one", "a", "two"]


def test_numeric_effort_is_sent_as_a_number():
    talk = session()
    run_slash_command(talk, "/effort 30")
    assert talk.request()["reasoning_effort"] == 30


def test_tool_calls_and_an_early_end_are_shown():
    call = {"function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    server = Server(event(tool_calls=[call]) + event(finish_reason="length") + DONE)
    terminal = console()
    answer(server.client(), session(), "hi", terminal)
    assert "weather" in shown(terminal)
    assert "Bonn" in shown(terminal)
    assert "(length)" in shown(terminal)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('data: {"error": {"message": "engine lost"}}\n\n', "engine lost"),
        (event(content="half"), "broke off"),
        ("data: {\n\n", "no JSON"),
    ],
)
def test_a_broken_stream_is_an_error_and_the_turn_is_taken_back(text, said):
    talk = session()
    with pytest.raises(ChatFailed, match=said):
        answer(Server(text).client(), talk, "hi", console())
    assert talk.messages == []


def test_a_refusal_shows_the_message_of_the_server():
    server = Server('{"error": {"message": "too long"}}', status=400)
    with pytest.raises(ChatFailed, match=r"too long \(HTTP 400\)"):
        answer(server.client(), session(), "hi", console())


def test_an_interrupted_answer_is_kept_as_far_as_it_came(monkeypatch):
    def interrupted(_body):
        yield chat.Delta(content="half")
        raise KeyboardInterrupt

    client = Server().client()
    monkeypatch.setattr(client, "stream", interrupted)
    talk, terminal = session(), console()
    answer(client, talk, "hi", terminal)
    assert talk.messages[-1] == {"role": "assistant", "content": "half"}
    assert "(stopped)" in shown(terminal)


def test_a_model_cannot_steer_the_terminal():
    server = Server(event(reasoning_content="\x1b[2J", content="a\x1b]0;title\x07\tb\x9b\n") + DONE)
    talk = session()
    plain = Console(file=io.StringIO(), color_system=None, width=80)
    answer(server.client(), talk, "hi", plain)
    assert set("\x1b\x07\x9b").isdisjoint(shown(plain))
    assert talk.messages[-1]["content"] == "a\x1b]0;title\x07\tb\x9b\n"


@pytest.mark.parametrize(
    "url", ["http://server", "http://server/", "http://server/v1", "http://server/v1/"]
)
def test_the_address_may_have_the_openai_suffix(url):
    server = Server()
    assert server.client(url, "key").first_model() == "some-model"
    assert server.headers[0]["authorization"] == "Bearer key"


def test_slash_commands_change_the_session_or_explain_themselves():
    talk = session()
    talk.messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert run_slash_command(talk, "/quit") is None
    assert run_slash_command(talk, "/reset") == "conversation forgotten"
    assert [turn["role"] for turn in talk.messages] == ["system"]
    run_slash_command(talk, "/system")
    assert talk.messages == []
    assert run_slash_command(talk, "/usage") == "no answer yet"
    assert "no such command: /thnk" in (run_slash_command(talk, "/thnk") or "")
    assert "/effort LEVEL" in (run_slash_command(talk, "/help") or "")


def test_without_a_server_the_command_says_so_in_one_line(capsys, unused_tcp_port):
    url = f"http://127.0.0.1:{unused_tcp_port}"
    assert main(["chat", "--base-url", url]) == 2
    err = capsys.readouterr().err
    assert f"no server at {url}; start one with `dsserve launch`" in err
    assert err.count("\n") == 1


def test_an_address_that_is_none_is_refused_in_one_line(capsys):
    assert main(["chat", "--base-url", "http://[::"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_piped_input_is_one_message(capsys, monkeypatch):
    server = Server(event(content="hello back", finish_reason="stop") + DONE)
    monkeypatch.setattr(chat, "ChatClient", lambda url, key: server.client(url, key))
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nthere\n"))
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "from-variable")
    assert main(["chat", "--max-tokens", "5", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "hello back\n"
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hello\nthere"}]
    assert (server.bodies[0]["max_tokens"], server.bodies[0]["temperature"]) == (5, 0)
    assert server.headers[0]["authorization"] == "Bearer from-variable"


def test_a_conversation_goes_on_until_the_input_ends(monkeypatch):
    server = Server(event(content="one") + DONE, event(content="two") + DONE)
    lines = iter(["first", "", "/think off", "second"])

    def typed(prompt):
        assert prompt == "> "
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    terminal = console()
    assert chat._converse(server.client(), Session({"model": "m"}), terminal) == 0
    assert [len(body["messages"]) for body in server.bodies] == [1, 3]
    assert [body["thinking"]["type"] for body in server.bodies] == ["enabled", "disabled"]
    out = shown(terminal)
    assert out.index("one") < out.index("thinking is off") < out.index("two")
