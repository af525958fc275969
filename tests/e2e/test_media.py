"""Chats about pictures and clips through the real client, server, workers and engine."""

import base64
import io

import openai
import pytest
from PIL import Image

from tests.media.clips import clip

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("server")]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        yield client


def ask(client, *parts):
    content = [*parts, {"type": "text", "text": "What is this?"}]
    return client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": content}],
        max_tokens=4,
        temperature=0,
        extra_body={"ignore_eos": True},
    )


def prompt_tokens(client, *parts):
    answer = ask(client, *parts)
    assert answer.usage.completion_tokens == 4
    return answer.usage.prompt_tokens


def data_uri(kind, data):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def video(data, **options):
    return {"type": "video_url", "video_url": {"url": data_uri("video/mp4", data), **options}}


def photo(orientation):
    """400 x 40 pixels as they are stored."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    Image.new("RGB", (400, 40), "red").save(buffer, "JPEG", exif=exif)
    return {"type": "image_url", "image_url": {"url": data_uri("image/jpeg", buffer.getvalue())}}


def test_a_clip_costs_the_tokens_of_its_frames_and_marks(client):
    text = prompt_tokens(client)
    data = clip(35, size=(128, 96))  # 140 x 84 pixels: 15 tokens for each pair of frames
    four_frames = prompt_tokens(client, video(data)) - text
    two_frames = prompt_tokens(client, video(data, fps=0.5)) - text
    one_frame = prompt_tokens(client, video(data, max_frames=1)) - text
    assert one_frame == two_frames > 15 + 2
    assert four_frames >= 2 * (15 + 2)
    assert prompt_tokens(client, video(clip(35, rotation=90))) - text == four_frames


def test_a_phones_picture_is_turned_before_it_is_measured(client):
    assert prompt_tokens(client, photo(6)) == prompt_tokens(client, photo(1))
    assert ask(client, photo(6)).choices[0].message.content


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (video(b"junk" * 100), "unsupported type"),
        (video(clip(3)[:400]), "corrupt"),
        (video(clip(3), fps=100), "less than or equal to 5"),
        ({"type": "video_url", "video_url": "http://127.0.0.1/clip.mp4"}, "public internet"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "not served"),
    ],
    ids=["junk", "cut", "fps", "loopback", "file"],
)
def test_what_cannot_be_shown_is_a_400_that_says_where(client, part, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        ask(client, part)
    assert caught.value.param.startswith("messages[0].content[0]")


def test_21_clips_are_too_many(client):
    with pytest.raises(openai.BadRequestError, match="num of video larger than limit"):
        ask(client, *[video(clip(1, size=(64, 64)))] * 21)
