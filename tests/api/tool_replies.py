"""Replies with tool calls, as MiniMax-M3 writes them and as it should not, and what they mean. `NS` is the namespace text."""

import dataclasses
import json

from server.api.tool_schema import ToolFunction
from server.settings import ThinkingMode

NS = "]<]minimax[>["
ADAPTIVE, ENABLED, DISABLED = ThinkingMode.ADAPTIVE, ThinkingMode.ENABLED, ThinkingMode.DISABLED


def parameters(**properties):
    return {"type": "object", "properties": properties}


STRING, NUMBER, INTEGER, BOOLEAN = ({"type": name} for name in ("string", "number", "integer", "boolean"))
TOOLS = (
    ToolFunction(
        "get_weather",
        parameters(
            city=STRING,
            opts=parameters(units=STRING, days={"type": "array", "items": INTEGER}),
            verbose=BOOLEAN,
            note={"type": ["string", "null"]},
        ),
    ),
    ToolFunction("save", parameters(filename=STRING, content=STRING)),
    ToolFunction("now"),
    ToolFunction("task", parameters(taskId=STRING, count=INTEGER, tags={"type": "array", "items": STRING})),
    ToolFunction(
        "choose",
        {"oneOf": [parameters(amount=NUMBER), parameters(points={"type": "array", "items": NUMBER}, amount=NUMBER)]},
    ),
    ToolFunction("wrap", parameters(tool_call=STRING, invoke=STRING)),
)


@dataclasses.dataclass(frozen=True)
class Reply:
    """A reply and its meaning; `calls` are names with arguments, objects or (when cut) exact JSON text."""

    name: str
    text: str
    calls: tuple = ()
    content: str = ""
    reasoning: str = ""
    mode: ThinkingMode = DISABLED
    truncated: bool = False

    def __post_init__(self):
        object.__setattr__(self, "text", self.text.replace("NS", NS))
        object.__setattr__(self, "content", self.content.replace("NS", NS))
        object.__setattr__(self, "reasoning", self.reasoning.replace("NS", NS))


def one(name, inner, arguments, **rest):
    """A reply of one call to `name`."""
    return [f'NS<tool_call>\nNS<invoke name="{name}">{inner}NS</invoke>\nNS</tool_call>', ((name, arguments),), *rest]


PARIS = {"city": "Paris"}
OSLO = {"city": "Oslo"}
CALL_PARIS = 'NS<invoke name="get_weather">NS<city>ParisNS</city>NS</invoke>\n'
CALL_OSLO = 'NS<invoke name="get_weather">NS<city>OsloNS</city>NS</invoke>\n'
TWO = (("get_weather", PARIS), ("get_weather", OSLO))
XML = "<a>\n</city></tool_call>\n<invoke name='x'>&lt;&amp; ]<]mini </parameter>]]></a>"

CANONICAL = [
    Reply("plain text", "hello", content="hello"),
    Reply("text that ends like a namespace", "[SILENCE]", content="[SILENCE]"),
    Reply("text that nearly is a namespace", "a]<]minimax[>x]<]", content="a]<]minimax[>x]<]"),
    Reply(
        "parallel calls with content",
        'Checking.NS<tool_call>\nNS<invoke name="get_weather">NS<city>ParisNS</city>NS<opts>NS<units>CNS</units>NS<days>'
        "NS<item>1NS</item>NS<item>2NS</item>NS</days>NS</opts>NS<verbose>trueNS</verbose>NS</invoke>\n"
        f"{CALL_OSLO}NS</tool_call>",
        (
            ("get_weather", {"city": "Paris", "opts": {"units": "C", "days": [1, 2]}, "verbose": True}),
            ("get_weather", OSLO),
        ),
        "Checking.",
    ),
    Reply("no arguments", *one("now", "", {})),
    Reply("two calls in one block", f"NS<tool_call>\n{CALL_PARIS}{CALL_OSLO}NS</tool_call>", TWO),
    Reply("unknown function", *one("nobody", "NS<x>1NS</x>NS<x>2NS</x>NS<y>3NS</y>", {"x": ["1", "2"], "y": "3"})),
    Reply("string that looks like a number", *one("task", "NS<taskId>3NS</taskId>", {"taskId": "3"})),
    Reply("nullable string with a value", *one("get_weather", "NS<note>nullifyNS</note>", {"note": "nullify"})),
    Reply("nullable string that is null", *one("get_weather", "NS<note>nullNS</note>", {"note": None})),
    Reply("nullable string that begins like null", *one("get_weather", "NS<note>nulNS</note>", {"note": "nul"})),
    Reply("empty nullable string", *one("get_weather", "NS<note>NS</note>", {"note": ""})),
    Reply("string null", *one("get_weather", "NS<city>nullNS</city>", {"city": "null"})),
    Reply("markup without the namespace is data", *one("save", f"NS<content>{XML}NS</content>", {"content": XML})),
    Reply("blanks of a string are kept", *one("save", "NS<content>\n a \n\tNS</content>", {"content": "\n a \n\t"})),
    Reply("escapes", *one("save", 'NS<content>"\\\u0001é😀\u2028NS</content>', {"content": '"\\\u0001é😀\u2028'})),
    Reply(
        "a top-level oneOf gives types",
        *one(
            "choose",
            "NS<amount>42NS</amount>NS<points>NS<item>1NS</item>NS<item>2.5NS</item>NS</points>",
            {"amount": 42, "points": [1, 2.5]},
        ),
    ),
    Reply("empty array", *one("task", "NS<tags>NS</tags>", {"tags": []})),
    Reply("text behind a block", f"NS<tool_call>\n{CALL_PARIS}NS</tool_call>\nDone.]", TWO[:1], "\nDone.]"),
    Reply(
        "blanks around blocks are dropped",
        f"\n\nNS<tool_call>\n{CALL_PARIS}NS</tool_call>\n \nNS<tool_call>\n{CALL_OSLO}NS</tool_call>\n",
        TWO,
    ),
    Reply(
        "a further block goes on counting",
        f"aNS<tool_call>\n{CALL_PARIS}NS</tool_call>bNS<tool_call>\n{CALL_OSLO}NS</tool_call>c",
        TWO,
        "abc",
    ),
    Reply(
        "parameters named like markup",
        *one("wrap", "NS<tool_call>aNS</tool_call>NS<invoke>bNS</invoke>", {"tool_call": "a", "invoke": "b"}),
    ),
]

TOLERATED = [
    Reply(
        "blanks between tags",
        'NS <tool_call> NS\n<invoke name="save"> \n NS <filename>aNS </filename>\nNS< content >bNS</ content >\nNS\n</invoke>'
        "\n\nNS </tool_call>",
        (("save", {"filename": "a", "content": "b"}),),
    ),
    Reply("single quotes", "NS<tool_call>NS<invoke name='now'>NS</invoke>NS</tool_call>", (("now", {}),)),
    Reply("no quotes", "NS<tool_call>NS<invoke name=now>NS</invoke>NS</tool_call>", (("now", {}),)),
    Reply("odd quotes", "NS<tool_call>NS<invoke name = \"now'>NS</invoke>NS</tool_call>", (("now", {}),)),
    Reply(
        "lost opener of the first parameter",
        'NS<tool_call>NS<invoke name="save">NSa.txtNS</filename>NS<content>xNS</content>NS</invoke>NS</tool_call>',
        (("save", {"filename": "a.txt", "content": "x"}),),
    ),
    Reply(
        "lost opener of an integer",
        *one("task", "NS7NS</count>NS<taskId>1NS</taskId>", {"count": 7, "taskId": "1"}),
    ),
    Reply("lost opener of an empty value", *one("save", "NSNS</content>", {"content": ""})),
    Reply("lost opener without its namespace", *one("save", "a bNS</content>", {"content": "a b"})),
    Reply(
        "a malformed call, then a good one",
        f'NS<tool_call>\nNS<invoke name="get_weather">NSNSNS</x y>junkNS<>NS<city\n{CALL_OSLO}NS</tool_call>',
        (("get_weather", {"x y": ""}), ("get_weather", OSLO)),
    ),
    Reply(
        "a call without a name, then a good one",
        f"NS<tool_call>\nNS<invoke >NS<city>ParisNS</city>NS</invoke>\n{CALL_OSLO}NS</tool_call>",
        TWO[1:],
    ),
    Reply(
        "lost angle bracket of the header",
        'NS<tool_call>\nNSinvoke name="get_weather">NS<city>ParisNS</city>NS</invoke>\nNS</tool_call>',
        TWO[:1],
    ),
    Reply(
        "lost angle brackets of the block",
        f"NStool_call>\n{CALL_PARIS}NS/tool_call>",
        TWO[:1],
    ),
    Reply("lost opener of the block", f"Hi. {CALL_PARIS}NS</tool_call>", TWO[:1], "Hi. "),
    Reply("lost opener and closer of the block", f"{CALL_PARIS}Done.", TWO[:1], "\nDone."),
    Reply(
        "a new block inside a string",
        f'NS<tool_call>\nNS<invoke name="save">NS<content>abcNS<tool_call>\n{CALL_OSLO}NS</tool_call>',
        (("save", {"content": "abc"}), ("get_weather", OSLO)),
    ),
    Reply(
        "a new call inside a string",
        f'NS<tool_call>\nNS<invoke name="save">NS<content>abc{CALL_OSLO}NS</tool_call>',
        (("save", {"content": "abc"}), ("get_weather", OSLO)),
    ),
    Reply("lost closer of a string", *one("save", "NS<filename>aNS<content>bNS</content>", {"filename": "a", "content": "b"})),
    Reply(
        "misspelt closer", *one("save", "NS<filename>aNS</fname>NS<content>bNS</content>", {"filename": "a", "content": "b"})
    ),
    Reply("closer without an opener", *one("save", "NS</x>NS<filename>aNS</filename>", {"filename": "a"})),
    Reply("a namespace inside a string", *one("save", "NS<content>aNS b] ]<]NS</content>", {"content": f"a{NS} b] ]<]"})),
    Reply("a scalar given twice", *one("save", "NS<content>aNS</content>NS<content>bNS</content>", {"content": "a"})),
    Reply("an array given twice", *one("task", "NS<tags>aNS</tags>\nNS<tags>bNS</tags>", {"tags": ["a", "b"]})),
    Reply(
        "an array given again later",
        *one("task", "NS<tags>aNS</tags>NS<count>1NS</count>NS<tags>bNS</tags>", {"tags": ["a"], "count": 1}),
    ),
    Reply("a call at the end of the reply", 'NS<tool_call>NS<invoke name="save">NS<content>ab', (("save", {"content": "ab"}),)),
    Reply("a block at the end of the reply", f"NS<tool_call>\n{CALL_PARIS}", TWO[:1]),
    Reply("markup before a call is no content", f"aNS bNS</x>c{CALL_PARIS}NS</tool_call>", TWO[:1], "a bc"),
    Reply("markup behind a call is no content", f"{CALL_PARIS}NS</tool_call>NS<x>aNS</x>", TWO[:1], "\na"),
    Reply(
        "a block without calls, then a call",
        f"aNS<tool_call>junkNS</tool_call>bNS<tool_call>{CALL_PARIS}NS</tool_call>",
        TWO[:1],
        "ab",
    ),
]

RAW = [
    Reply(name, text, content=text)
    for name, text in {
        "an empty block": " NS<tool_call>\nNS</tool_call>.",
        "a block without a call": "So: NS<tool_call>\njunk NS<x>NS</x> NS</tool_call> end",
        "a namespace alone": "The marker is NS, I think]",
        "other markup": "NS<b>xNS</b>",
        "an unfinished tag": "aNS<tool_ca",
        "an unfinished header": 'NS<tool_call>\nNS<invoke name="sa',
        "a header without a name": "NS<tool_call>NS<invoke x>NS</invoke>NS</tool_call>",
        "blanks": "\n \n",
        "a very long tag": "NS<" + "x" * 600 + ">",
        "very many blanks": "NS" + " " * 600 + "<tool_call>",
        "a closer in content": "a</mm:think>b",
    }.items()
]

CUT = [
    Reply(
        "cut in a string",
        'NS<tool_call>\nNS<invoke name="save">NS<filename>a.tx',
        (("save", '{"filename": "a.tx'),),
        truncated=True,
    ),
    Reply(
        "cut in a tag behind a string",
        'NS<tool_call>\nNS<invoke name="save">NS<filename>a.tNS</file',
        (("save", '{"filename": "a.t'),),
        truncated=True,
    ),
    Reply(
        "cut in half a namespace",
        'NS<tool_call>NS<invoke name="save">NS<content>]<]m',
        (("save", '{"content": "]<]m'),),
        truncated=True,
    ),
    Reply("cut behind the header", 'NS<tool_call>\nNS<invoke name="save">NS', (("save", ""),), truncated=True),
    Reply(
        "cut behind an array",
        'NS<tool_call>\nNS<invoke name="task">NS<tags>NS<item>aNS</item>NS</tags>NS<count>1',
        (("task", '{"tags": ["a"]'),),
        truncated=True,
    ),
    Reply(
        "cut in what may be null", 'NS<invoke name="get_weather">NS<note>nu', (("get_weather", '{"note": '),), truncated=True
    ),
    Reply("cut behind a call", f"NS<tool_call>\n{CALL_PARIS}", TWO[:1], truncated=True),
]

REASONED = [
    Reply(
        "calls behind reasoning",
        f"<mm:think>need both</mm:think>Checking.NS<tool_call>\n{CALL_PARIS}{CALL_OSLO}NS</tool_call>",
        TWO,
        "Checking.",
        "need both",
        ADAPTIVE,
    ),
    Reply("calls in open reasoning", f"need itNS<tool_call>\n{CALL_PARIS}NS</tool_call>", TWO[:1], "", "need it", ENABLED),
    Reply(
        "a closer behind the calls",
        f"need itNS<tool_call>\n{CALL_PARIS}NS</tool_call></mm:think>done",
        TWO[:1],
        "done",
        "need it",
        ENABLED,
    ),
    Reply("a header in open reasoning", f"need it{CALL_PARIS}NS</tool_call>", TWO[:1], "", "need it", ENABLED),
    Reply("a namespace in reasoning", "say NS or NS<b>?</mm:think>ok", (), "ok", "say NS or NS<b>?", ENABLED),
    Reply("reasoning that ends like a namespace", "a]<]</mm:think>b", (), "b", "a]<]", ENABLED),
    Reply("reasoning that ends inside a tag", "aNS<tool_ca", (), "", "aNS<tool_ca", ENABLED),
    Reply("only reasoning", "why</mm:think>", (), "", "why", ENABLED),
    Reply("a leading closer", f"</mm:think>\n\nNS<tool_call>\n{CALL_PARIS}NS</tool_call>", TWO[:1], "", "", ADAPTIVE),
    Reply("a call at once", f"NS<tool_call>\n{CALL_PARIS}NS</tool_call>", TWO[:1], "", "", ADAPTIVE),
]

REPLIES = [*CANONICAL, *TOLERATED, *RAW, *CUT]


def arguments_match(fragments, expected):
    """Whether a call's arguments mean what was expected; a string is compared as it is."""
    return fragments == expected if isinstance(expected, str) else json.loads(fragments) == expected
