"""The text on which the tiny checkpoint's tokenizer is trained: written here, so that it never changes by accident."""

PASSAGES = (
    "A server listens on a port and answers what it is asked. When many people ask at the same time, it keeps a line, "
    "takes as many questions as it can hold, and works on all of them together, one small step after another.",
    "The weather in Paris is mild today, about eighteen degrees, with light rain in the evening. In Oslo it is colder, "
    "seven degrees and windy. In Tokyo the sun is out and it will stay warm until the weekend.",
    "What is shown in this picture? The picture shows a red square on a white background. Below it there is a small blue "
    "circle, and to the right a green triangle. The image is bright and has no text.",
    "Think step by step. First read the question, then find out what is known and what is missing. If something is missing, "
    "ask for it or call a tool. When the answer is clear, write it down in a few words and stop.",
    "To add two numbers, line up the digits and start on the right: 7 + 5 = 12, write 2 and carry 1. The sum of 128 and "
    "256 is 384. Ten times ten is one hundred; half of 4,096 is 2,048; 3.14159 is close to pi.",
    "Once upon a time there was a little fox who lived near a river. Every morning she walked along the water, looked for "
    "berries under the trees, and told the birds about her dreams. The birds listened and sang back to her.",
    "Hello! How can I help you? I'm sorry, I don't know that yet. You're welcome. Yes, that's right. No, it isn't. Could you "
    "say that again, please? We'll see. They've already gone home, and I'd like to do the same.",
    "A language model reads tokens and writes tokens. Attention looks back at earlier positions; a sparse model looks only "
    "at the blocks that matter. The cache keeps keys and values in pages, so that nothing is computed twice.",
    "Cook the rice in salted water for twelve minutes. Meanwhile cut the onions, the garlic and two tomatoes, fry them in "
    "oil, add pepper, and let everything simmer until the sauce is thick. Serve it hot with fresh herbs.",
    "You are a helpful assistant. You are asked by the user, and you answer as the assistant. The system tells you what you "
    "can do; the tool gives you what it has found. These functions can be called. Each of them is described by an object.",
    "There are many ways to do this, and all of them are good. Which one would you like? I would have used the first, since "
    "it was there before the others were made. But that is only what I think; what do you think about it, and why?",
    "Das Wetter ist heute schön, aber morgen soll es regnen. Wie geht es dir? Danke, gut. Où est la gare, s'il vous plaît ? "
    "La réponse est déjà là. ¿Dónde está la biblioteca? Mañana será otro día. Привет, как дела? Всё хорошо.",
    "今天天气很好，我们去公园吧。你好，世界！请问这张图片里有什么？图片里有一个红色的正方形。こんにちは、元気ですか。はい、元気です。",  # noqa: RUF001
    "Good morning 😀 The list is done ✅ and the rocket has left 🚀 — see you at 10:30, or “later”, as they say…",
)

CODE = (
    'def add(left: int, right: int) -> int:\n    """Return the sum of two numbers."""\n    return left + right\n\n\n'
    "for index in range(10):\n    if index % 2 == 0:\n        print(index, add(index, 1))\n    else:\n        continue\n",
    "import json\n\nclass Stack:\n    def __init__(self) -> None:\n        self.items: list[str] = []\n\n"
    "    def push(self, item: str) -> None:\n        self.items.append(item)\n\n    def pop(self) -> str:\n"
    "        return self.items.pop()\n",
    "async function getWeather(city) {\n  const response = await fetch(`/weather?city=${city}`);\n"
    "  return response.json();\n}\n\nconst result = await getWeather('Paris');\nconsole.log(result.temperature);\n",
    "# Title\n\n* first item\n* second item\n\n1. one\n2. two\n\n| name | value |\n|---|---|\n| a | 1 |\n| b | 2 |\n\n"
    '```python\nprint("hello")\n```\n',
)

SCHEMAS = (
    '{"name": "get_weather", "description": "Get the current weather of a city.", "parameters": {"type": "object", '
    '"properties": {"city": {"type": "string", "description": "Name of the city"}, "unit": {"type": "string", "enum": '
    '["celsius", "fahrenheit"]}, "days": {"type": "integer"}}, "required": ["city"]}}',
    '{"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": '
    '"number"}, "filters": {"type": "array", "items": {"type": "string"}}, "exact": {"type": "boolean"}}}}',
    '{"answer": 42, "items": [{"id": 1, "ok": true}, {"id": 2, "ok": false}], "note": null}',
)

SUBJECTS = ("The model", "A client", "My friend", "The small dog", "Our teacher", "The engine", "An old man", "The user")
VERBS = ("reads", "writes", "opens", "sends", "finds", "answers", "remembers", "wants to see")
OBJECTS = ("a message", "the next page", "an image", "two questions", "the whole story", "a short video", "the list of tools")
PLACES = ("in the morning", "without any help", "on the server", "at the station", "because it is needed", "again and again")


def passages() -> list[str]:
    """All training texts; the sentences combine every subject with every verb, and go round the objects and places."""
    sentences = [
        f"{subject} {verb} {OBJECTS[(row + column) % len(OBJECTS)]} {PLACES[(row + 2 * column) % len(PLACES)]}."
        for row, subject in enumerate(SUBJECTS)
        for column, verb in enumerate(VERBS)
    ]
    return [*PASSAGES, *CODE, *SCHEMAS, *sentences]
