"""What crosses the boundary between the front process and the engine process.

All types are frozen msgspec structs, sent as MessagePack over a local ZeroMQ socket; nothing is pickled. The front sends
`Submit` and `Abort`. The engine answers every `Submit` with any number of `Started` and `Tokens`, and then exactly one
`Finished` or `Failed`, also after an abort, a refusal or a fault. This module imports nothing of ours.
"""

import enum

import msgspec


class GrammarKind(enum.StrEnum):
    """The language that a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


class Grammar(msgspec.Struct, frozen=True):
    """The texts that an output may be. Equal grammars are compiled once, so the text should be spelled one way.

    Attributes:
        kind: how to read `text`.
        text: a JSON schema; nothing for `json_object`; a regular expression that the whole output matches; a JSON list of
            strings for `choice`; or a grammar in llguidance's dialect of Lark.
    """

    kind: GrammarKind
    text: str = ""


class ThinkingTokens(msgspec.Struct, frozen=True):
    """Free text that comes before a grammar's text.

    Attributes:
        closer: id that ends the free text; the grammar begins behind its first occurrence.
        opener: None when the prompt ends inside the free text. Otherwise the output may begin with `opener`, and then it is
            inside, or with `closer`, or with the grammar's text at once.
    """

    closer: int
    opener: int | None = None


class SamplingParams(msgspec.Struct, frozen=True):
    """How to choose tokens for one sequence. Every value is validated before it gets here.

    Attributes:
        max_tokens: number of tokens to generate at most, >= 1.
        temperature: 0 means greedy.
        top_p: nucleus mass in (0, 1]; 1 is off.
        top_k: number of candidates; 0 is off.
        min_p: minimum probability relative to the best token, in [0, 1]; 0 is off.
        presence_penalty, frequency_penalty: OpenAI's additive penalties over generated tokens.
        repetition_penalty: multiplicative penalty over prompt and generated tokens; 1 is off.
        seed: makes the sequence repeatable whatever its batch mates are; None draws from the engine's own generator.
        logit_bias: (token id, bias) pairs, ids below the logits' width.
        stop_token_ids: ids that end the sequence; the end-of-turn id is among them unless the client ignores it.
        min_tokens: no stop token is sampled before that many tokens.
        num_logprobs: None for none; otherwise the sampled token's and that many best alternatives.
        num_prompt_logprobs: the same for every token of the prompt but the first; the prefix cache is not read then, because
            it has no logits.
        grammar: what the output must match. A stop token is sampled only where the text is complete; `max_tokens` may cut it
            before. A complete text that cannot go on is padded with stop tokens up to `min_tokens`.
        thinking: free text before the grammar; None when it begins with the first token.
        allowed_token_ids: the only ids to choose from, stop ids included; empty for all.
        bad_words: token sequences that the output never contains; these, the allowed ids and `min_tokens` hold on top of a
            grammar. A sequence that they leave no token ends with `Failed`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    thinking: ThinkingTokens | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


class SlabRef(msgspec.Struct, frozen=True):
    """A byte range of the shared-memory media slab.

    Attributes:
        offset: first byte.
        num_bytes: length.
        generation: counts the range's uses; a reader checks it against the slab's header before it trusts the bytes.
    """

    offset: int
    num_bytes: int
    generation: int


class MediaKind(enum.StrEnum):
    """What a media item is; it decides the placeholder token and the layout of its pixels."""

    IMAGE = "image"
    VIDEO = "video"


class TokenRange(msgspec.Struct, frozen=True):
    """`length` consecutive placeholder tokens of the prompt, starting at token index `offset`."""

    offset: int
    length: int


class MediaItem(msgspec.Struct, frozen=True):
    """One picture or clip of a prompt.

    Attributes:
        kind: image or video.
        content_hash: 32 bytes over the source bytes and every option that changes pixels; part of the prefix-cache key.
        grid_thw: temporal patches, patch rows, patch columns (the processor's `image_grid_thw` / `video_grid_thw`).
        ranges: where its features go; one range for a picture, one per temporal patch for a clip, in order, together
            t * h * w / 4 tokens.
        pixels: uint8 RGB frames [F, 14 * h, 14 * w, 3]: one of a picture, 2 * t of a clip, or 2 * t - 1 whose last one counts
            twice.
    """

    kind: MediaKind
    content_hash: bytes
    grid_thw: tuple[int, int, int]
    ranges: tuple[TokenRange, ...]
    pixels: SlabRef


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Start one sequence.

    Attributes:
        request_id: unique among open requests.
        prompt_token_ids: placeholders already expanded.
        sampling: validated parameters.
        media: items in prompt order.
        priority: lower runs earlier; equal priorities run in order of arrival.
        cache_salt: separates prefix-cache tenants; requests share pages only when it is equal.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    media: tuple[MediaItem, ...] = ()
    priority: int = 0
    cache_salt: bytes = b""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop a sequence as soon as possible; ids that are unknown or already ended are ignored."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Abort what is open, answer it, and leave with exit code 0."""


ToEngine = Submit | Abort | Shutdown


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position, before temperature, from the model's distribution.

    Attributes:
        logprob: of the sampled token, or of the prompt's, natural logarithm.
        top_ids, top_logprobs: the best alternatives, best first; both of length `num_logprobs` or `num_prompt_logprobs`.
    """

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class FinishReason(enum.StrEnum):
    """Why a sequence ended, in OpenAI's words, plus `abort`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A sequence left the queue: the next step computes some of it. Sent again when it was preempted meanwhile."""

    request_id: str


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """New tokens of one sequence, in order. A stop token is included as the last one.

    Attributes:
        request_id: whose.
        token_ids: one or more ids.
        logprobs: one entry per id when the request asked for them, else empty.
        prompt_logprobs: with the first tokens of a request that asked for them: one entry per token of the prompt but the
            first one; else empty.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The last event of a sequence that ended without a fault.

    Attributes:
        request_id: whose.
        reason: why.
        num_prompt_tokens: length of the prompt.
        num_cached_tokens: prompt tokens taken from the prefix cache when the sequence first ran.
        num_output_tokens: tokens generated, the stop token included.
    """

    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class FailureKind(enum.StrEnum):
    """What the front makes of a `Failed`: an error class of `server.errors`."""

    NO_FIT = "no_fit"
    INVALID = "invalid"
    INTERNAL = "internal"
    ENGINE_DEAD = "engine_dead"
    SHUTDOWN = "shutdown"


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The last event of a sequence that could not be served.

    Attributes:
        request_id: whose.
        kind: which error the client gets.
        message: client-safe text.
    """

    request_id: str
    kind: FailureKind
    message: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Sent once, when the engine can take requests.

    Attributes:
        num_pages: pages in the cache.
        page_size: tokens per page.
        max_model_len: longest sequence (prompt plus output) that fits both the window and the cache, in tokens.
        vocab_size: width of the logits.
        lane_page_bytes: size of a page by the name of the lane.
    """

    num_pages: int
    page_size: int
    max_model_len: int
    vocab_size: int
    lane_page_bytes: dict[str, int] = {}


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """Sent instead of `Ready`, before the engine exits: it cannot start.

    Attributes:
        message: one short reason for the operator.
    """

    message: str


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """The engine's counters and gauges, sent after steps and as a heartbeat while idle, at most a few times a second.

    Counters (`*_total`) count from the engine's start; `num_*` are values of the moment.
    """

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    steps_total: int
    prompt_tokens_total: int
    generation_tokens_total: int
    preemptions_total: int
    prefix_query_tokens_total: int
    prefix_hit_tokens_total: int
    feature_queries_total: int = 0
    feature_hits_total: int = 0


TerminalEvent = Finished | Failed
RequestEvent = Tokens | Finished | Failed
FromEngine = Started | Tokens | Finished | Failed | Ready | StartFailed | Stats
