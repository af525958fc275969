"""Token ids of one answer to text, as they come.

A character whose bytes are spread over several tokens is held back until it is whole, so the concatenation of all pieces
does not depend on how the ids were cut. Knows nothing of which tokens end an answer.
"""

import codecs
from collections.abc import Iterable, Sequence


class Detokenizer:
    """The text of one sequence. Constant work per token; nothing already returned is looked at again."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """Args: token_bytes: what each id adds to the text; empty for hidden tokens. Ids behind its end add nothing."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these ids complete; bytes that can never become a character give U+FFFD."""
        table = self._token_bytes
        return self._decoder.decode(b"".join([table[index] for index in token_ids if index < len(table)]))

    def flush(self) -> str:
        """U+FFFD for a character that was begun and not finished, else ""; call it once, behind the last token."""
        return self._decoder.decode(b"", final=True)
