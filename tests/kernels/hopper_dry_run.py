"""Compiles what the prefill ops would launch on a Hopper GPU, without one; run as a script, prints JSON.

Every launch becomes a compilation for compute capability 9.0 on CPU tensors. Printed per batch: for each kernel the number of
different programs so far, whether each uses warpgroup matrix instructions, and the shared memory it asks for.
"""

import json
from collections import defaultdict

import torch
import triton.runtime.jit
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from server.kernels import index_score_prefill, query_tiles, sparse_prefill
from server.kernels.block_topk_prefill import block_topk_prefill
from server.kernels.dense_prefill import dense_prefill
from server.kernels.msa_select_prefill import msa_select_prefill
from tests.paged import paged_case

BATCHES = [([601], [33001]), ([3, 127, 512], [131, 20049, 35000])]
PROGRAMS = defaultdict(dict)


class HopperWithoutDevice:
    """The part of Triton's driver that compilation asks for."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Properties:
    multi_processor_count = 132


def compile_instead_of_launching():
    run = triton.runtime.jit.JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        program = run(self, *args, grid=grid, warmup=True, **options)
        PROGRAMS[self.fn.__name__][program.hash] = program
        return program

    triton.runtime.jit.JITFunction.run = compile_only
    driver.set_active(HopperWithoutDevice())
    torch.cuda.get_device_properties = lambda device: Properties
    for module in (query_tiles, index_score_prefill, sparse_prefill):
        module.uses_hopper_kernels = lambda tensor: True


def call_all(query_lens, seq_lens):
    case = paged_case(query_lens, seq_lens, 128)
    batch, num_tokens = case.batch, len(case.batch.positions)
    index_q = torch.zeros((num_tokens, 4, 128), dtype=torch.bfloat16)
    index_lane = torch.zeros((case.num_pages, 128, 128), dtype=torch.bfloat16)
    kv_lane = torch.zeros((case.num_pages, 4, 2, 128, 128), dtype=torch.bfloat16)
    q = torch.zeros((num_tokens, 64, 128), dtype=torch.bfloat16)
    scores = torch.zeros((4, num_tokens, -(-batch.max_seq_len // 128)))
    selection = torch.zeros((4, num_tokens, 16), dtype=torch.int32)
    index_score_prefill.index_score_prefill(index_q, index_lane, batch, scores)
    block_topk_prefill(scores, batch, 16, 0, 1, selection)
    msa_select_prefill(index_q, index_lane, batch, 16, 0, 1, selection)
    sparse_prefill.sparse_prefill(q, kv_lane, selection, batch, 0.1, torch.empty_like(q))
    dense_prefill(q, kv_lane, batch, 0.1, torch.empty_like(q))


def report():
    return {
        name: {
            "programs": len(programs),
            "wgmma": all("wgmma.mma_async" in program.asm["ptx"] for program in programs.values()),
            "shared_bytes": max(program.metadata.shared for program in programs.values()),
        }
        for name, programs in PROGRAMS.items()
    }


if __name__ == "__main__":
    compile_instead_of_launching()
    for query_lens, seq_lens in BATCHES:
        call_all(query_lens, seq_lens)
        print(json.dumps(report()))
