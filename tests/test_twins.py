import inspect

from server.model import attention, mlp, text
from tests.twins import only_twins


def ops():
    """The functions of server/kernels that the decoder calls."""
    found = [value for user in (attention, mlp, text) for value in vars(user).values() if inspect.isfunction(value)]
    return [op for op in found if op.__module__.startswith("server.kernels.")]


def test_references_call_twins_and_nothing_else():
    before = ops()
    with only_twins():
        assert [op.__name__ for op in ops()] == [f"{op.__name__}_torch" for op in before]
    assert ops() == before
