"""Compiles what `linear` would launch on a Hopper GPU, without one; run as a script, prints JSON (see `hopper_dry_run`)."""

import json

import torch

from server.kernels.linear_few import linear_few
from server.kernels.linear_hopper import linear_hopper
from server.kernels.linear_narrow import linear_narrow
from tests.kernels.hopper_dry_run import compile_instead_of_launching, report
from training.mxfp8 import quantize

if __name__ == "__main__":
    compile_instead_of_launching()
    for num_rows in (192, 208):
        weight = torch.zeros((num_rows, 1024), dtype=torch.bfloat16)
        for num_tokens in (1, 3, 16, 32):
            x = torch.zeros((num_tokens, 1024), dtype=torch.bfloat16)
            linear_few(x, weight)
            linear_few(x, quantize(weight))
        for num_tokens in (9, 33, 100):
            linear_narrow(torch.zeros((num_tokens, 1024), dtype=torch.bfloat16), quantize(weight))
        for num_tokens in (300, 5000):
            linear_hopper(torch.zeros((num_tokens, 1024), dtype=torch.bfloat16), quantize(weight))
        print(json.dumps(report()))
