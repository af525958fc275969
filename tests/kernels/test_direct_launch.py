import pytest
import torch
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from server.kernels.direct_launch import DirectKernel, direct_launch
from server.kernels.hopper import box_descriptor
from server.kernels.linear import linear
from server.kernels.norm_triton import add_rms_norm_triton
from training.mxfp8 import quantize

MEMORY = torch.zeros(4096, dtype=torch.uint8)
FIRST = -MEMORY.data_ptr() % 16
DTYPES = [torch.bfloat16, torch.float32, torch.int16, torch.uint8]
INTEGERS = [0, 1, 2, 15, 16, 17, 48, -1, -16, 2**31 - 1, 2**31 - 16, -(2**31), 2**31, 2**31 + 1, -(2**31) - 1, 2**63 - 1, 2**63]


def body(a_ptr, b_ptr, c_ptr, m, n, k, scale, W: tl.constexpr, FLAG: tl.constexpr = False):
    pass


class Device:
    """A driver that counts launches instead of making them."""

    def __init__(self):
        self.launches = []

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 7


class Program:
    """What Triton would compile: everything that decides on the binary is in `source`."""

    module, packed_metadata = "loaded", "metadata"

    def __init__(self, source):
        self.function = source

    def launch_metadata(self, grid, stream, *args):
        return None

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter_hook, exit_hook, *args):
        for hook, word in ((enter_hook, "enter"), (exit_hook, "exit")):
            if hook is not None:
                hook(word)
        # The device of this test: programs stay known when the module's tests are not run in one go.
        driver.active.launches.append((x, y, z, stream, function, metadata, taken(function, args)))


def taken(source, args):
    """Arguments as a program reads them: those that are no constants in it, tensors as addresses."""
    assert len(args) == len(source["signature"])
    read = [arg for arg, kind in zip(args, source["signature"].values(), strict=True) if kind != "constexpr"]
    return [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in read]


@pytest.fixture(scope="module")
def device():
    device = Device()
    before, driver._active = driver._active, device

    def compile_nothing(self, key, signature, device_id, constexprs, options, attrs, warmup):
        source = {"signature": signature, "constants": constexprs, "attributes": attrs, "options": options.__dict__}
        program = self.device_caches[device_id][0][key] = Program(source)
        return program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "_do_compile", compile_nothing)
        yield device
    driver._active = before


def kernels(make):
    options = {"do_not_specialize": ["k"], "do_not_specialize_on_alignment": ["b_ptr", "n"]}
    return DirectKernel(make(body, **options)), make(body, **options)


PAIRS = {make: kernels(make) for make in (JITFunction, GluonJITFunction)}


def tensor(dtype, offset):
    return MEMORY[FIRST + offset :][:1024].view(dtype)


def descriptor(dtype, rows):
    return box_descriptor(MEMORY[FIRST:][:2048].view(dtype).view(-1, 64), (rows, 64))


POINTERS = [tensor(dtype, offset) for dtype in DTYPES for offset in (0, 4, 8, 16)] + [None]
POINTERS += [descriptor(dtype, rows) for dtype in DTYPES[::2] for rows in (8, 64)]
NUMBERS = [*INTEGERS, None, True, False, 0.0, 1.0, 2.5, 16.0, tensor(torch.float32, 0)]
ARGUMENTS = [POINTERS, POINTERS, POINTERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS]
CONSTANTS = {"W": [1, 2, 16, 2.5, tl.float32, None], "FLAG": [False, True], "num_warps": [4, 1], "maxnreg": [None, 80]}
USUAL = tuple(values[0] for values in ARGUMENTS)


def outcome(kernel, device, grid, args, options):
    device.launches.clear()
    try:
        kernel[grid](*args, **options)
    except (OverflowError, TypeError, ValueError) as error:
        return type(error)
    (launch,) = device.launches
    return launch


def compare(device, make, grid, args, options):
    direct, plain = PAIRS[make]
    assert outcome(direct, device, grid, args, options) == outcome(plain, device, grid, args, options)


@pytest.mark.parametrize("make", PAIRS)
@pytest.mark.parametrize("place", range(len(ARGUMENTS)))
def test_each_property_of_an_argument_counts_as_for_triton(device, make, place):
    for value in ARGUMENTS[place] * 2:  # the second time they are known
        compare(device, make, (3,), (*USUAL[:place], value, *USUAL[place + 1 :]), {"W": 2})


@pytest.mark.parametrize("make", PAIRS)
@pytest.mark.parametrize("name", CONSTANTS)
def test_each_constant_and_option_counts_as_for_triton(device, make, name):
    for value in CONSTANTS[name] * 2:
        compare(device, make, (3, 4), USUAL, {"W": 2} | {name: value})


@pytest.mark.parametrize("make", PAIRS)
def test_arguments_by_name_take_tritons_way(device, make):
    for value in NUMBERS * 2:
        compare(device, make, (3,), USUAL[:-1], {"scale": value, "W": 2})


@pytest.mark.parametrize("make", PAIRS)
@given(
    grid=st.sampled_from([(3,), (3, 4), (3, 4, 5)]),
    args=st.tuples(*map(st.sampled_from, ARGUMENTS)),
    options=st.fixed_dictionaries({"W": st.sampled_from(CONSTANTS["W"])}),
)
def test_any_arguments_go_to_the_program_that_triton_takes(device, make, grid, args, options):
    compare(device, make, grid, args, options)
    compare(device, make, grid, args, options)


@pytest.mark.parametrize("make", PAIRS)
def test_known_launches_do_not_ask_triton(device, make, monkeypatch):
    direct = DirectKernel(make(body))
    first = outcome(direct, device, (3,), USUAL, {"W": 2})
    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: pytest.fail("asked"))
    assert outcome(direct, device, (3,), USUAL, {"W": 2}) == first


def test_a_hook_sees_the_launches_of_known_programs(device, monkeypatch):
    direct, chain, seen = DirectKernel(JITFunction(body)), knobs.HookChain(), []
    outcome(direct, device, (3,), USUAL, {"W": 2})
    chain.add(seen.append)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", chain)
    outcome(direct, device, (3,), USUAL, {"W": 2})
    assert seen == ["enter"]


def test_a_program_that_was_compiled_but_not_loaded_is_not_kept(device, monkeypatch):
    direct, asked = DirectKernel(JITFunction(body)), []
    run = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: (asked.append(1), run(*args, **kwargs))[1])
    monkeypatch.setattr(Program, "module", None)
    for _ in range(3):
        outcome(direct, device, (3,), USUAL, {"W": 2})
    assert len(asked) == 3


def test_constants_come_last():
    def mixed(a_ptr, W: tl.constexpr, n):
        pass

    with pytest.raises(ValueError, match="constants of mixed do not come last"):
        direct_launch(JITFunction(mixed))


@pytest.mark.gpu
@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 17, 300])
def test_results_are_the_same_to_the_bit(num_tokens, is_quantised, monkeypatch):
    weight = torch.randn((256, 1024), dtype=torch.bfloat16, device="cuda")
    norm_weight = torch.randn(1024, dtype=torch.bfloat16, device="cuda")
    x = torch.randn((3, num_tokens, 2048), dtype=torch.bfloat16, device="cuda")

    def run(columns):
        normed, _ = add_rms_norm_triton(x[0, :, columns], x[1, :, columns], norm_weight, 1e-6)
        return linear(normed, quantize(weight) if is_quantised else weight)

    placed = [slice(begin, begin + 1024) for begin in (0, 512, 3, 1024, 5)]  # on 16 bytes, or not
    direct = [run(columns) for columns in placed * 2]
    monkeypatch.setattr(DirectKernel, "_launch", lambda self, grid, *args, **constants: self.kernel[grid](*args, **constants))
    for out, columns in zip(direct, placed * 2, strict=True):
        assert torch.equal(out, run(columns))
