"""A body in Anthropic's shape to a prepared request, or to a prompt that is only counted: translated, then taken as a chat."""

from typing import Final

from server.api.messages_schema import CountTokensBody, MessagesBody
from server.api.messages_translate import chat_body
from server.api.places import Places
from server.api.prepare import Checker, Job, Prepared, Prompts, parse
from server.api.translated import parse_chat, prepare_translated


class PreparedMessages(Prepared, frozen=True, kw_only=True):
    """A request, the limit that the client set, and where the parts of the chat body came from."""

    max_tokens: int
    places: Places


class CountedPrompt(Prompts, frozen=True, kw_only=True):
    """A prompt, and where the parts of the chat body came from."""

    places: Places


def prepare_messages(checker: Checker, raw: bytes) -> PreparedMessages:
    """Parse, translate, check and encode a body. Errors name the client's own fields."""
    body = parse(MessagesBody, raw)
    translation = chat_body(body)
    with translation.places.renaming():
        # The limit is required, so clients send the most they would take, whatever the prompt leaves.
        prepared = prepare_translated(checker, translation.body, ends_with_window=True)
    return PreparedMessages(
        prepared.prompt, prepared.sources, call=prepared.call, max_tokens=body.max_tokens, places=translation.places
    )


def prepare_count(checker: Checker, raw: bytes) -> CountedPrompt:
    """The prompt of a body for counting. Errors name the client's own fields."""
    translation = chat_body(parse(CountTokensBody, raw))
    with translation.places.renaming():
        shown = checker.show(parse_chat(translation.body))
    return CountedPrompt(shown.prompt, shown.sources, places=translation.places)


MESSAGES_JOB: Final = Job("messages", prepare_messages, PreparedMessages)
COUNT_JOB: Final = Job("count", prepare_count, CountedPrompt)
