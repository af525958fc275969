"""Finds MiniMax-M3's structural tags in a reply's text, as the text arrives.

A tag is the namespace text followed by `<name>`, `</name>` or `<invoke name="f">`; without the namespace, angle brackets are
data. Blanks around the parts, other quotes and a lost `<` before the words that M3 uses itself are tolerated. A text that may
still become a tag is held back until it is decided, which takes at most `MAX_TAG_LEN` characters, so cost is linear in the
text. Knows nothing of what a tag means or of where it may stand.
"""

import enum
import re
from typing import Final

import msgspec

from server.api.reasoning import num_held_back

NAMESPACE: Final = "]<]minimax[>["
MAX_TAG_LEN: Final = 512  # characters behind the namespace; more is no tag

_BLANKS = re.compile(r"\s*")
_ANGLE = re.compile(r"[<>]")
_INVOKE = re.compile(r"invoke\s(.*)", re.DOTALL)
_NAME = re.compile(r"""\bname\s*=\s*(?:"([^"]*)"|'([^']*)'|(\S*))""", re.DOTALL)
# What may follow the namespace without its `<`.
_BARE_WORDS = ("tool_call>", "/tool_call>", "/invoke>")


class TagKind(enum.Enum):
    """What a tag is by its spelling alone."""

    OPEN = "open"
    CLOSE = "close"
    INVOKE = "invoke"  # its name is the function's, empty when there is none
    BARE = "bare"  # the namespace, and no tag behind it
    CUT = "cut"  # the text ended inside the tag


class Text(msgspec.Struct, frozen=True):
    """Text between tags, never empty; `start` is its place in the whole text."""

    start: int
    raw: str


class Tag(msgspec.Struct, frozen=True):
    """A tag; `raw` is its text with the namespace, `start` its place in the whole text."""

    start: int
    raw: str
    kind: TagKind
    name: str = ""


class MarkupLexer:
    """Cuts one text into `Text` and `Tag`. The raw texts of all pieces, joined, are the text."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str, start: int) -> list[Text | Tag]:
        """Take the next piece of text, which stands at `start`; returns what is decided, in order."""
        held = self._held + text
        base = start - len(self._held)
        pieces: list[Text | Tag] = []
        begin = 0
        while (at := held.find(NAMESPACE, begin)) >= 0:
            if at > begin:
                pieces.append(Text(base + begin, held[begin:at]))
            begin = at
            tag = _read_tag(held, at, base)
            if tag is None:
                break
            pieces.append(tag)
            begin += len(tag.raw)
        else:
            end = len(held) - num_held_back(held[max(begin, len(held) - len(NAMESPACE)) :], NAMESPACE)
            if end > begin:
                pieces.append(Text(base + begin, held[begin:end]))
            begin = end
        self._held = held[begin:]
        return pieces

    def flush(self, end: int) -> list[Text | Tag]:
        """The text ended, at `end`: what was held back is a cut tag, or text if not even its namespace was whole."""
        held, self._held = self._held, ""
        if not held:
            return []
        start = end - len(held)
        return [Tag(start, held, TagKind.CUT) if held.startswith(NAMESPACE) else Text(start, held)]


def _read_tag(text: str, at: int, base: int) -> Tag | None:
    """The tag whose namespace stands at `at`, or None while that cannot be told."""
    after = at + len(NAMESPACE)
    limit = after + MAX_TAG_LEN
    bare = Tag(base + at, NAMESPACE, TagKind.BARE)
    blanks = _BLANKS.match(text, after, limit)
    begin = blanks.end() if blanks is not None else after
    if begin >= limit:
        return bare
    has_angle = text.startswith("<", begin)
    if not has_angle and not _may_lack_angle(text[begin:limit]):
        return None if begin == len(text) else bare
    begin += has_angle
    angle = _ANGLE.search(text, begin, limit)
    if angle is None:
        return None if len(text) < limit else bare
    if angle.group() == "<":
        return bare
    kind, name = _interpret(text[begin : angle.start()])
    if not name and (not has_angle or kind is not TagKind.INVOKE):
        return bare
    return Tag(base + at, text[at : angle.end()], kind, name)


def _may_lack_angle(rest: str) -> bool:
    """Whether the text behind the namespace is, or may still become, a tag without its `<`."""
    if not rest:
        return False
    if any(rest.startswith(word) or word.startswith(rest) for word in _BARE_WORDS):
        return True
    return "invoke".startswith(rest) or (rest.startswith("invoke") and rest[6].isspace())


def _interpret(body: str) -> tuple[TagKind, str]:
    """Kind and name of the text between the angle brackets."""
    body = body.strip()
    if body.startswith("/"):
        return TagKind.CLOSE, body[1:].strip()
    invoke = _INVOKE.fullmatch(body)
    if invoke is None:
        return TagKind.OPEN, body
    name = _NAME.search(invoke.group(1))
    return TagKind.INVOKE, "" if name is None else "".join(name.groups(default="")).strip().strip("\"'").strip()
