"""The way of another endpoint's body into the chat path: after it nothing knows which endpoint a request came through.

Runs off the event loop, like everything that costs time in proportion to the body.
"""

import msgspec
from pydantic import ValidationError

from server.api.content import convert
from server.api.conversation import JsonObject
from server.api.prepare import Checker, Prepared
from server.api.problems import from_validation
from server.api.schema import ChatBody
from server.api.validate import make_chat_call


def parse_chat(chat: JsonObject) -> ChatBody:
    """A chat body that was made from another endpoint's, as its model.

    Raises:
        BadRequestError: the first fault in it.
    """
    try:
        return ChatBody.model_validate(chat)
    except ValidationError as error:
        raise from_validation(error) from None


def prepare_translated(checker: Checker, chat: JsonObject, *, ends_with_window: bool = False) -> Prepared:
    """Check, render and tokenize a chat body that was made from another endpoint's.

    Args:
        checker: what to check against.
        chat: made from a body whose types were checked.
        ends_with_window: as in `Call`.

    Raises:
        M3Error: whatever is wrong with the request, in the words of the chat body's fields.
    """
    body = parse_chat(chat)
    chat_call = make_chat_call(body, checker.limits, checker.chat_format)
    call = msgspec.structs.replace(chat_call.call, ends_with_window=ends_with_window)
    chat_call = msgspec.structs.replace(chat_call, call=call)
    return checker.encode(chat_call, convert(body.messages, checker.media_limits))
