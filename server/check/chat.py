"""Tokenizer, generation config and chat template: what turns conversations into ids and back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from server.api.chat_format import MEDIA_END, MEDIA_START, MEDIA_TEXTS, ChatFormat
from server.api.checkpoint import CheckpointError
from server.api.conversation import JsonObject, MediaPart, Role, TemplateMessage, TextPart, ToolCall
from server.api.generation_config import GenerationDefaults
from server.api.reasoning import CLOSER, OPENER
from server.api.template import ChatTemplate
from server.api.tokenizer import SpecialTokens, Tokenizer
from server.api.tool_markup import NAMESPACE
from server.check.findings import Area, Finding, Level
from server.errors import M3Error
from server.grammars import GrammarError, GrammarTokenizer
from server.messages import MediaKind
from server.model.config import M3Config
from server.settings import ThinkingMode

TURN_START, TURN_END = "]~b]", "[e~["
RELEASED_VOCABULARY = 200_064
RELEASED_IDS: Final = {
    TURN_START: 200_019,
    TURN_END: 200_020,
    "]!d~[": 200_021,
    MEDIA_TEXTS[MediaKind.IMAGE]: 200_025,
    MEDIA_TEXTS[MediaKind.VIDEO]: 200_026,
    MEDIA_START: 200_029,
    MEDIA_END: 200_030,
    "]<]start of video[>[": 200_031,
    "]<]end of video[>[": 200_032,
    "]<]vision pad[>[": 200_033,
    "]~!b[": 200_034,
    "<think>": 200_050,
    "</think>": 200_051,
    "<tool_call>": 200_052,
    "</tool_call>": 200_053,
    "]<]frame[>[": 200_054,
    "]<]start of frame[>[": 200_055,
    "]<]end of frame[>[": 200_056,
    NAMESPACE: 200_058,
    OPENER: 200_059,
    CLOSER: 200_060,
}
"""The special tokens of MiniMaxAI/MiniMax-M3 that conversations, media and calls are written with, and their neighbours."""
_UNUSED: Final = {"]!d~[", "]<]start of video[>[", "]<]end of video[>[", "]<]vision pad[>[", "<think>", "</think>"} | {
    f"]<]{name}[>[" for name in ("frame", "start of frame", "end of frame")
}

_SAMPLE_TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "measure_depth",
        "description": "Depth of a lake.",
        "parameters": {"type": "object", "properties": {"lake": {"type": "string"}}, "required": ["lake"]},
    },
}
_QUESTION, _RESULT = "How deep is this lake?", "312 metres"


def check_tokenizer(model_dir: Path, config: M3Config | None) -> Iterator[Finding]:
    """It loads, and its special tokens are those of the config and of the release."""
    tokenizer = _load_tokenizer(model_dir)
    if isinstance(tokenizer, Finding):
        yield tokenizer
        return
    ids = {text: token.id for text, token in tokenizer.added.by_text.items()}
    for text in [text for text in RELEASED_IDS if text not in ids]:
        yield Finding(Level.WARNING if text in _UNUSED else Level.ERROR, Area.TOKENIZER, f"no special token {text}")
    if config is None:
        return
    vocab_size = config.text.vocab_size
    if tokenizer.num_tokens > vocab_size:
        text = f"{tokenizer.num_tokens} ids, but the config's vocabulary has {vocab_size}"
        yield Finding(Level.ERROR, Area.TOKENIZER, text)
    expected = dict(RELEASED_IDS) if vocab_size == RELEASED_VOCABULARY else {}
    sources = dict.fromkeys(expected, "in the released model")
    for kind, token_id in ((MediaKind.IMAGE, config.image_token_id), (MediaKind.VIDEO, config.video_token_id)):
        expected[MEDIA_TEXTS[kind]], sources[MEDIA_TEXTS[kind]] = token_id, "in config.json"
    for text, token_id in expected.items():
        if ids.get(text, token_id) != token_id:
            yield Finding(Level.ERROR, Area.TOKENIZER, f"{text} has the id {ids[text]}, {sources[text]} {token_id}")
    try:
        GrammarTokenizer(model_dir, vocab_size)
    except GrammarError as error:
        yield Finding(Level.WARNING, Area.TOKENIZER, f"structured output will be refused: {error}")


def check_generation(model_dir: Path, config: M3Config | None) -> Iterator[Finding]:
    """It names what ends an answer, by the tokenizer's id."""
    try:
        end_ids = GenerationDefaults.load(model_dir).eos_token_ids
    except (CheckpointError, OSError) as error:
        yield Finding(Level.ERROR, Area.GENERATION, str(error))
        return
    if not end_ids:
        yield Finding(Level.ERROR, Area.GENERATION, "generation_config.json names no eos_token_id")
        return
    if config and max(end_ids) >= config.text.vocab_size:
        yield Finding(Level.ERROR, Area.GENERATION, f"eos_token_id {max(end_ids)} is outside the vocabulary")
    tokenizer = _load_tokenizer(model_dir)
    end = None if isinstance(tokenizer, Finding) else tokenizer.added.by_text.get(TURN_END)
    if end and end.id not in end_ids:
        yield Finding(Level.ERROR, Area.GENERATION, f"eos_token_id {list(end_ids)} lacks {end.id}, the id of {TURN_END}")


def check_template(model_dir: Path, config: M3Config | None) -> Iterator[Finding]:
    """It compiles, and writes a conversation with a picture, a call and its result in every mode of thinking."""
    try:
        ChatTemplate.load(model_dir)
    except (CheckpointError, OSError, ValueError) as error:
        yield Finding(Level.ERROR, Area.TEMPLATE, str(error))
        return
    if isinstance(_load_tokenizer(model_dir), Finding):
        return
    try:
        chat_format = ChatFormat(model_dir)
    except CheckpointError:
        return  # config, tokenizer or generation config are at fault, and reported there
    for mode in ThinkingMode:
        try:
            prompt = chat_format.encode_chat(_sample(), [_SAMPLE_TOOL], mode)
        except M3Error as error:
            yield Finding(Level.ERROR, Area.TEMPLATE, f"cannot write a conversation with thinking {mode.value}: {error}")
            continue
        detokenizer = chat_format.detokenizer(SpecialTokens.ALL)
        written = detokenizer.push(prompt.token_ids) + detokenizer.flush()
        for text in (_QUESTION, _RESULT, "measure_depth", TURN_START):
            if text not in written:
                yield Finding(Level.ERROR, Area.TEMPLATE, f"leaves {text!r} of a conversation out, with thinking {mode.value}")


def _load_tokenizer(model_dir: Path) -> Tokenizer | Finding:
    try:
        return Tokenizer.load(model_dir)
    except CheckpointError as error:
        return Finding(Level.ERROR, Area.TOKENIZER, str(error))
    except Exception as error:  # the library's own faults have no type
        return Finding(Level.ERROR, Area.TOKENIZER, f"tokenizer.json cannot be used: {type(error).__name__}: {error}")


def _sample() -> list[TemplateMessage]:
    return [
        TemplateMessage(Role.SYSTEM, "Answer briefly."),
        TemplateMessage(Role.USER, (TextPart(_QUESTION), MediaPart(MediaKind.IMAGE))),
        TemplateMessage(Role.ASSISTANT, None, "A tool knows.", (ToolCall("measure_depth", {"lake": "Maggiore"}, "1"),)),
        TemplateMessage(Role.TOOL, _RESULT, tool_call_id="1"),
        TemplateMessage(Role.USER, "And in feet?"),
    ]
