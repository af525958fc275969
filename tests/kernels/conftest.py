"""Kernel tests run on the GPU where there is one of the right kind, and under Triton's interpreter elsewhere."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined, so before any import of ours
