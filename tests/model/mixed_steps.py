"""Steps that mix prefill chunks and decodes of any lengths, on a small model with the released attention.

`python -m tests.model.mixed_steps --dtype bf16 --loop graphs` serves them on a GPU and prints a digest of the tokens and what
kinds of steps there were; it is meant to be run under compute-sanitizer. `test_mixed_steps` holds the tokens of all loops
against each other and against our twins in float32.
"""

import argparse
import hashlib
import json
import random
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from server.kvcache.pools import CachePools
from server.messages import SamplingParams, Submit
from server.model.config import M3Config, cache_spec
from server.model.decode_graphs import CudaRecorder
from server.model.m3 import M3Model
from server.model.progress import NoProgress
from tests.engine.serving import Server
from tests.model.quantised import quantise_checkpoint, write_checkpoint
from tests.paged import paged_case
from tests.twins import only_twins
from training.make_tiny import TINY_DIR
from training.tiny_weights import make_weights

LOOPS = ("plain", "overlapped", "graphs")
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "mxfp8": torch.bfloat16}
NUM_PAGES, MAX_NUM_SEQS = 160, 17  # enough for all requests, so that no loop plans other steps than the others
LENGTHS = (2600, 2049, 2300, 1, 17, 130, 700, 128, 3, 255, 900, 64, 1300, 5, 40, 385)
DECISIVE_GAP = {"float32": 1e-3, "bf16": 0.3, "mxfp8": 0.3}  # between logits, beyond which a greedy choice is no near tie
MIN_RIGHT = {"float32": 1.0, "bf16": 0.97, "mxfp8": 0.97}  # share of the other choices that are the reference's
SMALL_LENGTHS = (2100, 2049, 1, 17, 130, 300)


def make_checkpoints(folder: Path) -> dict[str, Path]:
    """The tiny checkpoint, and others with the released attention: in bf16, in MXFP8, and what MXFP8 made of the numbers.

    A prefill with the released heads does not fit a multiprocessor in float32.
    """
    config = json.loads((TINY_DIR / "config.json").read_text())
    text = config["text_config"]
    folders = {name: folder / name for name in (*DTYPES, "restored")}
    write_checkpoint(folders["float32"], config, make_weights(config, range(text["vocab_size"])))
    text.update({"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "rotary_dim": 64})
    text["sparse_attention_config"].update({"sparse_num_index_heads": 4, "sparse_index_dim": 128})
    write_checkpoint(folders["bf16"], config, make_weights(config, range(text["vocab_size"])))
    quantise_checkpoint(folders["bf16"], folders["mxfp8"], folders["restored"])
    return folders


def load(folder: Path, device: str, dtype: torch.dtype) -> M3Model:
    """The model of a checkpoint."""
    return M3Model.load(folder, M3Config.from_file(folder), torch.device(device), dtype, progress=NoProgress())


def make_requests(lengths: Sequence[int] = LENGTHS) -> list[Submit]:
    """Greedy requests with prompts of these lengths and outputs of various ones."""
    rng = random.Random(7)
    return [
        Submit(f"r{i}", [rng.randrange(250) for _ in range(length)], SamplingParams(rng.randrange(8, 30), 0.0, num_logprobs=2))
        for i, length in enumerate(lengths)
    ]


@dataclass
class Served:
    """What came of a run.

    Attributes:
        tokens: by request.
        gaps: of every token the distance in log-probability to the next best.
        steps: how many there were of each kind.
    """

    tokens: dict[str, list[int]]
    gaps: dict[str, list[float]]
    steps: Counter[str] = field(default_factory=Counter)

    def gaps_at_partings(self, others: Mapping[str, Sequence[int]]) -> list[float]:
        """Of every request whose tokens part from these, the gap where they do; their number must be the same."""
        partings = []
        for name, tokens in self.tokens.items():
            gaps = [gap for ours, theirs, gap in zip(tokens, others[name], self.gaps[name], strict=True) if ours != theirs]
            partings += gaps[:1]
        return partings

    @property
    def digest(self) -> str:
        """Of all tokens."""
        return hashlib.sha256(json.dumps(self.tokens).encode()).hexdigest()[:16]


def serve(model: M3Model, requests: Sequence[Submit], loop: str) -> Served:
    """Serve requests that come in one after the other while others decode, on pages that hold NaN until they are written."""
    record = CudaRecorder() if loop == "graphs" else None
    server = Server(
        model,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=300,
        num_pages=NUM_PAGES,
        enable_prefix_caching=True,
        overlap_steps=loop != "plain",
        record=record,
    )
    served = Served({}, {})
    waiting = list(requests)
    turn = 0
    while waiting or server.scheduler.has_work or server.steps:
        if waiting and turn % 2 == 0:
            server.submit(waiting.pop(0))
        plan = server.scheduler.schedule()
        if plan is not None:
            num_decodes = sum(chunk.num_tokens == 1 for chunk in plan.chunks)
            is_mixed = 0 < num_decodes < len(plan.chunks)
            served.steps["mixed" if is_mixed else "decode" if num_decodes else "prefill"] += 1
        server.steps.advance(plan)
        turn += 1
    for request in requests:
        name = request.request_id
        served.tokens[name] = server.output(name)
        entries = [entry for event in server.events[name] for entry in getattr(event, "logprobs", [])]
        served.gaps[name] = [entry.top_logprobs[0] - entry.top_logprobs[1] for entry in entries]
    return served


@dataclass(frozen=True)
class Agreement:
    """Of tokens that the reference prefers by more than some gap, how many were chosen."""

    num_decisive: int
    num_right: int

    @property
    def share(self) -> float:
        return self.num_right / self.num_decisive


def agreement(reference: M3Model, requests: Sequence[Submit], outputs: Mapping[str, Sequence[int]], gap: float) -> Agreement:
    """Hold greedy outputs against the twins of `reference`, each token after those that came before it."""
    num_decisive = num_right = 0
    for request in requests:
        output = outputs[request.request_id]
        best = reference_logits(reference, request, output).topk(2)
        is_decisive = best.values[:, 0] - best.values[:, 1] > gap
        num_decisive += int(is_decisive.sum())
        num_right += int((best.indices[:, 0] == torch.tensor(output))[is_decisive].sum())
    return Agreement(num_decisive, num_right)


@torch.inference_mode()
def reference_logits(model: M3Model, request: Submit, output: Sequence[int]) -> Tensor:
    """The twins' logits [n, vocab] after the prompt and each of the output's tokens but the last, computed at once."""
    token_ids = torch.tensor([*request.prompt_token_ids, *output[:-1]], device=model.device)
    spec = cache_spec(model.config, model.dtype)
    case = paged_case([len(token_ids)], [len(token_ids)], spec.page_size, device=str(model.device))
    with only_twins():
        hidden = model.forward(token_ids, case.batch, CachePools(spec, case.num_pages, model.device))
    return model.logits(hidden[len(request.prompt_token_ids) - 1 :]).cpu()


def main() -> None:
    """Serve on the GPU and say what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--loop", choices=LOOPS, default="plain")
    parser.add_argument("--small", action="store_true", help="fewer and shorter requests")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = load(make_checkpoints(Path(folder))[arguments.dtype], "cuda", DTYPES[arguments.dtype])
    served = serve(model, make_requests(SMALL_LENGTHS if arguments.small else LENGTHS), arguments.loop)
    steps = ", ".join(f"{count} {kind}" for kind, count in sorted(served.steps.items()))
    num_tokens = sum(map(len, served.tokens.values()))
    print(f"{arguments.dtype} {arguments.loop}: {num_tokens} tokens, digest {served.digest}; steps: {steps}")


if __name__ == "__main__":
    main()
