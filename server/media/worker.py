"""What a worker process of the media pool does, once it is forked (see `forkserver`).

Reads one task at a time from its socket, answers it, and leaves when the socket closes. It decodes strangers' bytes, so it
holds nothing worth taking: no secrets, no other request, no way out (see `sandbox`). It may be killed at any moment.
"""

import resource
import select
import socket
import time
import traceback

import av.logging
import msgspec
import numpy as np
import torch
from PIL import AvifImagePlugin

from server.errors import MediaError
from server.media.clip import fill_clip, plan_clip
from server.media.image import fill_image, plan_image
from server.media.protocol import (
    HEADER,
    Answer,
    Broken,
    Cancel,
    FillClipTask,
    Filled,
    FillTask,
    FromWorker,
    Hello,
    Outcome,
    PlanClipTask,
    PlanTask,
    Refused,
    Setup,
    Task,
)
from server.media.resize import resize_into
from server.media.sandbox import confine, silence
from server.media.slab import SlabReader, StaleSlabError

_MAX_TRACE_CHARS = 4000
_decoder = msgspec.msgpack.Decoder(Setup | PlanTask | PlanClipTask | FillTask | FillClipTask | Cancel)
_encoder = msgspec.msgpack.Encoder()


class _ClosedError(Exception):
    """The front closed the socket, or died."""


def warm_up() -> None:
    """What every worker needs and forks share: settings of the libraries, and the resize kernel's pages in memory."""
    torch.set_num_threads(1)
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # a worker is one core's worth; others decode at the same time
    av.logging.set_level(None)
    resize_into(np.zeros((64, 64, 3), np.uint8), np.empty((28, 28, 3), np.uint8))


def main(connection: socket.socket, parent_pid: int) -> None:
    """Serve tasks until the socket closes."""
    try:
        setup, _ = _receive(connection)
        if not isinstance(setup, Setup):
            raise SystemExit("the first message to a media worker must be its setup")
        slab = SlabReader(setup.slab_name)
        confine(setup.memory_bytes, parent_pid)
        silence()
        _send(connection, Hello())
        start_bytes = _own_bytes()
        while True:
            task, body = _receive(connection)
            if isinstance(task, Cancel):
                continue  # of a task that had ended
            if isinstance(task, Setup):
                raise SystemExit("a media worker is set up once")
            start_s = time.process_time()
            result = _execute(task, body, slab, connection)
            del body
            _send(connection, Answer(result, max(0, _own_bytes() - start_bytes), time.process_time() - start_s))
    except (_ClosedError, ConnectionError):
        return


def _execute(task: Task, body: bytes, slab: SlabReader, connection: socket.socket) -> Outcome | Refused | Broken:
    try:
        match task:
            case PlanTask():
                return plan_image(body, task.rule, max_pixels=task.max_pixels)
            case PlanClipTask():
                return plan_clip(body, task.rule, task.sampling, task.limits)
            case FillTask():
                fill_image(body, task.size, max_pixels=task.max_pixels, out=slab.read(task.ref))
            case FillClipTask():
                poll = select.poll()
                poll.register(connection, select.POLLIN)  # only `Cancel` comes before an answer, or the front's end
                fill_clip(
                    body,
                    task.size,
                    task.picks,
                    max_frame_pixels=task.max_frame_pixels,
                    out=slab.read(task.ref),
                    is_cancelled=lambda: bool(poll.poll(0)),
                )
        return Filled()
    except MediaError as error:
        return Refused(error.message)
    except MemoryError:
        return Refused("Decoding takes more memory than one item may use.")
    except StaleSlabError as error:
        return Broken(str(error))
    except Exception:
        return Broken(traceback.format_exc()[-_MAX_TRACE_CHARS:])


def _receive(connection: socket.socket) -> tuple[Setup | Task | Cancel, bytes]:
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


def _own_bytes() -> int:
    """Resident memory that is not the slab's or a file's. Pages still shared with the fork server count too."""
    with open("/proc/self/statm", "rb") as statm:
        _, resident, shared, *_ = statm.read().split()
    return (int(resident) - int(shared)) * resource.getpagesize()
