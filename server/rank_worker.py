"""The process of a rank other than 0, `python -m server.rank_worker RANK PARENT`: its share of the model.

It reads its launch from standard input like the engine process, whose id is PARENT, and carries out the plans of that process.
It decides nothing: not which steps are run, not which tokens are chosen, not when to leave. When rank 0 is gone, the kernel
ends it.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence

from server.engine_launch import EngineLaunch
from server.engine_pixels import open_pixels
from server.engine_setup import StartError, build, choose_device
from server.heartbeat import STACKS_SIGNAL
from server.model.progress import NoProgress
from server.model.shard import Shard
from server.parent_death import end_with_parent
from server.rank_group import RankGroup
from server.rank_plans import follow
from server.rank_team import reason_file_of, store_of

logger = logging.getLogger(__name__)


def run(launch: EngineLaunch, rank: int) -> None:
    """Start, and follow rank 0 to the end."""
    shard = Shard(rank, launch.settings.tensor_parallel_size)
    device = choose_device(launch.settings.device, shard)
    group = RankGroup(shard, device, store_of(launch))
    parts = build(launch.settings, open_pixels(launch.slab_name, device), NoProgress(), ranks=group)
    follow(parts.runner, group)


def main(arguments: Sequence[str]) -> int:
    """Run one rank and return the exit code; the arguments are its number and the process id of rank 0."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()  # a rank 0 that is gone may have hung
    rank, parent = map(int, arguments)
    if os.getppid() != parent:
        return 1  # it was gone before the kernel was asked
    launch = EngineLaunch.model_validate_json(sys.stdin.buffer.readline())
    logging.basicConfig(
        stream=sys.stderr,
        level=launch.settings.log_level.value.upper(),
        format=f"%(asctime)s %(levelname)s engine rank {rank} %(name)s: %(message)s",
    )
    try:
        run(launch, rank)
    except Exception as error:
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # rank 0 may be gone, too; the log is to say so, to its end
        is_known = isinstance(error, StartError)
        logger.error("rank %d leaves: %s", rank, error, exc_info=not is_known)
        reason_file_of(launch, rank).write_text(str(error) if is_known else f"{type(error).__name__}: {error}")
        os._exit(1)  # while the traceback holds what this rank has: giving that up may wait for a sum that never ends
    return 0


if __name__ == "__main__":
    # At once: a collective that never ends would hold up the interpreter's own end.
    os._exit(main(sys.argv[1:]))
