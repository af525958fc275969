import io

from server.model.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    """Advances by hand."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


def test_a_terminal_gets_a_bar_with_bytes_and_time_left():
    stream, clock = Terminal(), Clock()
    bar = ProgressBar(stream, clock)
    bar.start(200_000_000_000)
    clock.now_s = 30.0
    bar.advance(50_000_000_000)
    shown = stream.getvalue().split("\r")[-1]
    assert "50.0 GB of 200.0 GB, 1 min 30 s left" in shown
    clock.now_s = 120.0
    bar.advance(150_000_000_000)
    bar.finish()
    assert "200.0 GB of 200.0 GB, in 2 min 0 s" in stream.getvalue().split("\r")[-1]
    assert stream.getvalue().endswith("\n")


def test_a_terminal_is_not_redrawn_for_every_tensor():
    stream, clock = Terminal(), Clock()
    bar = ProgressBar(stream, clock)
    bar.start(1000)
    for _ in range(1000):
        clock.now_s += 0.001
        bar.advance(1)
    assert stream.getvalue().count("\r") <= 11


def test_a_log_gets_a_few_lines():
    stream = io.StringIO()
    bar = ProgressBar(stream, Clock())
    bar.start(10_000_000)
    for _ in range(1000):
        bar.advance(10_000)
    bar.finish()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert ["2.5 MB" in lines[0], "5.0 MB" in lines[1], "7.5 MB" in lines[2], "10.0 MB of 10.0 MB" in lines[3]] == [True] * 4
    assert "\r" not in stream.getvalue()


def test_an_empty_load_ends_cleanly():
    stream = io.StringIO()
    bar = ProgressBar(stream, Clock())
    bar.start(0)
    bar.finish()
    assert "0.0 MB of 0.0 MB" in stream.getvalue()
