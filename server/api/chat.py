"""`POST /v1/chat/completions`: a conversation in, chunks or one JSON object out."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Final

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from server.api.chat_format import ChatFormat
from server.api.exchange import answer
from server.api.fold import Fold
from server.api.generate import Generation
from server.api.openapi import json_body
from server.api.prepare import CHAT_JOB, Prepared
from server.api.schema import ChatBody
from server.api.service import Service
from server.api.sse import DONE, HEARTBEAT, event
from server.api.validate import StreamForm
from server.api.wire import LOWEST_LOGPROB, Chunk, ChunkChoice, Completion, PromptLogprob, Usage
from server.errors import M3Error
from server.messages import TokenLogprobs

router = APIRouter()

REQUEST_BODY: Final = {"requestBody": json_body(ChatBody)}


class ChatForm:
    """One chat request in OpenAI's shapes; the JSON form is the fold of the stream's deltas."""

    job = CHAT_JOB

    def __init__(self, service: Service) -> None:
        self._service = service
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._form = StreamForm()
        self._wants_prompt_logprobs = False

    def begin(self, prepared: Prepared) -> None:
        """Take what was made of the body."""
        self._form = prepared.call.form
        self._wants_prompt_logprobs = prepared.call.sampling.num_prompt_logprobs is not None

    async def whole(self, generation: Generation) -> bytes:
        """The whole answer as JSON."""
        fold = Fold()
        while not generation.finished:
            fold.add(await generation.next())
        completion = Completion(
            id=self._id,
            created=self._created,
            model=self._service.settings.model_name,
            choices=fold.choices(),
            usage=generation.usage,
            prompt_logprobs=await self._prompt_logprobs(generation),
        )
        return msgspec.json.encode(completion)

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The answer as chunks."""
        while not generation.finished:
            deltas = await generation.next()
            usage = self._usage(generation)
            yield b"".join(event(self._chunk([delta], usage)) for delta in deltas) or HEARTBEAT
        if self._form.include_usage:
            yield event(self._chunk([], generation.usage))
        yield DONE

    def failed(self, error: M3Error) -> bytes:
        """The error object as an event."""
        return event(error.body())

    def _usage(self, generation: Generation) -> Usage | UnsetType | None:
        """What a chunk with a choice says about usage."""
        if self._form.continuous_usage:
            return generation.usage
        return None if self._form.include_usage else UNSET

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> Chunk:
        model = self._service.settings.model_name
        return Chunk(id=self._id, created=self._created, model=model, choices=choices, usage=usage)

    async def _prompt_logprobs(self, generation: Generation) -> list[msgspec.Raw] | UnsetType:
        if not self._wants_prompt_logprobs:
            return UNSET
        token_ids, entries = generation.prompts[0][1:], generation.prompt_logprobs[0]
        return await self._service.in_thread(prompt_logprobs, token_ids, entries, self._service.chat_format)


def prompt_logprobs(token_ids: Sequence[int], entries: Sequence[TokenLogprobs], chat_format: ChatFormat) -> list[msgspec.Raw]:
    """One object per token of the prompt, by token id, encoded; null for the first token, which nothing predicts. In a thread.

    Args:
        token_ids: the prompt without its first token.
        entries: one per id, from the engine.
        chat_format: spells the tokens.
    """
    found = [msgspec.Raw(b"null")]
    for token_id, entry in zip(token_ids, entries, strict=True):
        place: dict[str, PromptLogprob] = {}
        known = [(token_id, entry.logprob, None), *zip(entry.top_ids, entry.top_logprobs, range(1, 10**6), strict=False)]
        for known_id, logprob, rank in known:
            text = chat_format.token_bytes(known_id).decode(errors="replace")
            place[str(known_id)] = PromptLogprob(max(logprob, LOWEST_LOGPROB), rank, text)
        found.append(msgspec.Raw(msgspec.json.encode(place)))
    return found


@router.post("/v1/chat/completions", openapi_extra=REQUEST_BODY)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    return await answer(request, ChatForm(request.app.state.service))
