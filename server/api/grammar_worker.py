"""The process that compiles clients' grammars first: `python -m server.api.grammar_worker MODEL_DIR VOCAB_SIZE PARENT_PID`.

Reads one grammar at a time from standard input and answers with a verdict on standard output, until the input ends. A frame is
a little-endian uint32 length and MessagePack. It may be killed at any moment, so that a grammar may exhaust time, memory or
stack and cost nothing but itself.
"""

import struct
import sys
from pathlib import Path
from typing import Final

import msgspec

from server.grammars import GrammarError, GrammarTokenizer
from server.media.sandbox import confine, leave_signals_to_front
from server.messages import Grammar

FRAME_LEN: Final = struct.Struct("<I")
# The tables of a vocabulary of 200,000 tokens take about 300 MB; the rest is for grammars.
MEMORY_BYTES: Final = 2 << 30


class Verdict(msgspec.Struct, frozen=True):
    """The answer to one grammar; the first one, before any grammar, is about the worker itself.

    Attributes:
        fault: why it cannot be used, client-safe; None if it can.
    """

    fault: str | None


def judge(tokenizer: GrammarTokenizer, grammar: Grammar) -> Verdict:
    """Compile and throw away."""
    try:
        tokenizer.compile(grammar)
    except GrammarError as error:
        return Verdict(str(error))
    except MemoryError:
        return Verdict("the grammar takes too much memory")
    return Verdict(None)


def _send(verdict: Verdict) -> None:
    encoded = msgspec.msgpack.encode(verdict)
    sys.stdout.buffer.write(FRAME_LEN.pack(len(encoded)) + encoded)
    sys.stdout.buffer.flush()


def main() -> None:
    """Serve until the input ends."""
    leave_signals_to_front()
    try:
        tokenizer = GrammarTokenizer(Path(sys.argv[1]), int(sys.argv[2]))
    except GrammarError as error:
        _send(Verdict(str(error)))
        return
    confine(MEMORY_BYTES, int(sys.argv[3]))
    _send(Verdict(None))
    decoder = msgspec.msgpack.Decoder(Grammar)
    while len(header := sys.stdin.buffer.read(FRAME_LEN.size)) == FRAME_LEN.size:
        (length,) = FRAME_LEN.unpack(header)
        _send(judge(tokenizer, decoder.decode(sys.stdin.buffer.read(length))))


if __name__ == "__main__":
    main()
