"""The loading of weights, shown to people as a bar and to the front through the heartbeat's memory."""

from server.heartbeat import Heartbeat
from server.model.progress import ProgressBar


class LoadProgress:
    """A `server.model.progress.Progress`."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._bar = ProgressBar()

    def start(self, total_bytes: int) -> None:
        """Loading begins and will read that many bytes."""
        self._heartbeat.load_began(total_bytes)
        self._bar.start(total_bytes)

    def advance(self, num_bytes: int) -> None:
        """That many more bytes are read."""
        self._heartbeat.loaded(num_bytes)
        self._bar.advance(num_bytes)

    def finish(self) -> None:
        """Everything is read."""
        self._bar.finish()
