"""Launches that find their program at once: a step that is no CUDA graph launches some twenty kernels a layer.

At each launch Triton looks at every argument, prints all options into a key and prepares what hooks may ask for, most of it in
Python. A kernel with `direct_launch` does so for the first launch of a kind; later ones hand their arguments to the program
that Triton chose then, by the call that Triton itself ends with (`CompiledKernel.run`).

Triton chooses by the values of constants and options, and by these properties of each other argument: its type and the type of
its elements; whether a pointer or an integer is a multiple of 16; whether an integer is 1 and how many bits it needs
(`native_specialize_impl`). The key here holds all of them, but larger integers and other types take Triton's own way.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from server.kernels.hopper import CopyDescriptor

_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


def direct_launch(kernel: Any) -> Any:
    """Decorator above `triton.jit` or `gluon.jit`, for kernels that are launched from the host.

    Constants and options come by name, all other arguments by position. Triton's settings count as they are at the first launch
    of a kind, except debug mode and hooks: launches that a hook observes take Triton's way.
    """
    return DirectKernel(kernel) if isinstance(kernel, JITFunction) else kernel  # the interpreter has kernels of its own


class DirectKernel:
    """A kernel that is launched as Triton's are, by `kernel[grid](...)`, but returns nothing.

    Attributes:
        kernel: Triton's.
    """

    def __init__(self, kernel: JITFunction) -> None:
        """Wrap a kernel of Triton's.

        Raises:
            ValueError: a constant stands before another parameter.
        """
        params = kernel.params
        self._num_args = sum(not p.is_constexpr for p in params)
        if any(p.is_constexpr for p in params[: self._num_args]):
            raise ValueError(f"constants of {kernel.__name__} do not come last")
        self.kernel = kernel
        self._depends_on = [
            (not p.do_not_specialize, not (p.do_not_specialize or p.do_not_specialize_on_alignment))
            for p in params[: self._num_args]
        ]
        self._programs: dict[Hashable, tuple[Any, ...]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """What launches on a grid of one to three sizes."""
        return partial(self._launch, grid)

    def _launch(self, grid, *args, **constants) -> None:
        runtime, active = knobs.runtime, driver.active
        device = active.get_current_device()
        is_observed = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls or self.kernel.pre_run_hooks
        is_known = len(args) == self._num_args and not is_observed
        key: list[Any] = [device, runtime.debug, knobs.compilation.instrumentation_mode]
        values: list[Any] = []
        for arg, (by_value, by_alignment) in zip(args, self._depends_on, strict=False):
            kind = type(arg)
            if kind is Tensor:
                address = arg.data_ptr()
                values.append(address)
                key.append(arg.dtype)
                key.append(by_alignment and not address & 15)
            elif kind is int and _INT32_MIN <= arg <= _INT32_MAX:
                values.append(arg)
                key.append("1" if by_value and arg == 1 else "16" if by_alignment and not arg & 15 else "")
            elif kind is float:
                values.append(arg)
                key.append(kind)
            elif kind is CopyDescriptor:
                values.append(arg)
                key.append(arg.kind)
            else:
                is_known = False
        key += constants
        key += constants.values()
        program = self._programs.get(tuple(key)) if is_known else None
        if program is None:
            compiled = self.kernel[grid](*args, **constants)
            if is_known and compiled.module is not None:  # loaded, not compiled alone
                unread = [constants.get(p.name, p.default) for p in self.kernel.params[self._num_args :]]
                self._programs[tuple(key)] = compiled.run, compiled.function, compiled.packed_metadata, unread
            return
        run, function, metadata, unread = program
        x, y, z = (*grid, 1, 1)[:3]
        run(x, y, z, active.get_current_stream(device), function, metadata, None, None, None, *values, *unread)
