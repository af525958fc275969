import base64
import io
import json
import socket
import subprocess

import httpx
import openai
import pytest
from PIL import Image

from tests.e2e.server_process import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("server")]

HELLO = [{"role": "user", "content": "Tell me a story."}]
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
STATS_PERIOD_S = 0.5  # an idle engine reports that often


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


def picture(image_format):
    image = Image.linear_gradient("L").convert("RGB").resize((300, 200))
    buffer = io.BytesIO()
    image.save(buffer, image_format)
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{image_format.lower()};base64,{data}"}}


def streamed(client, messages, **fields):
    chunks = list(client.chat.completions.create(messages=messages, stream=True, **(GREEDY | fields)))
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks), chunks[-1].choices[0].finish_reason


def whole(client, messages, **fields):
    answer = client.chat.completions.create(messages=messages, **(GREEDY | fields))
    return answer.choices[0].message.content, answer.choices[0].finish_reason


def test_the_printed_example_works(server):
    result = subprocess.run(server.example, shell=True, capture_output=True, timeout=60, check=True)
    assert json.loads(result.stdout)["choices"][0]["message"]["role"] == "assistant"


def test_text_is_the_same_streamed_and_not(client):
    text, reason = whole(client, HELLO)
    assert text
    assert reason == "length"
    assert streamed(client, HELLO) == (text, reason)


@pytest.mark.parametrize("image_format", ["PNG", "JPEG"])
def test_a_picture_is_the_same_streamed_and_not(client, image_format):
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture(image_format)]}]
    text, reason = whole(client, messages)
    assert text
    assert streamed(client, messages) == (text, reason)


def test_a_repeated_prompt_comes_from_the_cache(client):
    messages = [{"role": "user", "content": "once upon a time " * 200}]
    answers = [client.chat.completions.create(messages=messages, **GREEDY) for _ in range(2)]
    first, second = (answer.usage for answer in answers)
    assert first.prompt_tokens_details.cached_tokens == 0
    assert 0 < second.prompt_tokens_details.cached_tokens < second.prompt_tokens
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_seeds_repeat_and_choices_differ(client):
    fields = {"temperature": 1.5, "seed": 7, "n": 3}
    runs = [client.chat.completions.create(messages=HELLO, **(GREEDY | fields)) for _ in range(2)]
    texts = [[choice.message.content for choice in run.choices] for run in runs]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


def test_logprobs_and_stop_strings_of_the_real_model(client):
    text, _ = whole(client, HELLO)
    answer = client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=2, **GREEDY)
    entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == text
    assert all(entry.logprob == pytest.approx(entry.top_logprobs[0].logprob) for entry in entries)
    stop = text[6:9]
    cut, reason = streamed(client, HELLO, stop=[stop])
    assert (cut, reason) == (text[: text.index(stop)], "stop")


def test_a_broken_picture_is_a_400_and_the_next_request_works(client):
    url = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n broken").decode()
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=messages, **GREEDY)
    assert caught.value.param == "messages[0].content[0].image_url"
    assert whole(client, HELLO)[1] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_the_pages_of_a_client_that_left_are_free_within_a_second(server, stream):
    body = {"messages": HELLO, "max_tokens": 100_000, "ignore_eos": True, "stream": stream}
    raw = json.dumps(body).encode()
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port)) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        wait_until(lambda: server.metric("m3_sequences_running") == 1, 10)
    num_pages = server.metric("m3_cache_pages")
    delay_s = wait_until(lambda: sum(map(server.metric, ("m3_cache_free_pages", "m3_cache_cached_pages"))) == num_pages, 10)
    assert delay_s < 1 + STATS_PERIOD_S
    assert server.metric("m3_sequences_open") == 0
