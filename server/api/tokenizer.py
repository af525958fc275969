"""The checkpoint's byte-level BPE: ordinary text to ids, ids to bytes.

Text given to `encode` never yields an added token, whatever it contains; added tokens are ids that others put between
encoded texts. Knows nothing of chats.
"""

import enum
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer as ByteLevelBpe

from server.api.added_tokens import AddedToken, AddedTokens, search
from server.api.checkpoint import CheckpointError, get_object, read_json
from server.api.conversation import JsonObject, JsonValue
from server.errors import BadRequestError

# Long text is encoded in pieces: it bounds memory, and the interpreter lock is free while a piece is encoded.
PIECE_LEN = 1 << 17
PIECES_PER_BATCH = 4
# Where every split pattern of the GPT-2 family cuts anyway: behind a letter before a space, and behind a line end before a
# letter. Cutting there changes no token.
CUT = re.compile(r"[A-Za-z](?= )|\n(?=[^\W\d_])")
CUT_LEN = 2
TAIL_LEN = 4096
# Special tokens that look like this stand for their text: a parameter called `filename` is tagged with the token `<filename>`.
TAG = re.compile(rb"<[^<>\s|]+>")


class SpecialTokens(enum.Enum):
    """Which special tokens are text."""

    HIDDEN = enum.auto()
    TAGS = enum.auto()  # those that look like a tag
    ALL = enum.auto()


class Tokenizer:
    """Encoding and the table of token bytes. Immutable after `load`; may be used by several threads.

    Attributes:
        added: the added tokens.
        num_tokens: ids below it exist; the logits may be wider.
    """

    def __init__(self, definition: JsonObject) -> None:
        """Args: definition: the content of tokenizer.json.

        Raises:
            CheckpointError: it is not byte-level BPE, or its added tokens strip the text around them.
        """
        tokens = list(_added_tokens(definition))
        self.added = AddedTokens(tokens)
        vocabulary = _base_vocabulary(definition, self.added)
        self._bpe = _without_added_tokens(definition)
        self.num_tokens = 1 + max(max(vocabulary.values()), *(token.id for token in tokens))
        self._bytes = [b""] * self.num_tokens
        byte_of = _byte_of_symbol()
        for symbols, token_id in vocabulary.items():
            self._bytes[token_id] = bytes(byte_of[symbol] for symbol in symbols)
        for token in tokens:
            self._bytes[token.id] = token.text.encode()
        self._special = frozenset(token.id for token in tokens if token.special)

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """Read tokenizer.json.

        Raises:
            CheckpointError: see the constructor; or the file is missing.
        """
        return cls(read_json(model_dir / "tokenizer.json"))

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        """The ids of ordinary text.

        Args:
            text: any; it is normalised as the checkpoint says.
            max_tokens: stop once there are more; the result then is longer than this, and incomplete.

        Raises:
            BadRequestError: the text has a lone surrogate.
        """
        token_ids: list[int] = []
        pieces = _pieces(text)
        while batch := list(itertools.islice(pieces, PIECES_PER_BATCH)):
            try:
                # Unlike `encode`, this call releases the interpreter lock.
                encodings = self._bpe.encode_batch_fast(batch, add_special_tokens=False)
            except TypeError:
                raise BadRequestError("text must be valid Unicode; it has a lone surrogate") from None
            for encoding in encodings:
                token_ids.extend(encoding.ids)
            if max_tokens is not None and len(token_ids) > max_tokens:
                break
        return token_ids

    def split_tail(self, text: str) -> tuple[str, str]:
        """Cut `text` so that the ids of both parts together are its ids, as near to its end as can be told cheaply.

        Whatever is written behind `text` can only change the ids of the second part.
        """
        cuts = [match.end() for match in CUT.finditer(text, max(0, len(text) - TAIL_LEN))]
        return (text[: cuts[-1]], text[cuts[-1] :]) if cuts else ("", text)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, alone perhaps not valid UTF-8; of an added token its text; else b""."""
        return self._bytes[token_id] if 0 <= token_id < self.num_tokens else b""

    def is_special(self, token_id: int) -> bool:
        """Whether a token is hidden from clients."""
        return token_id in self._special

    def is_shown(self, token_id: int, special: SpecialTokens) -> bool:
        """Whether a token is part of the text that `special` lets through."""
        if special is SpecialTokens.ALL or not self.is_special(token_id):
            return True
        return special is SpecialTokens.TAGS and TAG.fullmatch(self.token_bytes(token_id)) is not None

    def shown_bytes(self, special: SpecialTokens) -> list[bytes]:
        """The bytes of every token, those that are not shown empty."""
        return [data if self.is_shown(token_id, special) else b"" for token_id, data in enumerate(self._bytes)]


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text where the tokenizer cuts it anyway; a text without such a place stays whole."""
    start = 0
    while len(text) - start > PIECE_LEN:
        match = search(CUT, text, start + PIECE_LEN, CUT_LEN)
        if match is None:
            break
        yield text[start : match.end()]
        start = match.end()
    if start < len(text):
        yield text[start:]


def _added_tokens(definition: JsonObject) -> Iterator[AddedToken]:
    """The added tokens of tokenizer.json."""
    entries = definition.get("added_tokens")
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict):
            raise CheckpointError("tokenizer.json: an added token is not an object")
        token_id, text = entry.get("id"), entry.get("content")
        if not isinstance(token_id, int) or not isinstance(text, str):
            raise CheckpointError("tokenizer.json: an added token has no id or no content")
        if entry.get("lstrip") or entry.get("rstrip") or entry.get("single_word"):
            raise CheckpointError(f"tokenizer.json: added token {text} strips its surroundings, which is not supported")
        yield AddedToken(token_id, text, bool(entry.get("special")))


def _base_vocabulary(definition: JsonObject, added: AddedTokens) -> dict[str, int]:
    """Symbols to ids, without the added tokens that some exports repeat in it."""
    model = get_object(definition, "model")
    vocabulary = get_object(model, "vocab")
    if model.get("type") != "BPE" or "ByteLevel" not in _decoder_types(definition.get("decoder")) or not vocabulary:
        raise CheckpointError("tokenizer.json is not a byte-level BPE")
    return {text: index for text, index in vocabulary.items() if text not in added.by_text and isinstance(index, int)}


def _decoder_types(decoder: JsonValue) -> set[JsonValue]:
    """The types of a decoder and of the members of a sequence."""
    if not isinstance(decoder, dict):
        return set()
    members = decoder.get("decoders")
    inner = [_decoder_types(member) for member in members] if isinstance(members, list) else []
    return {decoder.get("type")}.union(*inner)


def _without_added_tokens(definition: JsonObject) -> ByteLevelBpe:
    """The BPE alone: no text can become an added token in it."""
    plain = {**definition, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    return ByteLevelBpe.from_str(json.dumps(plain))


def _byte_of_symbol() -> dict[str, int]:
    """The byte that each printable symbol of a byte-level vocabulary stands for.

    Printable Latin-1 bytes stand for themselves; the others, in order, are the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}
