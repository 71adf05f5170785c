"""OpenAIPolicy against a real server of the protocol, on this machine: answers, errors, native tool calls."""

from __future__ import annotations

import functools
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from toy_world import SUBMIT, ToyEnv, add, requests_of

from agentrl.config import RolloutConfig
from agentrl.errors import ConfigError, PolicyError
from agentrl.rollout.collector import Collector
from agentrl.rollout.openai import OpenAIPolicy
from agentrl.rollout.requests import ContextFullError
from agentrl.types import EndReason, Message, Sampling, ToolCall, ToolSchema

QUESTION = [Message("system", "Count."), Message("user", "To 3.")]
ADD = ToolSchema("add", "Adds.", {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})


def said(content, *, finish="stop", calls=None):
    message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"c{k}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for k, (name, arguments) in enumerate(calls)
        ]
    choice = {"index": 0, "finish_reason": finish, "message": message}
    return 200, {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}


def failed(status, text, code=None):
    return status, {"error": {"message": text, "type": "t", "code": code}}


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, answers):
        self.answers = answers
        self.asked = []
        self.keys_seen = []
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.asked.append(body)
            self.server.keys_seen.append(self.headers["authorization"])
            answers = self.server.answers
            answer = answers(body) if callable(answers) else answers.pop(0) if len(answers) > 1 else answers[0]
        if answer == "silence":
            time.sleep(1.5)
            return
        status, reply = answer
        data = json.dumps(reply).encode()
        self.send_response(status)
        if status == 429:
            self.send_header("Retry-After", "0.05")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(answers):
        server = Server(answers)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def policy_of(server, **kwargs):
    return OpenAIPolicy(server.url, "m", **({"timeout_s": 5.0, "attempts": 3} | kwargs))


def test_a_message_comes_back_and_the_question_is_the_protocols(serve, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sesame")
    server = serve([said("hello")])
    conversation = [*QUESTION, Message("assistant", "?"), Message("tool", "1", name="add"), Message("tool", "2")]
    sampling = Sampling(temperature=0.5, max_tokens=17, top_p=0.9, top_k=5)
    reply = policy_of(server, api_key_env="MY_KEY").act(conversation, [ADD], sampling)
    assert (reply.text, reply.finish_reason, reply.tokens) == ("hello", "stop", None)
    (asked,) = server.asked
    assert asked == {
        "model": "m",
        "temperature": 0.5,
        "max_tokens": 17,
        "top_p": 0.9,
        "top_k": 5,
        "messages": [
            {"role": "system", "content": "Count."},
            {"role": "user", "content": "To 3."},
            {"role": "assistant", "content": "?"},
            {"role": "user", "content": "1\n2"},
        ],
    }
    assert server.keys_seen[0] == "Bearer sesame"


def test_a_message_that_its_cap_cut_says_so(serve):
    assert policy_of(serve([said("hel", finish="length")])).act(QUESTION, [], Sampling()).finish_reason == "length"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_busy_and_failing_endpoints_are_asked_again(serve, status):
    server = serve([failed(status, "later"), failed(status, "later"), said("hello")])
    assert policy_of(server).act(QUESTION, [], Sampling()).text == "hello"
    assert len(server.asked) == 3


def test_an_endpoint_that_never_recovers_is_a_policy_error(serve):
    server = serve([failed(503, "overloaded")])
    with pytest.raises(PolicyError, match=r"answered 503.*overloaded"):
        policy_of(server, attempts=2).act(QUESTION, [], Sampling())
    assert len(server.asked) == 2


def test_a_silent_endpoint_is_a_policy_error(serve):
    with pytest.raises(PolicyError, match=r"did not answer in 1 attempts.*ends with /v1"):
        policy_of(serve(["silence"]), timeout_s=0.3, attempts=1).act(QUESTION, [], Sampling())


def test_no_server_is_a_policy_error():
    with pytest.raises(PolicyError, match="is the server up"):
        OpenAIPolicy("http://127.0.0.1:9/v1", "m", attempts=1).act(QUESTION, [], Sampling())


def test_mistakes_that_no_other_episode_would_mend_stop_the_run(serve):
    with pytest.raises(ConfigError, match=r"401.*environment variable MY_KEY"):
        policy_of(serve([failed(401, "bad key")]), api_key_env="MY_KEY").act(QUESTION, [], Sampling())
    with pytest.raises(ConfigError, match=r"404.*found 'm'"):
        policy_of(serve([failed(404, "no such model")])).act(QUESTION, [], Sampling())
    with pytest.raises(ConfigError, match="expected base_url to be like"):
        OpenAIPolicy("localhost:8000", "m")


def test_other_refusals_and_empty_answers_are_policy_errors(serve):
    with pytest.raises(PolicyError, match=r"422.*temperature"):
        policy_of(serve([failed(422, "temperature is too hot")])).act(QUESTION, [], Sampling())
    empty = (200, {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": []})
    with pytest.raises(PolicyError, match="without a message"):
        policy_of(serve([empty])).act(QUESTION, [], Sampling())


def test_a_cap_of_another_name_is_learned(serve):
    def answer(body):
        if "max_tokens" in body:
            return failed(400, "Unsupported parameter: use 'max_completion_tokens' instead.")
        return said("hello")

    server = serve(answer)
    policy = policy_of(server)
    assert policy.act(QUESTION, [], Sampling(max_tokens=9)).text == "hello"
    policy.act(QUESTION, [], Sampling(max_tokens=9))
    assert [body.get("max_completion_tokens") for body in server.asked] == [None, 9, 9]


def test_a_conversation_beyond_the_context_is_told_apart(serve):
    server = serve([failed(400, "This model's maximum context length is 8 tokens", "context_length_exceeded")])
    with pytest.raises(ContextFullError):
        policy_of(server).act(QUESTION, [], Sampling())
    with Collector(ToyEnv, policy_of(server), None, RolloutConfig()) as collector:
        (found,) = collector.collect(requests_of(1))
    assert found.end is EndReason.CONTEXT_FULL
    assert not found.end.is_error


def test_native_calls_are_rendered_into_the_environments_format(serve):
    server = serve([said("Well.", calls=[("add", '{"n": 3}'), ("add", '{"n": 4}')])])
    reply = policy_of(server, native_tools=True).act(QUESTION, [ADD], Sampling())
    assert reply.text == (
        'Well.\n<tool_call>\n{"name": "add", "arguments": {"n": 3}}\n</tool_call>'
        '\n<tool_call>\n{"name": "add", "arguments": {"n": 4}}\n</tool_call>'
    )
    assert server.asked[0]["tools"] == [ADD.as_openai()]


def test_native_calls_that_are_not_json_become_plain_text(serve):
    server = serve([said(None, calls=[("add", '{"n": ')])])
    assert policy_of(server, native_tools=True).act(QUESTION, [ADD], Sampling()).text == 'add({"n": )'


def test_earlier_calls_are_shown_to_the_endpoint_as_its_own(serve):
    server = serve([said("done")])
    policy = policy_of(server, native_tools=True)
    text = policy._format.render_calls("Well.", [ToolCall("add", {"n": 3}), ToolCall("add", {"n": 4})], [ADD])
    conversation = [*QUESTION, Message("assistant", text), Message("tool", "sum 3"), Message("tool", "sum 7")]
    conversation += [Message("assistant", "no call"), Message("user", "Call a tool.")]
    policy.act(conversation, [ADD], Sampling())
    shown = server.asked[0]["messages"][2:]
    assert shown[0]["content"] == "Well."
    assert [call["function"] for call in shown[0]["tool_calls"]] == [
        {"name": "add", "arguments": '{"n": 3}'},
        {"name": "add", "arguments": '{"n": 4}'},
    ]
    ids = [call["id"] for call in shown[0]["tool_calls"]]
    assert shown[1:] == [
        {"role": "tool", "tool_call_id": ids[0], "content": "sum 3"},
        {"role": "tool", "tool_call_id": ids[1], "content": "sum 7"},
        {"role": "assistant", "content": "no call"},
        {"role": "user", "content": "Call a tool."},
    ]


@pytest.mark.parametrize("native", [False, True])
def test_whole_episodes_run_over_the_wire(serve, native):
    def answer(body):
        turns = sum(message["role"] == "assistant" for message in body["messages"])
        if native:
            return said(None, calls=[("add", '{"n": 3}') if turns == 0 else ("submit", "{}")])
        return said(add(3) if turns == 0 else SUBMIT)

    server = serve(answer)
    policy = policy_of(server, native_tools=native, format="fenced")
    with Collector(functools.partial(ToyEnv, format="fenced"), policy, None, RolloutConfig()) as collector:
        found = collector.collect(requests_of(12))
    assert {t.end for t in found} == {EndReason.SUBMITTED}
    assert [t.turns[0].results[0].content for t in found] == ["sum 3"] * 12
