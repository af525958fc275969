import asyncio
import contextlib
import json
import signal
import sys
import time
from pathlib import Path

import pytest

import server
from server.api import grammar_checker
from server.api.grammar_checker import TOO_COMPLEX, TOO_SLOW, GrammarChecker
from server.errors import BadRequestError, OverloadedError, RequestFailedError
from server.messages import Grammar, GrammarKind

TINY = Path(server.__file__).parent / "model/tiny"
VOCAB = 1376
GOOD = Grammar(GrammarKind.REGEX, "a+")
BAD = Grammar(GrammarKind.REGEX, "(")

# Behaves like the worker, except for grammars that tell it otherwise; every grammar it sees is a line of the log.
SCRIPT = """
import os, sys, time
from server.api import grammar_worker
log = sys.argv.pop(1)
judge = grammar_worker.judge
def scripted(tokenizer, grammar):
    with open(log, "a") as file:
        print(grammar.text, file=file)
    if grammar.text == "hang":
        time.sleep(600)
    if grammar.text == "die":
        os._exit(9)
    return judge(tokenizer, grammar)
grammar_worker.judge = scripted
grammar_worker.confine = lambda *_: None
grammar_worker.main()
"""


class Log:
    def __init__(self, path):
        self.path = path

    def texts(self):
        return self.path.read_text().split() if self.path.exists() else []


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path / "log")


@pytest.fixture
def scripted(log):
    return (sys.executable, "-c", SCRIPT, str(log.path))


@contextlib.asynccontextmanager
async def checker_with(model_dir=TINY, **options):
    checker = GrammarChecker(model_dir, VOCAB, **options)
    try:
        yield checker
    finally:
        await checker.close()


async def fault_of(checker, grammar, param="p"):
    try:
        await checker.check(grammar, param)
    except BadRequestError as error:
        return error.message if error.param == param else f"the wrong field: {error.param}"
    return None


def test_good_grammars_pass_and_bad_ones_name_their_field():
    async def scenario():
        async with checker_with() as checker:
            checker.start()
            assert await fault_of(checker, GOOD) is None
            assert "unclosed group" in await fault_of(checker, BAD, "structured_outputs.regex")
            assert await fault_of(checker, Grammar(GrammarKind.JSON_OBJECT)) is None

    asyncio.run(scenario())


def test_a_grammar_is_compiled_once_however_many_ask(scripted, log):
    async def scenario():
        async with checker_with(command=scripted) as checker:
            faults = await asyncio.gather(*(fault_of(checker, grammar) for grammar in [GOOD, BAD] * 5))
            assert [fault is None for fault in faults] == [True, False] * 5
            await fault_of(checker, GOOD)
            await fault_of(checker, BAD)
        assert sorted(log.texts()) == ["(", "a+"]

    asyncio.run(scenario())


@pytest.mark.parametrize(("text", "said"), [("hang", TOO_SLOW), ("die", TOO_COMPLEX)])
def test_a_grammar_that_brings_the_worker_down_is_refused_and_the_next_one_is_fine(scripted, text, said):
    async def scenario():
        async with checker_with(command=scripted, timeout_s=2) as checker:
            assert await fault_of(checker, GOOD) is None
            faults = await asyncio.gather(fault_of(checker, Grammar(GrammarKind.LARK, text)), fault_of(checker, BAD))
            assert faults[0] == said
            assert "unclosed group" in faults[1]
            assert await fault_of(checker, Grammar(GrammarKind.REGEX, "b+")) is None

    asyncio.run(scenario())


def test_a_worker_that_died_between_two_grammars_is_replaced():
    async def scenario():
        async with checker_with() as checker:
            await checker.check(GOOD, "p")
            process = checker._worker._process
            process.kill()
            await process.wait()
            assert await fault_of(checker, Grammar(GrammarKind.REGEX, "b+")) is None

    asyncio.run(scenario())


def test_a_client_that_leaves_does_not_take_the_verdict_from_others(scripted, log):
    async def scenario():
        async with checker_with(command=scripted) as checker:
            leaving = asyncio.create_task(checker.check(GOOD, "p"))
            staying = asyncio.create_task(fault_of(checker, GOOD))
            await asyncio.sleep(0)
            leaving.cancel()
            assert await staying is None
            assert leaving.cancelled()
        assert log.texts() == ["a+"]

    asyncio.run(scenario())


def test_too_many_waiting_grammars_are_turned_away(scripted, monkeypatch):
    monkeypatch.setattr(grammar_checker, "MAX_PENDING", 2)

    async def scenario():
        async with checker_with(command=scripted) as checker:
            waiting = [asyncio.create_task(checker.check(Grammar(GrammarKind.REGEX, f"x{i}"), "p")) for i in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError):
                await checker.check(GOOD, "p")
            await asyncio.gather(*waiting)
            await checker.check(GOOD, "p")

    asyncio.run(scenario())


def test_without_a_usable_checkpoint_structured_output_is_not_available(tmp_path, caplog):
    async def scenario():
        async with checker_with(tmp_path) as checker:
            checker.start()
            for _ in range(2):
                with pytest.raises(RequestFailedError, match="not available") as caught:
                    await checker.check(GOOD, "p")
                assert str(tmp_path) not in caught.value.message

    asyncio.run(scenario())
    assert "tokenizer" in caplog.text


def test_closing_while_grammars_wait_leaves_nothing_behind(scripted):
    async def scenario():
        async with checker_with(command=scripted) as checker:
            waiting = [asyncio.create_task(checker.check(Grammar(GrammarKind.LARK, "hang"), "p")) for _ in range(3)]
            await asyncio.sleep(0)
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 3

    asyncio.run(scenario())


ALTERNATIVES = [{"type": "object", "properties": {f"a{i}": {"pattern": f"^[a-z]{{{i}}}x*$"}}} for i in range(400)]
HOSTILE = [
    Grammar(GrammarKind.REGEX, r"(\p{L}{1,5000}){1,5000}"),
    Grammar(GrammarKind.REGEX, "(((a?){50}){50}){50}" * 40),
    Grammar(GrammarKind.REGEX, "((.{0,100}a){0,100}b){0,100}"),
    Grammar(GrammarKind.REGEX, "(" * 8000 + "a" + ")" * 8000),
    Grammar(GrammarKind.REGEX, "(x+x+)+y|^(|.*)$"),
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"allOf": ALTERNATIVES})),
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"anyOf": [{"anyOf": ALTERNATIVES[:100]}] * 20})),
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "minLength": 10**9})),
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "minItems": 10**6, "items": {"type": "array"}})),
    Grammar(GrammarKind.JSON_SCHEMA, '{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}'),
    Grammar(GrammarKind.LARK, "start: " + " ".join(f"(a{i}|b)?" for i in range(500)) + "\nb: start"),
    Grammar(GrammarKind.LARK, "start: a* a* a* a*\na: start? start?"),
]


def test_hostile_grammars_get_a_verdict_within_the_limit_and_do_no_harm():
    async def scenario():
        async with checker_with() as checker:
            await checker.check(GOOD, "p")
            for grammar in HOSTILE:
                started_s = time.monotonic()
                await fault_of(checker, grammar)
                assert time.monotonic() - started_s < grammar_checker.CHECK_TIMEOUT_S + 3
                assert "unclosed group" in await fault_of(checker, BAD)
            assert await fault_of(checker, Grammar(GrammarKind.REGEX, "b+")) is None

    asyncio.run(scenario())


def test_a_signal_to_all_processes_leaves_the_worker_to_the_front_while_it_drains():
    async def scenario():
        async with checker_with() as checker:
            await checker.check(GOOD, "p")
            worker = checker._worker
            for signum in (signal.SIGTERM, signal.SIGINT):
                worker._process.send_signal(signum)
            assert await fault_of(checker, Grammar(GrammarKind.REGEX, "b+")) is None
            assert checker._worker is worker

    asyncio.run(scenario())
