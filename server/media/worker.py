"""A worker process of the media pool: `python -m server.media.worker PARENT_PID`, with its socket as standard input.

Reads one task at a time, answers it, and leaves when the socket closes. It decodes strangers' bytes, so it holds nothing
worth taking: no secrets, no other request, no way out (see `sandbox`). It may be killed at any moment.
"""

import resource
import signal
import socket
import sys
import traceback

import msgspec
from PIL import AvifImagePlugin

from server.errors import MediaError
from server.media.image import fill_image, plan_image
from server.media.protocol import HEADER, Answer, Broken, Filled, FillTask, FromWorker, Hello, PlanTask, Refused, Setup, Task
from server.media.sandbox import confine, silence
from server.media.slab import SlabReader, StaleSlabError
from server.media.types import ImagePlan

_MAX_TRACE_CHARS = 4000
_decoder = msgspec.msgpack.Decoder(Setup | PlanTask | FillTask)
_encoder = msgspec.msgpack.Encoder()


class _ClosedError(Exception):
    """The front closed the socket, or died."""


def _receive(connection: socket.socket) -> tuple[Setup | Task, bytes]:
    message_len, body_len = HEADER.unpack(_receive_exactly(connection, HEADER.size))
    message = _decoder.decode(_receive_exactly(connection, message_len))
    return message, _receive_exactly(connection, body_len)


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    received = connection.recv(num_bytes, socket.MSG_WAITALL) if num_bytes else b""
    if len(received) < num_bytes:
        raise _ClosedError
    return received


def _send(connection: socket.socket, message: FromWorker) -> None:
    encoded = _encoder.encode(message)
    connection.sendall(HEADER.pack(len(encoded), 0) + encoded)


def _execute(task: Task, body: bytes, slab: SlabReader) -> ImagePlan | Filled | Refused | Broken:
    try:
        if isinstance(task, PlanTask):
            return plan_image(body, task.rule, max_pixels=task.max_pixels)
        fill_image(body, task.size, max_pixels=task.max_pixels, out=slab.read(task.ref))
        return Filled()
    except MediaError as error:
        return Refused(error.message)
    except MemoryError:
        return Refused("Decoding the picture takes more memory than one picture may use.")
    except StaleSlabError as error:
        return Broken(str(error))
    except Exception:
        return Broken(traceback.format_exc()[-_MAX_TRACE_CHARS:])


def _resident_bytes() -> int:
    # Not ru_maxrss: across fork and exec a child inherits its parent's, and the front may be large.
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def main() -> None:
    """Serve tasks until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the front, which then closes the socket
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # a worker is one core's worth; others decode at the same time
    connection = socket.socket(fileno=0)
    try:
        setup, _ = _receive(connection)
        if not isinstance(setup, Setup):
            raise SystemExit("the first message to a media worker must be its setup")
        slab = SlabReader(setup.slab_name)
        confine(setup.memory_bytes, int(sys.argv[1]))
        silence()
        _send(connection, Hello())
        while True:
            task, body = _receive(connection)
            if isinstance(task, Setup):
                raise SystemExit("a media worker is set up once")
            result = _execute(task, body, slab)
            del body
            _send(connection, Answer(result, _resident_bytes()))
    except (_ClosedError, ConnectionError):
        return


if __name__ == "__main__":
    main()
