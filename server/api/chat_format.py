"""The checkpoint's way to write conversations as tokens, and to read tokens as text.

Client text never becomes an added token: it is guarded before the template runs, the added tokens that the template wrote
are found in the rendered text, and everything between them is encoded as ordinary text. A prompt is encoded once; pictures
and clips are put in by id.
"""

import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from server.api.added_tokens import AddedToken
from server.api.checkpoint import CheckpointError, get_int, get_object, read_json
from server.api.conversation import JsonObject, NumberedMedia, TemplateMessage, arrange
from server.api.detokenizer import Detokenizer
from server.api.generation_config import GenerationDefaults
from server.api.prompt import EncodedPrompt, ExpandedPrompt, MediaExpander, MediaLayout, Tail
from server.api.reasoning import CLOSER, OPENER
from server.api.template import ChatTemplate
from server.api.template_input import TemplateInput
from server.api.tokenizer import SpecialTokens, Tokenizer
from server.api.tool_grammar import MarkerIds
from server.api.tool_markup import NAMESPACE
from server.errors import BadRequestError, ContextLengthError, M3Error
from server.messages import MediaKind, ThinkingTokens
from server.settings import ThinkingMode

# Clips too stand between the marks for images; the pair for videos exists but is not what the model was trained with.
MEDIA_START, MEDIA_END = "]<]start of image[>[", "]<]end of image[>["
MEDIA_TEXTS = {MediaKind.IMAGE: "]<]image[>[", MediaKind.VIDEO: "]<]video[>["}


class ChatFormat:
    """Template, tokenizer and defaults of one checkpoint. Immutable; every method may be called from worker threads.

    Attributes:
        defaults: what a request samples with when it does not say.
        eos_token_ids: ids that end an answer.
        vocab_size: number of ids that the tokenizer knows; the logits may be wider.
        markers: ids of the tokens that calls are written with.
        media_ids: ids of the placeholders of pictures and clips.
    """

    def __init__(self, model_dir: Path) -> None:
        """Raises: CheckpointError: a file is missing or cannot be used."""
        config = read_json(model_dir / "config.json")
        self._tokenizer = Tokenizer.load(model_dir)
        self._template = ChatTemplate.load(model_dir)
        self.defaults = GenerationDefaults.load(model_dir)
        self.vocab_size = self._tokenizer.num_tokens
        self.eos_token_ids = self.defaults.eos_token_ids
        if not self.eos_token_ids:
            raise CheckpointError("generation_config.json names no eos_token_id")
        media_ids = {
            MediaKind.IMAGE: get_int(config, "image_token_index", "image_token_id"),
            MediaKind.VIDEO: get_int(config, "video_token_index", "video_token_id"),
        }
        self._kinds = {token_id: kind for kind, token_id in media_ids.items()}
        self.media_ids = frozenset(self._kinds)
        for kind, text in MEDIA_TEXTS.items():
            if self._added(text).id != media_ids[kind]:
                raise CheckpointError(f"config.json and tokenizer.json disagree on the id of {text}")
        vision = get_object(config, "vision_config")
        compression = get_object(vision, "img_token_compression_config")
        merge_key = "spatial_merge_size"
        merge_size = get_int(compression if merge_key in compression else vision or {merge_key: 2}, merge_key)
        self._expander = MediaExpander(
            self._tokenizer, media_ids, self._added(MEDIA_START).id, self._added(MEDIA_END).id, merge_size
        )
        self._shown = {special: self._tokenizer.shown_bytes(special) for special in SpecialTokens}
        self.markers = MarkerIds(*(self._added(text).id for text in (NAMESPACE, "<tool_call>", "</tool_call>")))
        self._opener, self._closer = self._added(OPENER).id, self._added(CLOSER).id

    @classmethod
    def load(cls, model_dir: Path) -> "ChatFormat":
        """Read the format of the checkpoint in `model_dir`.

        Raises:
            CheckpointError: a file is missing or cannot be used.
        """
        return cls(model_dir)

    def encode_chat(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[JsonObject] | None,
        thinking_mode: ThinkingMode,
        *,
        add_generation_prompt: bool = True,
        max_tokens: int | None = None,
    ) -> EncodedPrompt:
        """Render and encode a conversation.

        Args:
            messages: as the client sent them; `arrange` says what becomes of them.
            tools: as the client sent them; None or empty for none.
            thinking_mode: the template's switch.
            add_generation_prompt: end with the head of the assistant's turn.
            max_tokens: give up on a prompt that is longer.

        Raises:
            BadRequestError: the conversation cannot be rendered.
            ContextLengthError: more than `max_tokens`, placeholders counted as one.
        """
        # Private-use characters, so that no pattern of a template or tokenizer knows them, drawn after the client wrote.
        mark = "".join(chr(0xE000 + secrets.randbelow(0x1900)) for _ in range(4))
        client = TemplateInput(self._tokenizer.added, mark)
        arranged = arrange(messages)
        try:
            turns = [client.message(message) for message in arranged]
            functions = [client.tool(tool) for tool in tools] if tools else None
        except RecursionError:
            raise BadRequestError("the conversation nests values too deeply", param="messages") from None
        rendered = self._template.render(turns, functions, thinking_mode, add_generation_prompt)
        try:
            prompt, kinds = self._encode_rendered(rendered, mark, max_tokens)
        except BadRequestError as error:
            error.param = error.param or "messages"
            raise
        media = [part for message in arranged for part in message.content if isinstance(part, NumberedMedia)]
        if kinds != [part.kind for part in media]:
            raise M3Error("the chat template does not place every picture and clip of this conversation")
        return msgspec.structs.replace(prompt, media_order=tuple(part.index for part in media))

    def encode_text(self, text: str, max_tokens: int | None = None) -> list[int]:
        """The ids of text without a template; no added token comes out of it.

        Raises:
            BadRequestError: the text has a lone surrogate.
            ContextLengthError: more than `max_tokens`.
        """
        token_ids = self._tokenizer.encode(text, max_tokens)
        _check_length(token_ids, max_tokens)
        return token_ids

    def expand_media(self, prompt: EncodedPrompt, items: Sequence[MediaLayout]) -> ExpandedPrompt:
        """Replace every placeholder by as many as its item has features, between start and end marks.

        Args:
            prompt: from `encode_chat`.
            items: one per placeholder, in prompt order (`media_order`).

        Raises:
            ValueError: the items are not those of the prompt.
        """
        return self._expander.expand(prompt, items)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, also where they are a part of a character; b"" for ids without a token."""
        return self._tokenizer.token_bytes(token_id)

    def thinking(self, mode: ThinkingMode) -> ThinkingTokens | None:
        """What comes before the text of an answer whose prompt was rendered in `mode`; None for nothing."""
        if mode is ThinkingMode.DISABLED:
            return None
        return ThinkingTokens(self._closer, self._opener if mode is ThinkingMode.ADAPTIVE else None)

    def is_shown(self, token_id: int, special: SpecialTokens) -> bool:
        """Whether a detokenizer makes text of the token."""
        return self._tokenizer.is_shown(token_id, special)

    def detokenizer(self, special: SpecialTokens = SpecialTokens.HIDDEN) -> Detokenizer:
        """A detokenizer for one sequence."""
        return Detokenizer(self._shown[special])

    def decode(self, token_ids: Sequence[int]) -> str:
        """The visible text of complete ids."""
        detokenizer = self.detokenizer()
        return detokenizer.push(token_ids) + detokenizer.flush()

    def _added(self, text: str) -> AddedToken:
        """The added token with this text."""
        token = self._tokenizer.added.by_text.get(text)
        if token is None:
            raise CheckpointError(f"tokenizer.json has no added token {text}")
        return token

    def _encode_rendered(self, rendered: str, mark: str, max_tokens: int | None) -> tuple[EncodedPrompt, list[MediaKind]]:
        """Encode what the template wrote; also returns the kinds of the placeholders."""
        token_ids: list[int] = []
        positions: list[int] = []
        tails: list[Tail] = []
        kinds: list[MediaKind] = []
        text = ""
        for piece in self._tokenizer.added.split(rendered):
            if isinstance(piece, str):
                text = self._tokenizer.added.unguard(piece, mark)
                continue
            kind = self._kinds.get(piece.id)
            tail = self._append_text(token_ids, text, max_tokens, with_tail=kind is MediaKind.VIDEO)
            text = ""
            if kind is not None:
                positions.append(len(token_ids))
                tails.append(tail)
                kinds.append(kind)
            token_ids.append(piece.id)
            _check_length(token_ids, max_tokens)
        self._append_text(token_ids, text, max_tokens)
        _check_length(token_ids, max_tokens)
        return EncodedPrompt(token_ids, tuple(positions), tails=tuple(tails)), kinds

    def _append_text(self, token_ids: list[int], text: str, max_tokens: int | None, *, with_tail: bool = False) -> Tail:
        """Append the ids of ordinary text; with `with_tail` also say what its last ids are."""
        tail = ""
        if with_tail:
            text, tail = self._tokenizer.split_tail(text)
        budget = None if max_tokens is None else max_tokens - len(token_ids)
        token_ids += self._tokenizer.encode(text, budget)
        tail_ids = self._tokenizer.encode(tail)
        token_ids += tail_ids
        return Tail(tail, len(tail_ids))


def _check_length(token_ids: Sequence[int], max_tokens: int | None) -> None:
    """Refuse a prompt that is too long; its real length is not known when encoding was given up."""
    if max_tokens is not None and len(token_ids) > max_tokens:
        raise ContextLengthError(f"the prompt has more than {max_tokens} tokens, which is all that fits")
