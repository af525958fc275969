"""Requests that wait in the engine for their grammar to be compiled.

Compiling takes 1 ms for most grammars and 100 for large ones, so it happens on a thread, and the steps of the other requests go
on. A held request is not in the scheduler yet; it leaves as a `Submit` for it, or with its terminal event. Its compiled grammar
is kept until the request ends, however many others come, so that the engine's thread need not compile it.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from server.grammars import GrammarError
from server.messages import Failed, FailureKind, Finished, FinishReason, Grammar, RequestEvent, Submit, TerminalEvent
from server.model.constraints import NO_GRAMMARS
from server.model.grammar import GrammarCompiler


class GrammarQueue:
    """The waiting requests. For the engine's thread, which also polls: nothing here blocks."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        """Without a `compiler` every request with a grammar is refused."""
        self._compiler = compiler
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._held: dict[str, tuple[Submit, Future[None]]] = {}  # in order of arrival
        self._kept: dict[str, Grammar] = {}  # of all open requests

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, submit: Submit, grammar: Grammar) -> list[RequestEvent]:
        """Take a request with a grammar; the answer, if it is refused at once."""
        if self._compiler is None:
            return [Failed(submit.request_id, FailureKind.INVALID, NO_GRAMMARS)]
        if submit.request_id not in self._kept:
            self._kept[submit.request_id] = grammar
            self._compiler.hold(grammar)
        if self._compiler.has(grammar):
            compiled: Future[None] = Future()
            compiled.set_result(None)
        else:
            compiled = self._executor.submit(self._compile, self._compiler, grammar)
        self._held.setdefault(submit.request_id, (submit, compiled))
        return []

    def take_ready(self) -> list[Submit | Failed]:
        """The requests whose grammar is compiled, or refused, since the last call."""
        ready: list[Submit | Failed] = []
        for request_id, (submit, compiled) in list(self._held.items()):
            if compiled.done():
                del self._held[request_id]
                error = compiled.exception()
                if isinstance(error, GrammarError):
                    ready.append(Failed(request_id, FailureKind.INVALID, str(error)))
                elif error is not None:
                    ready.append(Failed(request_id, FailureKind.INTERNAL, "the grammar could not be compiled"))
                else:
                    ready.append(submit)
        return ready

    def note_ends(self, events: Iterable[RequestEvent]) -> None:
        """Let the grammars go of the requests that end with these events."""
        if not self._kept or self._compiler is None:
            return
        for event in events:
            if isinstance(event, Finished | Failed):
                grammar = self._kept.pop(event.request_id, None)
                if grammar is not None:
                    self._compiler.let_go(grammar)

    def abort(self, request_id: str) -> list[RequestEvent]:
        """End a held request; nothing happens for other ids."""
        held = self._held.pop(request_id, None)
        if held is None:
            return []
        submit, compiled = held
        compiled.cancel()
        return [_aborted(submit)]

    def shutdown(self) -> list[RequestEvent]:
        """End all held requests and the thread."""
        events = [event for request_id in list(self._held) for event in self.abort(request_id)]
        self._executor.shutdown(wait=False, cancel_futures=True)
        return events

    @staticmethod
    def _compile(compiler: GrammarCompiler, grammar: Grammar) -> None:
        compiler.matcher(grammar)


def _aborted(submit: Submit) -> TerminalEvent:
    return Finished(submit.request_id, FinishReason.ABORT, len(submit.prompt_token_ids), 0, 0)
