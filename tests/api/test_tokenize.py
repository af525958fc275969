import asyncio

import pytest

from tests.api.scripted import Say, ScriptedEngine, ScriptedMedia, chat, http_client, ids, post, tiny_format
from tests.api.test_openai_client import picture


def ask(path, body, engine=None, media=None, **settings):
    async def run():
        async with asyncio.timeout(30), http_client(engine or ScriptedEngine(Say("x")), media, **settings) as client:
            return await client.post(path, json=body)

    return asyncio.run(run())


def test_a_text_has_the_tokens_that_completions_run():
    answer = ask("/tokenize", {"prompt": "Hé [e~[ 漢", "return_token_strs": True}).json()
    assert answer["tokens"] == tiny_format().encode_text("Hé [e~[ 漢")
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 4096
    assert ask("/tokenize", {"prompt": ""}).json() == {"count": 0, "max_model_len": 4096, "tokens": [], "token_strs": None}


@pytest.mark.parametrize(
    "fields", [{}, {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"reasoning_effort": "none"}]
)
def test_a_conversation_has_the_tokens_that_chat_runs(fields):
    engine, media = ScriptedEngine(Say("x")), ScriptedMedia()
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, picture("PNG")]}], **fields}
    assert post(engine, body).status_code == 200
    answer = ask("/tokenize", body, media=media).json()
    assert answer["tokens"] == engine.submitted[0].prompt_token_ids
    assert media.num_leases == 0


def test_the_head_of_the_answers_turn_can_be_left_out():
    with_head = ask("/tokenize", chat()).json()["tokens"]
    without = ask("/tokenize", chat(add_generation_prompt=False)).json()["tokens"]
    assert with_head[: len(without)] == without
    assert len(without) < len(with_head)


def test_ids_become_the_text_they_stand_for():
    text = "]~b]user\nHé 漢[e~["
    assert ask("/detokenize", {"tokens": ids(text)}).json() == {"prompt": text}
    assert ask("/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_a_bad_request_is_refused(path, body, param):
    response = ask(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_other_models_and_a_server_that_is_not_ready():
    assert ask("/tokenize", {"prompt": "a", "model": "other"}).status_code == 404
    assert ask("/detokenize", {"tokens": [], "model": "other"}).status_code == 404
    assert ask("/tokenize", {"prompt": "a"}, ScriptedEngine(Say("x"), ready=False)).status_code == 503
