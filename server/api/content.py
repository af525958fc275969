"""Client messages to template messages, and their pictures to media sources.

Runs in a thread: it decodes base64. Every picture must be a data URI; nothing is fetched.
"""

import msgspec

from server.api.conversation import ContentPart, MediaPart, Role, TemplateMessage, TextPart, ToolCall
from server.api.schema import ImageContent, ImageUrl, Message, Part, TextContent
from server.errors import BadRequestError, MediaError
from server.media.data_uri import decode_data_uri, is_data_uri
from server.media.types import Detail, MediaOptions, MediaSource
from server.messages import MediaKind

# An assistant turn may hold nothing but calls or reasoning, and a tool may return nothing.
MAY_BE_EMPTY = frozenset({Role.ASSISTANT, Role.TOOL})


class Conversation(msgspec.Struct, frozen=True):
    """A request's messages and the media they mention, in the same order."""

    messages: tuple[TemplateMessage, ...]
    sources: tuple[MediaSource, ...]


class MediaLimits(msgspec.Struct, frozen=True):
    """Pictures per request, and the encoded size of one in bytes."""

    max_images: int
    max_image_bytes: int


def convert(messages: list[Message], limits: MediaLimits) -> Conversation:
    """Type the messages, which are validated in form, and decode their pictures.

    Raises:
        BadRequestError: a message without content, an unsupported part; `param` names the place.
        MediaError: too many pictures, one that is too large, or an address that is no data URI.
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
    """Type the parts of one message; the bytes of its pictures are appended to `sources`."""
    converted: list[ContentPart] = []
    for position, part in enumerate(parts):
        if isinstance(part, TextContent):
            converted.append(TextPart(part.text))
            continue
        place = f"{param}[{position}].{part.type}"
        if not isinstance(part, ImageContent):
            raise BadRequestError("video_url is not supported yet", param=place, code="unsupported_value")
        if len(sources) == limits.max_images:
            raise MediaError(f"a request may hold at most {limits.max_images} pictures", param=place)
        sources.append(_image_source(part, place, limits.max_image_bytes))
        converted.append(MediaPart(MediaKind.IMAGE))
    return tuple(converted)


def _image_source(part: ImageContent, param: str, max_bytes: int) -> MediaSource:
    image = ImageUrl(url=part.image_url) if isinstance(part.image_url, str) else part.image_url
    if not is_data_uri(image.url):
        message = "pictures must be data URIs (data:image/png;base64,...); addresses are not fetched"
        raise MediaError(message, param=param, code="unsupported_value")
    detail = Detail.AUTO if image.detail in (None, "default") else Detail(image.detail)
    options = MediaOptions(image.max_long_side_pixel, detail)
    return MediaSource(MediaKind.IMAGE, decode_data_uri(image.url, max_bytes=max_bytes, param=param), options, param)
