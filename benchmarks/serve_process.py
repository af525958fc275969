"""Server processes under load: ours as an operator starts it, and `transformers serve`."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx

START_TIMEOUT_S = 900.0


class ServerStartError(Exception):
    """The server did not come up; the message ends with its last lines."""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServedProcess:
    """A context manager around a server process; entered when it answers.

    Attributes:
        url: where it listens.
    """

    def __init__(self, command: Sequence[str], port: int, probe: str, log: Path, environment: Mapping[str, str]) -> None:
        """Take note.

        Args:
            command: starts it.
            port: that it will listen on.
            probe: path that answers 200 when it is ready.
            log: file for what it prints.
            environment: on top of ours.
        """
        self.url = f"http://127.0.0.1:{port}"
        self._command, self._probe, self._log, self._environment = list(command), probe, log, environment

    def __enter__(self) -> "ServedProcess":
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=os.environ | self._environment, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def _wait(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                break
            try:
                if httpx.get(self.url + self._probe, timeout=5.0).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise ServerStartError(f"{' '.join(self._command)} did not start:\n{self._log.read_text(errors='replace')[-3000:]}")

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def ours(model: Path, log: Path, settings: Mapping[str, str]) -> ServedProcess:
    """`m3-server serve`; `settings` by name, for example {"max_num_seqs": "64"}."""
    port = free_port()
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
    command = [sys.executable, "-m", "server.cli", "serve", "--model", str(model), "--port", str(port), *flags]
    return ServedProcess(command, port, "/readyz", log, {})


def transformers(model: Path, log: Path, options: Sequence[str]) -> ServedProcess:
    """`transformers serve` with the same folder."""
    port = free_port()
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(model), "--port", str(port), *options]
    return ServedProcess(command, port, "/health", log, {"HF_HUB_OFFLINE": "1"})
