import json
from pathlib import Path

import pytest

from server.api.checkpoint import CheckpointError
from server.api.conversation import JsonObject
from server.api.template import ChatTemplate
from server.errors import BadRequestError, M3Error
from server.settings import ThinkingMode

MESSAGES: list[JsonObject] = [{"role": "user", "content": "Hi"}]


def render(source: str, tools: list[JsonObject] | None = None, **named_tokens: str) -> str:
    return ChatTemplate(source, named_tokens).render(MESSAGES, tools, ThinkingMode.ENABLED)


def test_tojson_is_json_dumps() -> None:
    tool: JsonObject = {"b": "<é> & 'x' \"y\" \n", "a": [1, 2.5, None, True], "": {}}
    assert render("{{ tools[0] | tojson }}", [tool]) == json.dumps(tool, ensure_ascii=False)
    assert render("{{ tools[0] | tojson(ensure_ascii=True) }}", [tool]) == json.dumps(tool)
    assert render("{{ tools[0] | tojson(indent=2) }}", [tool]) == json.dumps(tool, ensure_ascii=False, indent=2)
    compact = json.dumps(tool, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    assert render("{{ tools[0] | tojson(separators=(',', ':'), sort_keys=true) }}", [tool]) == compact


def test_text_is_not_escaped_for_html() -> None:
    assert ChatTemplate("{{ messages[0].content }}").render([{"content": "<b> & '"}], None, ThinkingMode.ADAPTIVE) == "<b> & '"


def test_variables_and_block_trimming_follow_transformers() -> None:
    source = "{% if add_generation_prompt %}\n  {% for m in messages %}\n{{ m.role }}\n{% break %}{% endfor %}\n{% endif %}"
    assert render(source + "{{ thinking_mode }}{{ eos_token }}{{ tools is none }}", eos_token="E") == "user\nenabledETrue"


def test_strftime_now_formats_the_date() -> None:
    assert render("{{ strftime_now('%Y') | int > 2000 }}") == "True"


def test_refusal_of_the_template_is_the_clients_fault() -> None:
    with pytest.raises(BadRequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_endless_nesting_is_the_clients_fault() -> None:
    with pytest.raises(BadRequestError, match="deeply"):
        render("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}")


@pytest.mark.parametrize("source", ["{{ missing.field }}", "{{ 1 / 0 }}", "{{ messages[0].content.x.y }}"])
def test_fault_of_the_template_is_logged_and_hidden(source: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(M3Error, match="could not be rendered") as raised:
        render(source)
    assert raised.value.status == 500
    assert "the chat template failed" in caplog.text


def test_the_log_of_a_fault_does_not_quote_the_conversation(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(M3Error):
        render("{{ {}[tools[0].name] + 1 }}", [{"name": "secret"}])
    assert "UndefinedError" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'root'}) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% include 'other' %}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
    ],
)
def test_sandbox_holds(source: str) -> None:
    with pytest.raises(M3Error):
        render(source)
    assert MESSAGES == [{"role": "user", "content": "Hi"}]


def test_syntax_error_is_reported_with_its_line() -> None:
    with pytest.raises(CheckpointError, match="line 2"):
        ChatTemplate("ok\n{% if %}")


def test_template_file_wins_over_the_tokenizer_config(tmp_path: Path) -> None:
    config = {"chat_template": "from config {{ bos_token }}", "bos_token": {"content": "B"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render(MESSAGES, None, ThinkingMode.ADAPTIVE) == "from config B"
    (tmp_path / "chat_template.jinja").write_text("from file {{ bos_token }}")
    assert ChatTemplate.load(tmp_path).render(MESSAGES, None, ThinkingMode.ADAPTIVE) == "from file B"


def test_default_variant_is_taken(tmp_path: Path) -> None:
    variants = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "chat"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": variants}))
    assert ChatTemplate.load(tmp_path).render(MESSAGES, None, ThinkingMode.ADAPTIVE) == "chat"


def test_checkpoint_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no chat_template\.jinja"):
        ChatTemplate.load(tmp_path)
