"""The engine process, `python -m server.engine`: the loop between the channel, the scheduler and the runner.

One pass is three calls: drain the inbox, `schedule()`, and `advance()`, which launches the step and commits the one before it
(`engine_steps.py`). A step that raises costs the sequences in it and nothing else, unless the device is lost or steps keep
failing: then the process exits with a code, and the front answers for it. The process lives as long as its standard input:
the front holds the other end.
"""

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

import msgspec

from server.engine_grammars import GrammarQueue
from server.engine_launch import EngineLaunch
from server.engine_pixels import open_pixels
from server.engine_setup import EngineParts, StartError, build, choose_device, require_cut
from server.engine_steps import MAX_FAILED_STEPS, Runner, StepPipeline
from server.heartbeat import STACKS_SIGNAL, Heartbeat
from server.load_progress import LoadProgress
from server.messages import Abort, Failed, FailureKind, RequestEvent, Shutdown, Started, StartFailed, Submit
from server.model.feature_cache import FeatureCache
from server.model.grammar import GrammarCompiler
from server.model.shard import Shard
from server.rank_team import RankTeam
from server.scheduler.scheduler import Scheduler
from server.transport import EngineChannel

logger = logging.getLogger(__name__)

BUSY_STATS_PERIOD_S = 0.2
IDLE_STATS_PERIOD_S = 0.5
COMPILE_POLL_S = 0.002
# Numbers in the log-probabilities of a prompt. They leave in one message; at 14 bytes each it stays well below the
# transport's limit, beyond which sending would end the engine.
MAX_PROMPT_LOGPROBS = 8_000_000


class Engine:
    """The loop. One thread, which owns channel, scheduler and runner."""

    def __init__(
        self,
        channel: EngineChannel,
        scheduler: Scheduler,
        runner: Runner,
        vocab_size: int,
        grammars: GrammarCompiler | None = None,
        heartbeat: Heartbeat | None = None,
        features: FeatureCache | None = None,
        overlap_steps: bool = False,
        max_failed_steps: int = MAX_FAILED_STEPS,
    ) -> None:
        """Take over the parts.

        Args:
            channel: to the front.
            scheduler: empty.
            runner: warm.
            vocab_size: number of rows of the model's embedding; no token id may reach it.
            grammars: the runner's; without it, requests with a grammar are refused.
            heartbeat: where steps are noted for the front.
            features: the runner's, to count its hits.
            overlap_steps: plan and launch a step while the one before it runs.
            max_failed_steps: so many in a row are the end.
        """
        self._grammars = GrammarQueue(grammars)
        self._channel = channel
        self._vocab_size = vocab_size
        self._scheduler = scheduler
        self._heartbeat = heartbeat or Heartbeat()
        self._steps = StepPipeline(
            scheduler, runner, self._answer, self._heartbeat, overlap=overlap_steps, max_failed_steps=max_failed_steps
        )
        self._features = features
        self._next_stats_s = time.monotonic()

    def run(self) -> None:
        """Serve until `Shutdown`.

        Raises:
            EngineFailedError: the device is lost, or several steps in a row failed; what they held was answered.
        """
        while self._drain_inbox():
            self._add_compiled()
            plan = self._scheduler.schedule()
            if plan is not None:
                self._channel.send([Started(new.request_id) for new in plan.new_sequences])
            self._steps.advance(plan)
            if plan is None:
                self._heartbeat.idle()
            self._report(BUSY_STATS_PERIOD_S if plan is not None else IDLE_STATS_PERIOD_S)

    def _drain_inbox(self) -> bool:
        """Hand the front's messages to the scheduler; blocks while there is nothing to do. False after `Shutdown`."""
        is_busy = self._scheduler.has_work or self._steps
        timeout_s = 0.0 if is_busy else max(0.0, self._next_stats_s - time.monotonic())
        if self._grammars:
            timeout_s = min(timeout_s, COMPILE_POLL_S)
        for message in self._channel.receive(timeout_s):
            match message:
                case Submit():
                    self._answer(self._add(message))
                case Abort():
                    held = self._grammars.abort(message.request_id)
                    self._answer(held or self._scheduler.abort(message.request_id))
                case Shutdown():
                    self._channel.send([*self._grammars.shutdown(), *self._scheduler.shutdown()])
                    return False
        return True

    def _add(self, submit: Submit) -> list[RequestEvent]:
        refusal = self._refusal(submit)
        if refusal is not None:
            return [Failed(submit.request_id, FailureKind.INVALID, refusal)]
        if submit.sampling.grammar is not None:
            return self._grammars.hold(submit, submit.sampling.grammar)
        return self._scheduler.add(submit)

    def _refusal(self, submit: Submit) -> str | None:
        """Why a request would take the engine down; such are refused here, whoever sent them."""
        token_ids, num_top = submit.prompt_token_ids, submit.sampling.num_prompt_logprobs
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            return f"a token id of the prompt is not below {self._vocab_size}"
        if num_top is not None and len(token_ids) * (num_top + 4) > MAX_PROMPT_LOGPROBS:
            return f"{len(token_ids)} tokens are too many for the log-probabilities of {num_top} alternatives each"
        return None

    def _add_compiled(self) -> None:
        """Hand the requests to the scheduler whose grammars are compiled now."""
        for held in self._grammars.take_ready():
            self._answer([held] if isinstance(held, Failed) else self._scheduler.add(held))

    def _answer(self, events: Sequence[RequestEvent]) -> None:
        """Send what became of requests."""
        self._grammars.note_ends(events)
        self._channel.send(events)

    def _report(self, period_s: float) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_stats_s:
            self._next_stats_s = now_s + period_s
            stats = self._scheduler.stats()
            if self._features is not None:
                num_hits, num_misses = self._features.num_hits, self._features.num_misses
                stats = msgspec.structs.replace(stats, feature_queries_total=num_hits + num_misses, feature_hits_total=num_hits)
            self._channel.send([stats])


def start(launch: EngineLaunch, channel: EngineChannel, heartbeat: Heartbeat, team: RankTeam) -> EngineParts | None:
    """Build the engine with all its ranks and tell the front that it is ready, or why it is not (None)."""
    settings = launch.settings
    try:
        require_cut(settings)
        device = choose_device(settings.device, Shard(0, settings.tensor_parallel_size))
        ranks = team.start(device)
        parts = build(settings, open_pixels(launch.slab_name, device), LoadProgress(heartbeat), ranks=ranks)
    except StartError as error:
        logger.error("the engine cannot start: %s", error)
        channel.send([StartFailed(str(error))])
        return None
    except Exception as error:
        logger.exception("the engine cannot start")
        if team.notices_loss():
            return None  # the front knows which rank was lost
        channel.send([StartFailed(f"{type(error).__name__}: {error}")])
        return None
    channel.send([parts.ready])
    return parts


def exit_with_parent() -> None:
    """Leave at once when standard input ends: the front is gone, nobody waits for an answer."""
    stdin = sys.stdin.fileno()

    def watch() -> None:
        # Not through sys.stdin: its lock, held by a daemon thread, would break the interpreter's own exit.
        while os.read(stdin, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def main() -> int:
    """Start, serve, and return the exit code."""
    # Ctrl-C reaches the whole process group; the front decides when the engine leaves.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL, chain=True)  # chained to the default, which ends the process
    launch = EngineLaunch.model_validate_json(sys.stdin.buffer.readline())
    exit_with_parent()
    logging.basicConfig(
        stream=sys.stderr,
        level=launch.settings.log_level.value.upper(),
        format="%(asctime)s %(levelname)s engine %(name)s: %(message)s",
    )
    channel = EngineChannel(launch.address)
    heartbeat = Heartbeat(launch.heartbeat_fd)
    team = RankTeam(launch)
    try:
        return serve(launch, channel, heartbeat, team)
    finally:
        team.close()
        channel.close()


def serve(launch: EngineLaunch, channel: EngineChannel, heartbeat: Heartbeat, team: RankTeam) -> int:
    """Start and run the loop; returns the exit code."""
    try:
        parts = start(launch, channel, heartbeat, team)
        if parts is None:
            return 1
        engine = Engine(
            channel,
            parts.scheduler,
            team.lead(parts.runner),
            parts.ready.vocab_size,
            parts.grammars,
            heartbeat,
            parts.runner.feature_cache,
            parts.overlap_steps,
            team.max_failed_steps,
        )
        engine.run()
        team.dismiss()
    except Exception:
        logger.exception("the engine leaves")
        team.notices_loss()
        return 1
    return 0


if __name__ == "__main__":
    # At once: the interpreter's own end takes about a second with torch, and a collective that never ends would hold it up.
    os._exit(main())
