"""`/v1/completions` with OpenAI's own client, against a server whose engine is scripted."""

import openai
import pytest

from server.messages import FailureKind, FinishReason
from tests.api.scripted import LiveServer, Say, ScriptedEngine, ids, tiny_format
from tests.api.test_openai_client import client_of


@pytest.fixture(scope="module")
def idle():
    """An engine that nothing reaches, and a client of its server."""
    engine = ScriptedEngine(Say("x"), max_model_len=256)
    with LiveServer(engine) as server, client_of(server) as client:
        yield engine, client


def create(client, **fields):
    return client.completions.create(**{"model": "tiny", "prompt": "Once", **fields})


def both(client, **fields):
    """The choices of the whole answer, and of the stream's chunks put together."""
    whole = create(client, **fields)
    texts, reasons, columns = {}, {}, {}
    for chunk in create(client, stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                assert choice.index not in reasons, "one end per choice"
                reasons[choice.index] = choice.finish_reason
            if choice.logprobs:
                for name, column in choice.logprobs.to_dict().items():
                    columns.setdefault(choice.index, {}).setdefault(name, []).extend(column)
    for choice in whole.choices:
        assert choice.text == texts[choice.index]
        assert choice.finish_reason == reasons[choice.index]
        assert (choice.logprobs.to_dict() if choice.logprobs else None) == columns.get(choice.index)
    return whole


def test_text_is_sent_as_it_is():
    engine = ScriptedEngine(Say("<mm:think>a</mm:think> b 漢"))
    with LiveServer(engine) as server, client_of(server) as client:
        answer = both(client, prompt="Once [e~[ upon")
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "<mm:think>a</mm:think> b 漢"
    assert answer.usage.prompt_tokens == len(engine.submitted[0].prompt_token_ids)
    assert engine.submitted[0].prompt_token_ids == tiny_format().encode_text("Once [e~[ upon")
    assert engine.submitted[0].sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [ids("ab")]),
        (["ab", "c"], [ids("ab"), ids("c")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_prompts_of_every_kind(prompt, expected):
    engine = ScriptedEngine(Say("x", num_cached=1))
    with LiveServer(engine) as server, client_of(server) as client:
        answer = create(client, prompt=prompt, n=2, seed=7)
    assert [message.prompt_token_ids for message in engine.submitted] == [p for p in expected for _ in range(2)]
    assert [message.sampling.seed for message in engine.submitted] == [7, 8] * len(expected)
    assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
    assert answer.usage.prompt_tokens == sum(map(len, expected)), "a prompt counts once, whatever n is"
    assert answer.usage.prompt_tokens_details.cached_tokens == len(expected)
    assert answer.usage.completion_tokens == 2 * len(expected) * len(ids("x"))


@pytest.mark.parametrize("group", [1, 2, 1000])
def test_log_probabilities_in_columns(group):
    text = "Hé 漢!"
    with LiveServer(ScriptedEngine(Say(text, group=group))) as server, client_of(server) as client:
        answer = both(client, logprobs=2)
    columns = answer.choices[0].logprobs
    assert len(columns.tokens) == len(ids(text))
    assert columns.token_logprobs == [-0.5] * len(columns.tokens)
    assert all(len(top) in (2, 3) and token in top for token, top in zip(columns.tokens, columns.top_logprobs, strict=True))
    assert columns.text_offset == sorted(columns.text_offset)
    for token, offset in zip(columns.tokens, columns.text_offset, strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)


def test_echo_puts_the_prompt_in_front():
    with LiveServer(ScriptedEngine(Say(" upon"))) as server, client_of(server) as client:
        plain = both(client, prompt=["Once", "Twice"], echo=True)
        answer = both(client, prompt=["Once", "Twice"], echo=True, logprobs=1)
    assert [choice.text for choice in plain.choices] == ["Once upon", "Twice upon"]
    assert plain.choices[0].logprobs is None
    first, second = answer.choices
    assert (first.text, second.text) == ("Once upon", "Twice upon")
    for choice, prompt in ((first, "Once"), (second, "Twice")):
        columns, num_prompt = choice.logprobs, len(ids(prompt))
        assert "".join(columns.tokens) == choice.text
        assert columns.token_logprobs == [None, *[-0.25] * (num_prompt - 1), *[-0.5] * len(ids(" upon"))]
        assert columns.top_logprobs[0] is None
        assert columns.text_offset[num_prompt] == len(prompt)


def test_a_prompt_can_be_judged_without_an_answer():
    engine = ScriptedEngine(Say("x", end=FinishReason.LENGTH))
    with LiveServer(engine) as server, client_of(server) as client:
        answer = both(client, echo=True, logprobs=0, max_tokens=0)
    assert answer.choices[0].text == "Once"
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].logprobs.tokens) == len(ids("Once"))
    assert answer.usage.completion_tokens == 0
    assert engine.submitted[0].sampling.max_tokens == 1


def test_stop_strings_and_choices():
    with LiveServer(ScriptedEngine(Say("one; two"), Say("three"))) as server, client_of(server) as client:
        answer = create(client, n=2, stop=";")
    assert [choice.text for choice in answer.choices] == ["one", "three"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]


def test_usage_of_a_stream():
    with LiveServer(ScriptedEngine(Say("abc"))) as server, client_of(server) as client:
        whole = create(client)
        chunks = list(create(client, stream=True, stream_options={"include_usage": True}))
        silent = list(create(client, stream=True))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in [*chunks[:-1], *silent])


def test_either_name_of_the_limit():
    engine = ScriptedEngine(Say("abc", end=FinishReason.LENGTH))
    with LiveServer(engine) as server, client_of(server) as client:
        create(client, max_tokens=3)
        answer = create(client, extra_body={"max_completion_tokens": 4})
    assert [message.sampling.max_tokens for message in engine.submitted] == [3, 4]
    assert answer.choices[0].finish_reason == "length"


def test_a_format_for_the_text():
    engine = ScriptedEngine(Say("yes"))
    with LiveServer(engine) as server, client_of(server) as client:
        create(client, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    sampling = engine.submitted[0].sampling
    assert sampling.grammar is not None
    assert sampling.thinking is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [["a"]]}, "prompt[0][0]"),
        ({"prompt": [5, "a"]}, "prompt[1]"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [[5], [-1]]}, "prompt[1]"),
        ({"prompt": [ids("]<]image[>[")[0]]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": ["a", [5] * 3]}, "prompt[1]"),
        ({"prompt": [[5], [5] * 256]}, "prompt[1]"),
        ({"prompt": [5] * 250, "max_tokens": 100}, "max_tokens"),
        ({"prompt": ["a"] * 100, "n": 2}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"stop": [""]}, "stop[0]"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_refused_before_any_work(idle, fields, param, stream):
    engine, client = idle
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, stream=stream, **fields)
    assert caught.value.param == param
    assert engine.submitted == []


def test_a_failure_in_the_engine():
    with LiveServer(ScriptedEngine(Say("a", end=FailureKind.INTERNAL))) as server, client_of(server) as client:
        with pytest.raises(openai.InternalServerError, match="scripted failure"):
            create(client)
        with pytest.raises(openai.APIError, match="scripted failure"):
            list(create(client, stream=True))
        with pytest.raises(openai.NotFoundError):
            create(client, model="other")


def test_a_client_that_leaves_ends_all_sequences():
    engine = ScriptedEngine(Say("some words and no end", end=None))
    with LiveServer(engine) as server, client_of(server) as client:
        with create(client, prompt=["a", "b"], stream=True) as stream:
            next(iter(stream))
        assert engine.abort_seen.wait(10)
    assert len(engine.submitted) == 2
    assert sorted(engine.aborted) == sorted(message.request_id for message in engine.submitted)
