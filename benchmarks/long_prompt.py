"""What a very large prompt costs everybody else: `python -m benchmarks.long_prompt [--out FILE]`.

A real server process with the bundled checkpoint, short streams that never pause, and a poller of `/health`. Three phases of
equal length take turns: nothing else; prompts of 27 MB, read and refused one after the other; and, as the control, a process
that only burns a core. Times are those of this process, which runs on the same cores.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import http.client
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import server

MODEL = Path(server.__file__).parent / "model" / "tiny"
SERVE = (sys.executable, "-m", "server.cli", "serve", "--port", "0", "--model", str(MODEL))
READY = re.compile(rb"curl (http://\S+?)/v1/chat/completions")
BURN = (sys.executable, "-c", "while True: pass")
CHAT = "/v1/chat/completions"
POLL_S = 0.02


@dataclasses.dataclass
class Phase:
    """What was seen while one thing was going on, all rounds together."""

    name: str
    gaps_s: list[float] = dataclasses.field(default_factory=list)
    health_s: list[float] = dataclasses.field(default_factory=list)
    prompts_s: list[float] = dataclasses.field(default_factory=list)

    def report(self) -> dict[str, object]:
        """Milliseconds between tokens and for `/health`; seconds for a prompt's refusal."""
        return {
            "phase": self.name,
            "num_gaps": len(self.gaps_s),
            "gap_ms": {f"p{share}": percentile_ms(self.gaps_s, share) for share in (50, 90, 99, 100)},
            "health_ms": {f"p{share}": percentile_ms(self.health_s, share) for share in (50, 99, 100)},
            "prompt_s": [round(seconds, 2) for seconds in self.prompts_s],
        }


class Watch:
    """Sorts what the streams and the poller see into the phase that is on; None between phases."""

    def __init__(self) -> None:
        self.phase: Phase | None = None


def percentile_ms(samples_s: Sequence[float], share: int) -> float:
    """A percentile in milliseconds; 100 is the maximum."""
    ordered = sorted(samples_s)
    return round(1e3 * ordered[min(len(ordered) - 1, len(ordered) * share // 100)], 1)


def chat_body(text: str, **fields: object) -> bytes:
    """A chat request of one message."""
    return json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()


def head(method: str, path: str, length: int = 0) -> bytes:
    """The lines before a body."""
    return f"{method} {path} HTTP/1.1\r\nhost: bench\r\ncontent-length: {length}\r\n\r\n".encode()


@contextlib.contextmanager
def server_process() -> Iterator[tuple[str, int]]:
    """A server; its address once it is ready."""
    process = subprocess.Popen(SERVE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        found = next(match for line in process.stderr if (match := READY.match(line)))
        address = urlsplit(found[1].decode())
        assert address.hostname is not None
        assert address.port is not None
        yield address.hostname, address.port
    finally:
        process.terminate()
        process.communicate()


@contextlib.asynccontextmanager
async def connection(address: tuple[str, int]) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection for as long as the block lasts."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


async def stream(address: tuple[str, int], watch: Watch) -> None:
    """Read answers for ever, and note the gaps between their chunks."""
    body = chat_body("Hello", stream=True, ignore_eos=True, max_tokens=2000)
    while True:
        async with connection(address) as (reader, writer):
            writer.write(head("POST", CHAT, len(body)) + body)
            last_s: float | None = None
            async for line in reader:
                if b"[DONE]" in line:
                    break
                if not line.startswith(b"data: "):
                    continue
                now_s = time.monotonic()
                if last_s is not None and watch.phase is not None:
                    watch.phase.gaps_s.append(now_s - last_s)
                last_s = now_s


async def poll_health(address: tuple[str, int], watch: Watch) -> None:
    """Ask `/health` again and again over one connection."""
    async with connection(address) as (reader, writer):
        while True:
            start_s = time.monotonic()
            writer.write(head("GET", "/health"))
            header = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(re.search(rb"content-length: (\d+)", header)[1]))  # type: ignore[index]
            if watch.phase is not None:
                watch.phase.health_s.append(time.monotonic() - start_s)
            await asyncio.sleep(POLL_S)


def send_prompt(address: tuple[str, int], body: bytes) -> float:
    """Send one large prompt, which is refused; how long that took."""
    start_s = time.monotonic()
    connection = http.client.HTTPConnection(*address, timeout=120)
    connection.request("POST", CHAT, body)
    answer = connection.getresponse()
    assert answer.status == 400, answer.read()
    connection.close()
    return time.monotonic() - start_s


async def prompts(address: tuple[str, int], body: bytes, phase: Phase, end_s: float) -> None:
    """Large prompts one after the other until it is time, the last one to its end."""
    while time.monotonic() < end_s:
        phase.prompts_s.append(await asyncio.to_thread(send_prompt, address, body))


async def burn(end_s: float) -> None:
    """A process that only computes."""
    process = await asyncio.create_subprocess_exec(*BURN)
    await asyncio.sleep(end_s - time.monotonic())
    process.kill()
    await process.wait()


@contextlib.asynccontextmanager
async def background(*work: Awaitable[None]) -> AsyncIterator[None]:
    """Run coroutines until the block ends."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(address: tuple[str, int], num_streams: int, body: bytes, num_rounds: int, phase_s: float) -> list[Phase]:
    """All phases, `num_rounds` times."""
    watch = Watch()
    quiet, large, burner = Phase("nothing else"), Phase(f"prompts of {len(body) / 1e6:.0f} MB"), Phase("a busy core")
    work: list[tuple[Phase, Callable[[float], Awaitable[None]]]] = [
        (quiet, lambda end_s: asyncio.sleep(end_s - time.monotonic())),
        (large, lambda end_s: prompts(address, body, large, end_s)),
        (burner, burn),
    ]
    streams = [stream(address, watch) for _ in range(num_streams)]
    async with background(*streams, poll_health(address, watch)):
        await asyncio.sleep(phase_s / 2)
        for _ in range(num_rounds):
            for phase, run in work:
                watch.phase = phase
                await run(time.monotonic() + phase_s)
                watch.phase = None
                await asyncio.sleep(0.5)
    return [phase for phase, _ in work]


def main() -> None:
    """Measure, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the report as JSON")
    parser.add_argument("--megabytes", type=float, default=27.0, help="size of the large prompt")
    parser.add_argument("--streams", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="length of a phase")
    arguments = parser.parse_args()
    body = chat_body("The quick brown fox. " * int(arguments.megabytes * 1e6 / 21))
    load = os.getloadavg()[0]
    with server_process() as address:
        phases = asyncio.run(measure(address, arguments.streams, body, arguments.rounds, arguments.seconds))
    rows = [phase.report() for phase in phases]
    for row in rows:
        print(json.dumps(row))
    if arguments.out:
        report = {
            "command": f"python -m benchmarks.long_prompt --streams {arguments.streams} --rounds {arguments.rounds}",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": f"{os.cpu_count()} x {platform.machine()}, load {load:.1f} at the start",
            "python": platform.python_version(),
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
