"""How decode kernels follow each other: programmatic dependent launch, and prefetch hints for what they will read.

A kernel that is launched with `pdl_options` starts while its predecessor still runs. It must call `wait_for_inputs` before it
trusts anything in memory; before that it may only give hints, which change no value and are harmless when wrong.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch option and kernel constant that turn programmatic dependent launch on where the device has it."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until the kernel before this one has finished, then let the one behind it start its hints."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs_only(PDL: tl.constexpr):
    """Wait as `wait_for_inputs` does, but keep the kernel behind this one waiting, which would take its place on the device."""
    if PDL:
        gdc_wait()


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the kernel behind this one start its hints."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def hint_read(pointers, NUM_BYTES: tl.constexpr):
    """Ask for NUM_BYTES (a multiple of 16) from each pointer, rounded down to 16 bytes, to come to the second-level cache."""
    addresses = pointers.to(tl.int64, bitcast=True) & -16
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [addresses, tl.full(addresses.shape, NUM_BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
