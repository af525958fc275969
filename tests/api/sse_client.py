"""Reads a stream as a strict client does: every rule of the protocol that it breaks is an assertion."""

import json

from tests.api.scripted import CHAT


class Streamed:
    """One choice of a stream, added up."""

    def __init__(self):
        self.role = None
        self.order = []  # kinds of deltas, neighbours once
        self.reasoning = ""
        self.content = ""
        self.calls = []
        self.num_fragments = 0
        self.logprobs = []
        self.finish_reason = None

    def add(self, choice):
        assert self.finish_reason is None, "nothing comes behind the finish reason"
        delta = choice["delta"]
        if "role" in delta:
            assert self.role is None, "the role comes once"
            assert delta == {"role": "assistant", "content": ""}
            self.role = delta["role"]
            return
        assert self.role, "the role comes first"
        kinds = set(delta) - {"reasoning"}
        assert len(kinds) == (choice["finish_reason"] is None), delta
        for kind in kinds:
            if self.order[-1:] != [kind]:
                self.order.append(kind)
        if "reasoning_content" in delta:
            assert delta["reasoning_content"]
            assert delta["reasoning"] == delta["reasoning_content"]
            self.reasoning += delta["reasoning_content"]
        if "content" in delta:
            assert delta["content"]
            self.content += delta["content"]
        for call in delta.get("tool_calls", ()):
            self._add_call(call)
        if choice["logprobs"]:
            self.logprobs += choice["logprobs"]["content"]
        self.finish_reason = choice["finish_reason"]

    def _add_call(self, call):
        if call["index"] == len(self.calls):
            assert set(call) == {"index", "id", "type", "function"}
            assert call["id"].startswith("call_")
            assert call["id"] not in [known["id"] for known in self.calls]
            assert call["type"] == "function"
            assert call["function"]["name"]
            assert call["function"]["arguments"] == ""
            self.calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
        else:
            assert call["index"] == len(self.calls) - 1, "a call is whole before the next one begins"
            assert set(call) == {"index", "function"}
            assert set(call["function"]) == {"arguments"}
            assert call["function"]["arguments"]
            self.calls[-1]["arguments"] += call["function"]["arguments"]
            self.num_fragments += 1


def read(response):
    """The choices of a whole stream, by index, and its events."""
    assert response.status_code == 200, response.text
    blocks = [block for block in response.text.split("\n\n") if block and not block.startswith(":")]
    assert blocks.pop() == "data: [DONE]"
    events = [json.loads(block.removeprefix("data: ")) for block in blocks]
    choices = {}
    for event in events:
        for choice in event["choices"]:
            choices.setdefault(choice["index"], Streamed()).add(choice)
    assert all(choice.finish_reason for choice in choices.values())
    return [choices[index] for index in sorted(choices)], events


async def streamed(client, body):
    """The choices of a stream."""
    return read(await client.post(CHAT, json=body | {"stream": True}))[0]


async def whole(client, body):
    """The choices of an answer that is not streamed, in the same form."""
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    found = []
    for choice in response.json()["choices"]:
        message, answer = choice["message"], Streamed()
        answer.content = message["content"] or ""
        assert message["content"] is not None or message["tool_calls"]
        answer.reasoning = message.get("reasoning_content", "")
        assert message.get("reasoning", "") == answer.reasoning
        assert message.get("tool_calls") != []
        answer.calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
        answer.logprobs = [] if choice["logprobs"] is None else choice["logprobs"]["content"]
        answer.finish_reason = choice["finish_reason"]
        found.append(answer)
    return found


def calls_of(choice):
    """Names and arguments of the calls."""
    return [(call["name"], call["arguments"]) for call in choice.calls]
