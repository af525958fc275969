"""`POST /v1/completions`: prompts without a template, answered as they are."""

import secrets
import time
from collections.abc import AsyncIterator
from typing import Final

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from server.api.completions_prepare import COMPLETION_JOB, CompletionPlan, PreparedCompletion
from server.api.completions_schema import CompletionBody
from server.api.completions_text import CompletionText, joined, spelled_prompt
from server.api.completions_wire import CompletionChoice, TextCompletion
from server.api.exchange import answer
from server.api.generate import Generation
from server.api.openapi import json_body
from server.api.service import Service
from server.api.sse import DONE, HEARTBEAT, event
from server.api.tokenizer import SpecialTokens
from server.api.validate import StreamForm
from server.api.wire import CompletionDetails, Usage
from server.errors import M3Error

router = APIRouter()

REQUEST_BODY: Final = {"requestBody": json_body(CompletionBody)}


class CompletionForm:
    """One request in the shapes of OpenAI's completions; the JSON form is the fold of the stream's pieces."""

    job = COMPLETION_JOB

    def __init__(self, service: Service) -> None:
        self._service = service
        self._id = f"cmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._form = StreamForm()
        self._plan = CompletionPlan(1, False, False, False)
        self._texts: list[CompletionText] = []

    def begin(self, prepared: PreparedCompletion) -> None:
        """Take what was made of the body."""
        self._form = prepared.call.form
        self._plan = plan = prepared.plan
        self._texts = [
            CompletionText(index, with_logprobs=plan.with_logprobs, hides_output=plan.hides_output)
            for index in range((1 + len(prepared.more_prompts)) * plan.num_choices)
        ]

    async def whole(self, generation: Generation) -> bytes:
        """The whole answer as JSON."""
        found: list[list[CompletionChoice]] = [[] for _ in self._texts]
        async for pieces in self._pieces(generation):
            for piece in pieces:
                found[piece.index].append(piece)
        return msgspec.json.encode(self._answer([joined(pieces) for pieces in found], self._usage(generation)))

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The answer as chunks."""
        async for pieces in self._pieces(generation):
            usage = self._chunk_usage(generation)
            yield b"".join(event(self._answer([piece], usage)) for piece in pieces) or HEARTBEAT
        if self._form.include_usage:
            yield event(self._answer([], self._usage(generation)))
        yield DONE

    def failed(self, error: M3Error) -> bytes:
        """The error object as an event."""
        return event(error.body())

    async def _pieces(self, generation: Generation) -> AsyncIterator[list[CompletionChoice]]:
        """The pieces as they come; an echo goes before the first piece of its choice, when the prompt is known to the end."""
        begun = [not self._plan.echo] * len(self._texts)
        await generation.next()  # opens the choices; there is nothing to tell of it
        while not generation.finished:
            pieces: list[CompletionChoice] = []
            for chunk in await generation.next():
                if not begun[chunk.index]:
                    begun[chunk.index] = True
                    pieces.append(await self._service.in_thread(self._echo, generation, chunk.index))
                piece = self._texts[chunk.index].push(chunk)
                if piece is not None:
                    pieces.append(piece)
            yield pieces

    def _echo(self, generation: Generation, index: int) -> CompletionChoice:
        """The piece with the prompt. Runs in a thread."""
        number = index // self._plan.num_choices
        token_ids, chat_format = generation.prompts[number], self._service.chat_format
        detokenizer = chat_format.detokenizer(SpecialTokens.ALL)
        text = detokenizer.push(token_ids) + detokenizer.flush()
        tokens = spelled_prompt(token_ids, generation.prompt_logprobs[number], chat_format) if self._plan.with_logprobs else []
        return self._texts[index].begin(text, tokens)

    def _usage(self, generation: Generation) -> Usage:
        usage = generation.usage
        if not self._plan.hides_output:
            return usage
        return msgspec.structs.replace(
            usage, completion_tokens=0, total_tokens=usage.prompt_tokens, completion_tokens_details=CompletionDetails(0)
        )

    def _chunk_usage(self, generation: Generation) -> Usage | UnsetType | None:
        """What a chunk with a choice says about usage."""
        if self._form.continuous_usage:
            return self._usage(generation)
        return None if self._form.include_usage else UNSET

    def _answer(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> TextCompletion:
        model = self._service.settings.model_name
        return TextCompletion(id=self._id, created=self._created, model=model, choices=choices, usage=usage)


@router.post("/v1/completions", openapi_extra=REQUEST_BODY)
async def create_completion(request: Request) -> Response:
    """Continue prompts."""
    return await answer(request, CompletionForm(request.app.state.service))
