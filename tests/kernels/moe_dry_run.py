"""Compiles what router and experts would launch on a Hopper GPU, without one; a script, prints JSON (see `hopper_dry_run`)."""

import json

import torch

from server.kernels import moe_triton
from server.kernels.moe_router import route_triton
from tests.kernels.hopper_dry_run import compile_instead_of_launching, report
from tests.kernels.moe_reference import ACTIVATION, random_mxfp8

NUM_EXPERTS, HIDDEN, WIDTH, TOPK = 8, 768, 384, 4  # six steps of a hidden width: no whole number of fours

if __name__ == "__main__":
    compile_instead_of_launching()
    moe_triton.uses_hopper_products = lambda *_: True
    plain = torch.zeros((NUM_EXPERTS, 2 * WIDTH, HIDDEN)).bfloat16(), torch.zeros((NUM_EXPERTS, HIDDEN, WIDTH)).bfloat16()
    mxfp8 = random_mxfp8(NUM_EXPERTS, 2 * WIDTH, HIDDEN), random_mxfp8(NUM_EXPERTS, HIDDEN, WIDTH)
    for batch_sizes in ((6, 48, 150, 800), (5, 45, 129, 1000)):
        for num_tokens in batch_sizes:
            x = torch.zeros((num_tokens, HIDDEN)).bfloat16()
            route_triton(x, torch.zeros((NUM_EXPERTS, HIDDEN)), torch.zeros(NUM_EXPERTS), TOPK)
            expert_ids, weights = torch.zeros((num_tokens, TOPK), dtype=torch.int32), torch.zeros((num_tokens, TOPK))
            for w13, w2 in (plain, mxfp8):
                moe_triton.moe_triton(x, w13, w2, expert_ids, weights, *ACTIVATION, 2.0, True)
        print(json.dumps(report()))
