"""A step's choices while the device still makes them, and the host's side of the copies."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from server.kernels.sampling import RowStatus
from server.messages import TokenLogprobs
from server.model.sampling_slot import SamplingRow, SamplingSlot
from server.scheduler.plan import SampledToken, SlotFailure

NOT_FINITE = "the model's output was not finite"
NO_CHOICE = "the request's rules leave no token to choose"

SampleResult = tuple[tuple[SampledToken, ...], tuple[SlotFailure, ...]]


class HostBuffers:
    """Memory of the host that one sample's small copies use: pinned, with an event for their end, where there is a GPU."""

    def __init__(self, max_num_rows: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._where = torch.empty(2 * max_num_rows, dtype=torch.int64, pin_memory=on_gpu)
        self._out = torch.empty(2 * max_num_rows, dtype=torch.int64, pin_memory=on_gpu)
        self._numbers = self._where.numpy()
        self._event: torch.cuda.Event | None = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def send(self, slots: list[int], positions: list[int], target: Tensor) -> tuple[Tensor, Tensor]:
        """Slots and positions of S rows, in the device's `target` [>= 2 S] int64, in the order of the stream."""
        num_rows = len(slots)
        self._numbers[: 2 * num_rows] = slots + positions
        target[: 2 * num_rows].copy_(self._where[: 2 * num_rows], non_blocking=True)
        return target[:num_rows], target[num_rows : 2 * num_rows]

    def fetch(self, out: Tensor) -> None:
        """Begin to copy `out` [2, S] int64 from the device, behind everything else that was enqueued."""
        self._out[: out.numel()].copy_(out.view(-1), non_blocking=True)
        if self._event is not None:
            self._event.record()

    def read(self, num_rows: int) -> tuple[list[int], list[int]]:
        """What `fetch` copied; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._out[: 2 * num_rows].tolist()
        return numbers[:num_rows], numbers[num_rows:]


class PendingSample:
    """Choices for S rows.

    Attributes:
        token_ids: [S] int64 on the device, valid in the order of the stream; some valid id for a failed row.
    """

    def __init__(
        self,
        token_ids: Tensor,
        rows: Sequence[SamplingRow],
        states: Sequence[SamplingSlot],
        faults: Mapping[int, str],
        logprobs: tuple[Tensor, ...],
        buffers: HostBuffers,
        free_buffers: list[HostBuffers],
    ) -> None:
        """Take over a launched sample.

        Args:
            token_ids: see above.
            rows: S rows.
            states: of their slots at this time.
            faults: by row, why a sequence cannot go on, whatever the device chose.
            logprobs: on the host, for the rows that want them, what `logprobs` returns; not there before `buffers` are.
            buffers: ids and statuses are on their way to them.
            free_buffers: where `buffers` go when they have been read.
        """
        self.token_ids = token_ids
        self._rows = rows
        self._states = states
        self._faults = faults
        self._logprobs = logprobs
        self._buffers = buffers
        self._free_buffers = free_buffers
        self._result: SampleResult | None = None

    def wait(self) -> SampleResult:
        """The choices and the failures, together one per row, in order; the rules of the rows take their tokens.

        Waits for the device. Slots that were released or taken anew in the meantime do not matter. A second call returns
        the same result and changes nothing.
        """
        if self._result is None:
            token_ids, statuses = self._buffers.read(len(self._rows))
            self._free_buffers.append(self._buffers)
            self._result = self._conclude(token_ids, statuses)
        return self._result

    def _conclude(self, token_ids: list[int], statuses: list[int]) -> SampleResult:
        details = [part.tolist() for part in self._logprobs]
        logprobs = iter(zip(*details, strict=True))
        sampled: list[SampledToken] = []
        failures: list[SlotFailure] = []
        for i, (row, state) in enumerate(zip(self._rows, self._states, strict=True)):
            token_id, status = token_ids[i], statuses[i]
            entry = None
            if state.num_logprobs is not None:
                chosen, top_ids, top = next(logprobs)
                entry = TokenLogprobs(chosen, tuple(top_ids[: state.num_logprobs]), tuple(top[: state.num_logprobs]))
            if status == RowStatus.NOT_FINITE:
                failures.append(SlotFailure(row.slot, NOT_FINITE))
            elif i in self._faults or status == RowStatus.NO_CHOICE:
                failures.append(SlotFailure(row.slot, self._faults.get(i, NO_CHOICE)))
            else:
                if state.follow is not None:
                    state.follow(token_id)
                sampled.append(SampledToken(row.slot, token_id, entry))
        return tuple(sampled), tuple(failures)
