"""The sizes a scheduler works with, fixed when the engine has measured its memory."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerConfig:
    """Sizes that never change.

    Attributes:
        max_num_seqs: slots, the sequences that run at the same time.
        max_num_batched_tokens: budget of one step, at least `max_num_seqs`.
        max_model_len: window in tokens, prompt plus output.
        page_size: tokens per page.
        num_pages: pages of the cache.
        enable_prefix_caching: reuse whole pages of equal prefixes.

    Raises:
        ValueError: a size below 1, or a budget that cannot give every running sequence a token.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    num_pages: int
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        """Check the sizes."""
        if min(self.max_num_seqs, self.max_model_len, self.page_size, self.num_pages) < 1:
            raise ValueError("max_num_seqs, max_model_len, page_size and num_pages must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs ({self.max_num_seqs}): "
                "every running sequence needs a token per step"
            )

    @property
    def max_seq_len(self) -> int:
        """Longest sequence, prompt plus output, that fits both the window and the cache."""
        return min(self.max_model_len, self.num_pages * self.page_size)
