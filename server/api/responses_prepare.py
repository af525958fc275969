"""A body of the Responses API to a prepared request: translated, then prepared as a chat."""

from typing import Final

from server.api.places import Places
from server.api.prepare import Checker, Job, Prepared, parse
from server.api.responses_schema import ResponsesBody, TextFormat
from server.api.responses_translate import chat_body
from server.api.responses_wire import Echo
from server.api.translated import prepare_translated
from server.api.validate import Call


class PreparedResponse(Prepared, frozen=True, kw_only=True):
    """A request, what its response repeats of it, and where the parts of the chat body came from."""

    echo: Echo
    places: Places


def prepare_response(checker: Checker, raw: bytes) -> PreparedResponse:
    """Parse, translate, check and encode a body. Errors name the client's own fields."""
    body = parse(ResponsesBody, raw)
    translation = chat_body(body)
    with translation.places.renaming():
        prepared = prepare_translated(checker, translation.body)
    return PreparedResponse(
        prepared.prompt, prepared.sources, call=prepared.call, echo=echo(body, prepared.call), places=translation.places
    )


def echo(body: ResponsesBody, call: Call) -> Echo:
    """What the response repeats of its request."""
    text_format = body.text.format if body.text is not None and body.text.format is not None else TextFormat(type="text")
    choice = body.tool_choice or "auto"
    return Echo(
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning={"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        temperature=call.sampling.temperature,
        text={"format": text_format.model_dump(by_alias=True, exclude_none=True)},
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
        tools=list(body.tools or ()),
        top_logprobs=body.top_logprobs or 0,
        top_p=call.sampling.top_p,
        user=body.user,
    )


RESPONSE_JOB: Final = Job("response", prepare_response, PreparedResponse)
