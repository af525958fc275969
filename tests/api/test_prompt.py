from pathlib import Path

import pytest

from server.api.chat_format import ChatFormat
from server.api.conversation import MediaPart, TextPart, ToolCall
from server.api.prompt import MediaLayout
from server.errors import M3Error
from server.messages import MediaKind, TokenRange
from server.settings import ThinkingMode
from tests.api.conversations import ADDED, FORMAT, assistant, copy_tiny, naive_ids, raw_text, tool, user

IMAGE, VIDEO = MediaPart(MediaKind.IMAGE), MediaPart(MediaKind.VIDEO)


def test_pictures_become_one_placeholder_each() -> None:
    prompt = FORMAT.encode_chat(
        [user((TextPart("What is "), IMAGE, TextPart("?"))), assistant("It."), user((IMAGE, VIDEO))],
        None,
        ThinkingMode.ADAPTIVE,
    )
    ids = [prompt.token_ids[position] for position in prompt.media_positions]
    assert ids == [ADDED["]<]image[>["], ADDED["]<]image[>["], ADDED["]<]video[>["]]
    assert prompt.media_order == (0, 1, 2)
    assert "]~b]user\nWhat is ]<]image[>[?[e~[\n" in raw_text(prompt.token_ids)


def test_pictures_in_reordered_tool_results_keep_their_numbers() -> None:
    calls = (ToolCall("f", None, "c1"), ToolCall("f", None, "c2"))
    messages = [user((IMAGE,)), assistant("", None, *calls), tool((IMAGE,), "c2"), tool((VIDEO,), "c1")]
    prompt = FORMAT.encode_chat(messages, None, ThinkingMode.ADAPTIVE)
    assert prompt.media_order == (0, 2, 1)
    assert prompt.token_ids[prompt.media_positions[1]] == ADDED["]<]video[>["]


def test_picture_expands_in_id_space() -> None:
    prompt = FORMAT.encode_chat([user((TextPart("a"), IMAGE, TextPart("b")))], None, ThinkingMode.ADAPTIVE)
    expanded = FORMAT.expand_media(prompt, [MediaLayout(MediaKind.IMAGE, (1, 4, 6))])
    text = raw_text(prompt.token_ids).replace("]<]image[>[", "]<]start of image[>[" + 6 * "]<]image[>[" + "]<]end of image[>[")
    assert expanded.token_ids == naive_ids(text)
    assert expanded.ranges == ((TokenRange(prompt.media_positions[0] + 1, 6),),)


@pytest.mark.parametrize("before", ["", "Describe ", "What is shown?", "a (", '"', "\n", "word. ", "x" * 5000])
def test_clip_expands_to_stamped_patches_as_text_would(before: str) -> None:
    prompt = FORMAT.encode_chat([user((TextPart(before), VIDEO, TextPart("end")))], None, ThinkingMode.ADAPTIVE)
    layout = MediaLayout(MediaKind.VIDEO, (3, 4, 4), (0.0, 2.0, 4.04))
    expanded = FORMAT.expand_media(prompt, [layout])
    patch = "]<]start of image[>[" + 4 * "]<]video[>[" + "]<]end of image[>["
    clip = "".join(f"]<]{stamp} seconds[>[{patch}" for stamp in ("0.0", "2.0", "4.0"))
    text = raw_text(prompt.token_ids).replace("]<]video[>[", clip)
    assert expanded.token_ids == naive_ids(text)
    for place in expanded.ranges[0]:
        placeholders = expanded.token_ids[place.offset : place.offset + place.length]
        assert placeholders == [ADDED["]<]video[>["]] * 4


def test_clip_without_times_has_no_stamps() -> None:
    prompt = FORMAT.encode_chat([user((VIDEO, IMAGE))], None, ThinkingMode.ADAPTIVE)
    layouts = [MediaLayout(MediaKind.VIDEO, (2, 2, 2)), MediaLayout(MediaKind.IMAGE, (1, 2, 2))]
    expanded = FORMAT.expand_media(prompt, layouts)
    assert "seconds" not in raw_text(expanded.token_ids)
    assert [len(ranges) for ranges in expanded.ranges] == [2, 1]


def test_expansion_refuses_items_of_another_prompt() -> None:
    prompt = FORMAT.encode_chat([user((IMAGE,))], None, ThinkingMode.ADAPTIVE)
    with pytest.raises(ValueError, match="item 0 is a video"):
        FORMAT.expand_media(prompt, [MediaLayout(MediaKind.VIDEO, (1, 2, 2))])
    with pytest.raises(ValueError, match="zip"):
        FORMAT.expand_media(prompt, [])


def test_template_that_drops_a_picture_is_an_error(tmp_path: Path) -> None:
    copy_tiny(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}{% endfor %}")
    with pytest.raises(M3Error, match="picture"):
        ChatFormat.load(tmp_path).encode_chat([user((IMAGE,))], None, ThinkingMode.ADAPTIVE)
