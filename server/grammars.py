"""Grammars and the library that follows them: llguidance, with the one set of limits that front and engine share.

The front compiles a grammar in a process that may be killed, to learn whether it can be used; the engine compiles it again to
follow it. Both go through this module, so they agree. It knows neither sequences nor logits.
"""

import json
from pathlib import Path
from typing import Final

import llguidance
import msgspec

from server.messages import Grammar, GrammarKind

# What a grammar may cost. llguidance counts work instead of time, so a verdict does not depend on the machine. A step's
# 200,000 units of lexer fuel are about 14 ms; a lexer state takes 1-2 kB, and all sequences with a grammar share its states.
MAX_LEXER_STATES: Final = 50_000
# Blanks between JSON tokens: enough for pretty-printing, too few for a model that falls into printing blanks for ever.
JSON_BLANKS: Final = r"[\x20\x0A\x0D\x09]{1,64}"


class GrammarError(Exception):
    """A grammar that cannot be used; the message is client-safe: it speaks of the grammar only."""


class GrammarTokenizer:
    """The token texts that grammars are matched against. Immutable, may be used by several threads.

    Added tokens are no text, not even those that clients may see (`<tool_call>`): a grammar's text is spelled with ordinary
    tokens. A Lark grammar reaches an added token by its id, `<[1358]>`.
    """

    def __init__(self, model_dir: Path, vocab_size: int, *, max_lexer_states: int = MAX_LEXER_STATES) -> None:
        """Read tokenizer.json; takes about a second for 200,000 tokens.

        Args:
            model_dir: the checkpoint.
            vocab_size: width of the logits; ids without a token are never allowed.
            max_lexer_states: per grammar; an output that needs more cannot go on.

        Raises:
            GrammarError: tokenizer.json is missing or cannot be used.
        """
        try:
            definition = json.loads((model_dir / "tokenizer.json").read_bytes())
            for token in definition["added_tokens"]:
                token["special"] = True
            self.eos_token_ids = _eos_token_ids(model_dir)
            self.tokenizer = llguidance.LLTokenizer(
                json.dumps(definition), n_vocab=vocab_size, eos_token=list(self.eos_token_ids)
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise GrammarError(f"the checkpoint's tokenizer cannot be used for grammars: {error}") from error
        self.vocab_size = vocab_size
        self._limits = llguidance.LLParserLimits(max_lexer_states=max_lexer_states, verbose_errors=False)

    def compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        """A matcher at the grammar's beginning, to be copied for each sequence. The interpreter lock is free meanwhile.

        Raises:
            GrammarError: the grammar is malformed, too complex, or matches nothing.
        """
        matcher = llguidance.LLMatcher(self.tokenizer, _to_llguidance(grammar), log_level=0, limits=self._limits)
        if not matcher.is_error():
            # Some faults, such as a grammar that matches no text, only show in the first step.
            probe = matcher.deep_copy()
            probe.compute_bitmask()
            if not probe.is_error():
                return matcher
            matcher = probe
        raise GrammarError(reason(matcher))


def reason(matcher: llguidance.LLMatcher) -> str:
    """Why a matcher is in its error state, in one short paragraph."""
    text = matcher.get_error().split("<non-verbose/>")[0].strip()
    if text in ("NoExtension", "NoExtensionBias"):
        return "the grammar matches no text"
    return text[:500] or "the grammar cannot be followed"


def _to_llguidance(grammar: Grammar) -> str:
    """The grammar in llguidance's own format.

    Raises:
        GrammarError: the text is not even well-formed for its kind.
    """
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return _from_schema('{"type":"object"}')
        case GrammarKind.JSON_SCHEMA:
            return _from_schema(grammar.text)
        case GrammarKind.REGEX:
            return llguidance.LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            return llguidance.LLMatcher.grammar_from_lark(f"start: {_alternatives(grammar.text)}")
        case GrammarKind.LARK:
            return llguidance.LLMatcher.grammar_from_lark(grammar.text)


def _from_schema(schema: str) -> str:
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": JSON_BLANKS})
    except ValueError as error:
        raise GrammarError(f"the schema is malformed: {error}") from error


def _alternatives(text: str) -> str:
    """Lark's strings are JSON's."""
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except msgspec.MsgspecError as error:
        raise GrammarError(f"the choices are malformed: {error}") from error
    if not all(choices) or not choices:
        raise GrammarError("there must be a choice, and no choice may be empty")
    return " | ".join(json.dumps(choice) for choice in choices)


def _eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """What ends a turn, from generation_config.json, or else from config.json."""
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        found = json.loads(path.read_bytes()).get("eos_token_id") if path.exists() else None
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    raise ValueError("generation_config.json has no eos_token_id")
