import json
import math
import random
from pathlib import Path

import pytest

import server.model
from server.api.reply_events import ToolArgumentsDelta, ToolCallEnd, ToolCallStart
from server.api.tokenizer import Tokenizer
from server.api.tool_grammar import MarkerIds, tool_call_grammar
from server.api.tool_parser import ToolCallParser
from server.api.tool_schema import ToolFunction, ToolSchemas
from server.grammars import GrammarTokenizer
from tests.api.tool_replies import CALL_OSLO, CALL_PARIS, NS, NUMBER, STRING, TOOLS, parameters

TINY = Path(server.model.__file__).parent / "tiny"
TOKENIZER = Tokenizer.load(TINY)
IDS = {text: token.id for text, token in TOKENIZER.added.by_text.items()}
EOS = IDS["[e~["]
MARKERS = MarkerIds(IDS[NS], IDS["<tool_call>"], IDS["</tool_call>"])
ENGINE = GrammarTokenizer(TINY, TOKENIZER.num_tokens)


def encode(text):
    """The ids of a reply with its markers as tokens."""
    ids = []
    for piece in TOKENIZER.added.split(text.replace("NS", NS)):
        ids.extend(TOKENIZER.encode(piece) if isinstance(piece, str) else [piece.id])
    return ids


def accepts(grammar, text):
    """Whether the grammar takes the whole text, token by token, and lets it end."""
    machine = ENGINE.compile(grammar)
    for token_id in encode(text):
        if not allowed(machine)[token_id]:
            return False
        assert machine.consume_token(token_id)
    return machine.is_accepting()


def allowed(machine):
    """By token id, whether it may come next."""
    return [bias > 0 for bias in machine.compute_logit_bias()]


def block(calls):
    return f"NS<tool_call>\n{calls}NS</tool_call>"


def invoke(name, inner):
    return f'NS<invoke name="{name}">{inner}NS</invoke>\n'


ALL = (
    "NS<city>ParisNS</city>NS<opts>NS<units>CNS</units>NS<days>NS<item>1NS</item>NS<item>2NS</item>NS</days>NS</opts>"
    "NS<verbose>trueNS</verbose>NS<note>nullNS</note>"
)
TYPED = ToolFunction(
    "typed",
    {
        "type": "object",
        "properties": {
            "n": NUMBER,
            "color": {"enum": ["red", "deep blue", 7, None]},
            "pair": {"type": "array", "prefixItems": [{"type": "boolean"}, STRING], "items": NUMBER},
            "tree": {"$ref": "#/$defs/tree"},
            "either": {"anyOf": [NUMBER, parameters(a=NUMBER)]},
            "any": {},
        },
        "required": ["n"],
        "$defs": {"tree": parameters(size=NUMBER, next={"$ref": "#/$defs/tree"})},
    },
)
MAP = ToolFunction("map", {"type": "object", "additionalProperties": {"type": "integer"}})


@pytest.mark.parametrize(
    "calls",
    [
        invoke("get_weather", ALL),
        CALL_PARIS + CALL_OSLO,
        invoke("now", ""),
        invoke("now", "NS<x>1NS</x>NS<y>NS<z>2NS</z>NS</y>"),
        invoke("save", 'NS<content>é😀 <b>]<]mini</b>\n"NS</content>'),
        invoke("save", "NS<content>NS</content>"),
        invoke("task", "NS<count>-12NS</count>NS<tags>NS<item>aNS</item>NS</tags>"),
        invoke("task", "NS<tags>NS</tags>"),
    ],
)
def test_canonical_calls_are_accepted(calls):
    assert accepts(tool_call_grammar(TOOLS, MARKERS), block(calls))


@pytest.mark.parametrize(
    "text",
    [
        "hello",
        "NS<tool_call>\nNS</tool_call>",
        block(invoke("nobody", "")),
        block(invoke("get_weathers", "")),
        block(invoke("get_weather", "NS<town>ParisNS</town>")),
        block(invoke("get_weather", "NS<city>ParisNS</town>")),
        block(invoke("get_weather", "NS<city>ParisNS</city>NS<city>OsloNS</city>")),
        block(invoke("get_weather", "NS<verbose>maybeNS</verbose>")),
        block(invoke("task", "NS<count>1.5NS</count>")),
        block(invoke("task", "NS<tags>aNS</tags>")),
        block(invoke("save", "NS<content>aNSbNS</content>")),
        block(CALL_PARIS) + "bye",
        block(CALL_PARIS) + block(CALL_OSLO),
    ],
)
def test_anything_else_is_refused(text):
    assert not accepts(tool_call_grammar(TOOLS, MARKERS), text)


@pytest.mark.parametrize(
    ("inner", "is_accepted"),
    [
        ("NS<n>1NS</n>", True),
        ("NS<n>-1.5e3NS</n>", True),
        ("NS<n>oneNS</n>", False),
        ("", False),
        ("NS<n>1NS</n>NS<color>deep blueNS</color>", True),
        ("NS<n>1NS</n>NS<color>7NS</color>", True),
        ("NS<n>1NS</n>NS<color>nullNS</color>", True),
        ("NS<n>1NS</n>NS<color>greenNS</color>", False),
        ("NS<n>1NS</n>NS<pair>NS<item>trueNS</item>NS<item>xNS</item>NS<item>3NS</item>NS</pair>", True),
        ("NS<n>1NS</n>NS<pair>NS<item>trueNS</item>NS</pair>", True),
        ("NS<n>1NS</n>NS<pair>NS<item>xNS</item>NS</pair>", False),
        ("NS<n>1NS</n>NS<tree>NS<size>1NS</size>NS<next>NS<next>NS<size>2NS</size>NS</next>NS</next>NS</tree>", True),
        ("NS<n>1NS</n>NS<tree>NS<next>xNS</next>NS</tree>", False),
        ("NS<n>1NS</n>NS<either>5NS</either>", True),
        ("NS<n>1NS</n>NS<either>NS<a>5NS</a>NS</either>", True),
        ("NS<n>1NS</n>NS<either>fiveNS</either>", False),
        ("NS<n>1NS</n>NS<any>NS<k>NS<item>vNS</item>NS</k>NS</any>", True),
    ],
)
def test_values_are_held_to_their_schema(inner, is_accepted):
    assert accepts(tool_call_grammar([TYPED], MARKERS), block(invoke("typed", inner))) is is_accepted


def test_additional_members_are_held_to_their_schema():
    grammar = tool_call_grammar([MAP], MARKERS)
    assert accepts(grammar, block(invoke("map", "NS<k>1NS</k>NS<two words>2NS</two words>")))
    assert not accepts(grammar, block(invoke("map", "NS<k>xNS</k>")))


def test_a_named_choice_leaves_one_function():
    grammar = tool_call_grammar(TOOLS, MARKERS, name="now")
    assert accepts(grammar, block(invoke("now", "")))
    assert not accepts(grammar, block(CALL_PARIS))
    with pytest.raises(ValueError, match="no function"):
        tool_call_grammar(TOOLS, MARKERS, name="nobody")


def test_without_parallel_calls_there_is_exactly_one():
    grammar = tool_call_grammar(TOOLS, MARKERS, parallel=False)
    assert accepts(grammar, block(CALL_PARIS))
    assert not accepts(grammar, block(CALL_PARIS + CALL_OSLO))


def test_the_first_token_is_the_namespace_and_the_last_ends_the_reply():
    machine = ENGINE.compile(tool_call_grammar(TOOLS, MARKERS))
    assert [token_id for token_id, may in enumerate(allowed(machine)) if may] == [MARKERS.namespace]
    for token_id in encode(block(CALL_PARIS)):
        assert machine.consume_token(token_id)
    assert [token_id for token_id, may in enumerate(allowed(machine)) if may] == [EOS]


def test_the_namespace_cannot_be_spelled_by_other_tokens():
    machine = ENGINE.compile(tool_call_grammar(TOOLS, MARKERS))
    for token_id in encode('NS<tool_call>\nNS<invoke name="save">NS<content>'):
        assert machine.consume_token(token_id)
    spelled = [token_id for piece in (NS[:4], NS[4:-1], NS[-1:]) for token_id in TOKENIZER.encode(piece)]
    assert machine.try_consume_tokens(spelled) < len(spelled)


def test_a_string_may_hold_no_other_marker_or_special_token():
    machine = ENGINE.compile(tool_call_grammar(TOOLS, MARKERS))
    for token_id in encode('NS<tool_call>\nNS<invoke name="save">NS<content>a'):
        assert machine.consume_token(token_id)
    may = allowed(machine)
    assert [text for text, token_id in IDS.items() if may[token_id]] == [NS]


@pytest.mark.parametrize(
    "schema",
    [
        *(True, None, "x", [], {"type": "array"}, {"properties": {}}, {"properties": {"a": {"enum": []}}}),
        {"properties": {"a": {"enum": ["", 'x"\\\n\x01\u2028é', NS, "\ud800", [1]]}}},
        {
            "properties": dict.fromkeys(("a b", "<x>", "", " ", "/k", "�", 'é"\\', "k" * 600), STRING),
            "required": ["<x>"],
        },
        {"properties": {"a": {"$ref": "#"}}},
    ],
)
def test_odd_schemas_give_grammars_that_compile(schema):
    grammar = tool_call_grammar([ToolFunction("f", schema)], MARKERS)
    grammar.text.encode()
    assert accepts(grammar, block(invoke("f", "")))


def test_a_huge_schema_is_cut():
    wide = {f"p{i}": parameters(**{f"q{j}": {"type": "integer"} for j in range(20)}) for i in range(300)}
    grammar = tool_call_grammar([ToolFunction("f", parameters(**wide))], MARKERS)
    assert accepts(grammar, block(invoke("f", "NS<p7>NS<q1>1NS</q1>NS</p7>")))


TYPES = {"n": (int, float), "pair": list, "tree": dict, "either": (int, float, dict)}


@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_grammar_allows_is_parsed_as_the_schema_says(seed):
    rng = random.Random(seed)
    machine = ENGINE.compile(tool_call_grammar([TYPED], MARKERS))
    parser = ToolCallParser(ToolSchemas([TYPED]))
    reply = b""
    for _ in range(250):
        choices = [token_id for token_id, may in enumerate(allowed(machine)) if may]
        token_id = MARKERS.namespace if MARKERS.namespace in choices and rng.random() < 0.5 else rng.choice(choices)
        if token_id == EOS:
            break
        assert machine.consume_token(token_id)
        reply += TOKENIZER.token_bytes(token_id)
    events = parser.push(reply.decode(errors="ignore")) + parser.finish(truncated=True)
    arguments = {}
    for event in events:
        match event:
            case ToolCallStart(index, name):
                assert name == "typed"
                arguments[index] = ""
            case ToolArgumentsDelta(index, fragment):
                arguments[index] += fragment
            case ToolCallEnd(index):
                value = json.loads(arguments[index], parse_constant=lambda _: math.nan)
                assert "n" in value
                for key, types in TYPES.items():
                    assert key not in value or isinstance(value[key], types), value
    assert arguments
