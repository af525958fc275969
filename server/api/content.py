"""Client messages to template messages, and their pictures and clips to media sources.

Runs off the event loop: it decodes base64. Addresses are passed on; the media pipeline fetches what they name.
"""

import msgspec

from server.api.conversation import ContentPart, MediaPart, Role, TemplateMessage, TextPart, ToolCall
from server.api.schema import ImageContent, Message, Part, TextContent, VideoContent, VideoUrl
from server.errors import BadRequestError, MediaError
from server.media.data_uri import decode_data_uri, is_data_uri
from server.media.fetch import is_remote
from server.media.types import Detail, MediaOptions, MediaSource
from server.messages import MediaKind

# An assistant turn may hold nothing but calls or reasoning, and a tool may return nothing.
MAY_BE_EMPTY = frozenset({Role.ASSISTANT, Role.TOOL})


class Conversation(msgspec.Struct, frozen=True):
    """A request's messages and the media they mention, in the same order."""

    messages: tuple[TemplateMessage, ...]
    sources: tuple[MediaSource, ...]


class KindLimit(msgspec.Struct, frozen=True):
    """Items of one kind per request, and the encoded size of one in bytes."""

    max_items: int
    max_bytes: int


class MediaLimits(msgspec.Struct, frozen=True):
    """What a request may hold of each kind."""

    image: KindLimit
    video: KindLimit

    def of(self, kind: MediaKind) -> KindLimit:
        """The limit of one kind."""
        return self.image if kind is MediaKind.IMAGE else self.video


def convert(messages: list[Message], limits: MediaLimits) -> Conversation:
    """Type the messages, which are validated in form, and decode their data URIs.

    Raises:
        BadRequestError: a message without content, an unsupported part; `param` names the place.
        MediaError: too many pictures or clips, one that is too large, or an address of a kind that is not known.
    """
    sources: list[MediaSource] = []
    converted = []
    for position, message in enumerate(messages):
        param = f"messages[{position}]"
        role = Role(message.role)
        content = message.content
        if content is None and role not in MAY_BE_EMPTY:
            raise BadRequestError(f"{param}.content is required for the role {role.value}", param=f"{param}.content")
        calls = message.tool_calls or ()
        converted.append(
            TemplateMessage(
                role=role,
                content=_parts(content, f"{param}.content", limits, sources) if isinstance(content, list) else content,
                reasoning=_reasoning(message),
                tool_calls=tuple(ToolCall(call.function.name, call.function.arguments, call.id) for call in calls),
                tool_call_id=message.tool_call_id,
            )
        )
    return Conversation(tuple(converted), tuple(sources))


def _reasoning(message: Message) -> str | None:
    """An assistant's earlier reasoning in any of the spellings in use; None when none was sent."""
    for given in (message.reasoning_content, message.reasoning):
        if given is not None:
            return given
    if message.reasoning_details is None:
        return None
    return "".join(detail.text or "" for detail in message.reasoning_details)


def _parts(parts: list[Part], param: str, limits: MediaLimits, sources: list[MediaSource]) -> tuple[ContentPart, ...]:
    """Type the parts of one message; its pictures and clips are appended to `sources`."""
    converted: list[ContentPart] = []
    for position, part in enumerate(parts):
        if isinstance(part, TextContent):
            converted.append(TextPart(part.text))
            continue
        place = f"{param}[{position}].{part.type}"
        kind = MediaKind.IMAGE if isinstance(part, ImageContent) else MediaKind.VIDEO
        limit = limits.of(kind)
        if sum(source.kind is kind for source in sources) == limit.max_items:
            raise MediaError(
                f"num of {kind.value} larger than limit: a request may hold at most {limit.max_items}", param=place
            )
        sources.append(_source(part, kind, place, limit.max_bytes))
        converted.append(MediaPart(kind))
    return tuple(converted)


def _source(part: ImageContent | VideoContent, kind: MediaKind, param: str, max_bytes: int) -> MediaSource:
    given = part.image_url if isinstance(part, ImageContent) else part.video_url
    address = VideoUrl(url=given) if isinstance(given, str) else given
    options = MediaOptions(
        max_long_side_pixel=address.max_long_side_pixel,
        detail=Detail.AUTO if address.detail in (None, "default") else Detail(address.detail),
        max_pixels=address.max_pixels,
        fps=_first(address.fps, part.fps) if isinstance(address, VideoUrl) and isinstance(part, VideoContent) else None,
        max_frames=address.max_frames if isinstance(address, VideoUrl) else None,
    )
    if is_remote(address.url):
        return MediaSource(kind, options=options, param=param, url=address.url)
    if not is_data_uri(address.url):
        message = f"{kind.value}_url must be an http or https address or a data URI (data:{kind.value}/...;base64,...)"
        raise MediaError(message, param=param, code="unsupported_value")
    return MediaSource(kind, decode_data_uri(address.url, max_bytes=max_bytes, param=param), options, param)


def _first(inner: float | None, outer: float | None) -> float | None:
    """Clients write `fps` inside the address object, as documented, or beside it."""
    return outer if inner is None else inner
