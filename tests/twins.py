"""The decoder computed by the PyTorch twins of its kernels, on whatever device: references that need no CPU beside a GPU."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import server.model.attention
import server.model.mlp
import server.model.text

_USERS = (server.model.attention, server.model.mlp, server.model.text)


@contextmanager
def only_twins() -> Iterator[None]:
    """Within it, every op of the decoder is its twin; products and attention have no precision below that of their dtype.

    Raises:
        AttributeError: an op has no twin.
    """
    with _patched_ops(), sdpa_kernel(SDPBackend.MATH), _full_precision():
        yield


@contextmanager
def _patched_ops() -> Iterator[None]:
    ops = [(user, name, op) for user in _USERS for name, op in vars(user).items() if _is_op(op)]
    patches = [patch.object(user, name, getattr(sys.modules[op.__module__], f"{name}_torch")) for user, name, op in ops]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def _is_op(value: object) -> bool:
    return inspect.isfunction(value) and value.__module__.startswith("server.kernels.")


@contextmanager
def _full_precision() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction
    matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction = "ieee", False
    try:
        yield
    finally:
        matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction = before
