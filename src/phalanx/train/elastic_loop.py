"""The loop of `phalanx.main`: when a rank dies, `train` is called again in a new process group, with its state.

The agent detects a death first, and sends every worker its new assignment. The connections of the old group are cut, so
that no rank keeps waiting in one of its collectives. The resulting exception in the script is not the script's fault,
and ends this call of `train`.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.messages import worker_messages as messages
from phalanx.contract.variables import MEMORY, for_cuda
from phalanx.errors import JoinError
from phalanx.train import wrong_calls
from phalanx.train.elastic.gpu_wait import GpuWait
from phalanx.train.elastic.halting import Halted, Halting
from phalanx.train.elastic.handover import Handover
from phalanx.train.elastic.made_once import MadeOnce
from phalanx.train.elastic.recovery_state import AgentHooks, Generation, RecoveryState, trainings
from phalanx.train.elastic.state_offer import StateOffer
from phalanx.train.model import shard_placement
from phalanx.train.reporting import trackers
from phalanx.train.run import Run
from phalanx.worker.agent_channel import AgentChannel, ChannelCallbacks
from phalanx.worker.ignored_signals import IgnoredSignals
from phalanx.worker.process_group.aborter import GroupAborter
from phalanx.worker.process_group.closing import destroy_without_waiting
from phalanx.worker.process_group.group import WorkerProcessGroup
from phalanx.worker.rendezvous.device import cuda_device, warm_up
from phalanx.worker.rendezvous.membership import Membership, form

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_PEER_WORDS = ("gloo", "nccl", "peer", "connect", "socket", "store", "timeout", "timed out", "process group", "pipe")
_ABOUT_FILES = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
_OTHER_PATIENCE = 1.0  # seconds, for errors that do not mention peers
_TRACKER_TIMEOUT = 5.0  # seconds to end the runs of trackers before the process ends
_WARM_UP = 60.0  # seconds until the CUDA context is complete, at most


@dataclass(frozen=True)
class LastGroup:
    """What this process keeps from its last group."""

    offer: StateOffer | None = None  # the state that it holds
    waited: float = 0.0  # seconds since a checkpoint was due
    has_snapshots: bool = False  # there are snapshots in memory
    step: int = 0  # the newest committed step, whether its state still exists or not


class ElasticLoop:
    """Calls `train` for one generation of the process group after the other, as the agent assigns them."""

    def __init__(self, channel: str, options: dict[str, Any], log_to: Any = None) -> None:
        self._options = options
        self._log_to = log_to
        self._training = next(trainings)
        self._aborter = GroupAborter()
        self._aborter.watch_groups()
        self._run: Run | None = None
        self._recovery: RecoveryState | None = None  # of the run; other threads read it
        self._last = LastGroup()
        self._handover: Handover | None = None  # of the group that is being formed
        self._once = MadeOnce()
        self._halting = Halting(self._steps)
        self._assignment: messages.Assignment | None = None  # of the group that is being formed, or was formed
        self._gpu_wait = GpuWait()
        self._rescuing = threading.Lock()
        hello = messages.Hello(cuda_device(options.get("device")), for_cuda(environment()))
        callbacks = ChannelCallbacks(self._aborter.cut, self._halting.stir, self._heartbeat, self._received)
        self._channel = AgentChannel(channel, callbacks, hello=hello)
        self._ignored = IgnoredSignals(self._channel.preempt)
        self._channel.listen()

    @property
    def run(self) -> Run | None:
        """The run of the current generation."""
        return self._run

    def live(self, train: Callable[[Run], Result]) -> tuple[Run, Result]:
        """Call `train` until it returns; return the run, which is still open, and the result."""
        excepthook = sys.excepthook
        warming = warm_up(self._options.get("device"), spare=self._channel.is_spare)
        self._gpu_wait.warming = warming
        while True:
            assignment = self._channel.assignment
            with self._aborter.uncut():  # from here on, nothing is cut that belongs to this group
                self._assignment = assignment
            try:
                run = self._begin(assignment)
                if warming is not None:
                    warming.join(_WARM_UP)
                result = wrong_calls.call(train, run)
                saved = run._finish()
                self._channel.send(self._heartbeat())  # the last step
                self._channel.send(messages.Done(saved=saved))
                return run, result
            except Halted as halted:
                self._channel.send(messages.HaltedAt(halted.step))
                raise
            except Exception as error:
                logger.debug("train raised in generation %d", assignment.generation, exc_info=True)
                if not self._is_regroup(error, assignment):
                    if self._recovery is not None:  # the agent compares the step with those of earlier tries
                        self._channel.send(self._heartbeat())
                    raise
            self._leave()
            sys.excepthook = excepthook  # torch wraps it for every group

    def _is_regroup(self, error: Exception, assignment: messages.Assignment) -> bool:
        """Return whether `error` is the consequence of a lost rank: the agent then has a newer assignment.

        A rank may detect the death of another one before the agent does. Errors of the script are raised at once.
        """
        self._halting.stuck = True
        moved = self._channel.has_moved(assignment)
        if self._halting.asked and not moved:
            self._acknowledge_halt(assignment.generation)
        patience = assignment.patience if moved or self._halting.asked else _patience(error, assignment.patience)
        if not patience or self._channel.newer(assignment, patience) is None or _is_broken(self._run):
            return False
        self._halting.stuck = False
        return True

    def _begin(self, assignment: messages.Assignment) -> Run:
        self._channel.send(messages.Entering(assignment.generation, self._holds()))
        options = {**self._options}
        seed = options.pop("seed", 0)
        with self._aborter.watching():
            try:
                membership = form(
                    **options,
                    assignment=assignment,
                    offer=self._last.offer.encoded if self._last.offer is not None else "",
                    met=self._met,
                )
            finally:
                self._gpu_wait.connecting = False
            recovery = RecoveryState(self._generation(assignment, membership), self._last.offer)
            group = WorkerProcessGroup(membership, seed=seed)
            run = Run(group, log_to=self._log_to, recovery=recovery)
        logger.debug("generation %d: rank %d of %d", assignment.generation, group.rank, group.world_size)
        self._recovery = recovery
        self._run = run
        self._handover = None
        self._last = replace(self._last, offer=None)
        group.seed_everything()
        self._once.enter()
        if self._channel.has_moved(assignment):  # the agent requested an abort before this group existed
            self._aborter.cut()
        return run

    def _generation(self, assignment: messages.Assignment, membership: Membership) -> Generation:
        number, handover, newest = assignment.generation, self._handover, self._last.step

        def first_step(step: int, before: int) -> None:
            self._channel.send(messages.FirstStep(number, step, max(before, newest) if number else 0))
            if handover is not None:
                handover.conclude()

        hooks = AgentHooks(
            first_step=first_step,
            checkpoint_folder=lambda folder: self._channel.send(messages.Keeping(folder)),
            should_halt=self._should_halt,
            measured=self._channel.send_nowait,
            batch_skipped=lambda *skipped: self._channel.send(messages.SkippedBatch(*skipped)),
            check_group=lambda: self._check_group(membership, assignment),
        )
        return Generation(
            number=number,
            training=self._training,
            once=self._once,
            handover=handover,
            waited=self._last.waited,
            halt=assignment.halt,
            hooks=hooks,
        )

    def _check_group(self, membership: Membership, assignment: messages.Assignment) -> None:
        """Raise before the use of gradients that an aborted NCCL operation has left incomplete: NCCL raises nothing."""
        import torch

        if membership.device.type == "cuda":
            torch.cuda.current_stream(membership.device).synchronize()
        if self._channel.has_moved(assignment):
            raise JoinError("the group was lost in the middle of a step, which will be repeated")

    def _met(self, membership: Membership) -> None:
        """Prepare the handover while the group forms: ranks that have the state copy it for new ranks of their node."""
        if self._assignment is not None and self._assignment.generation:
            self._handover = Handover(membership, self._last.offer)
            self._last = replace(self._last, offer=self._handover.offer)
            self._handover.prepare()
        self._gpu_wait.connecting = membership.device.type == "cuda"

    def _leave(self) -> None:
        run, self._run = self._run, None
        recovery, self._recovery = self._recovery, None
        if run is None or recovery is None:  # the group was not formed
            if self._handover is not None:
                self._handover.close()
                self._handover = None
            self._destroy()
            return
        offer = None if recovery.torn else recovery.current_offer()
        counter = recovery.counter
        step = counter.steps if counter.steps > counter.start else max(counter.steps, self._last.step)
        self._last = LastGroup(offer, recovery.checkpoint_waited, recovery.has_snapshots, step)
        if offer is None:
            self._once.forget()
        logger.debug("leaving generation %d after step %d", recovery.generation.number, step)
        self._aborter.cut()
        run._abandon(self._left, has_state=offer is not None and not offer.sharded)
        self._aborter.forget()

    def _holds(self) -> bool:
        """Return whether this rank has the whole state, so that a rank that cannot leave its group can be replaced.

        With sharded replicas it has one shard, and ranks with other shards must not be given up early. Without
        replicas, a lost shard always comes from a snapshot.
        """
        offer = self._last.offer
        return offer is not None and not (offer.sharded and shard_placement.is_replicated(offer.kept))

    def _left(self) -> None:
        """Report that the old group is left: later delays, such as a slow disk, are no reason to replace this rank."""
        self._channel.send(messages.Entering(self._channel.generation, self._holds()))

    def _destroy(self) -> None:
        """Destroy a group that was half formed."""
        import torch.distributed as dist

        if dist.is_initialized():
            destroy_without_waiting()
        # torch has counted this group, and would give the next one another name than a new rank does.
        dist.distributed_c10d._world.group_count = 0
        self._aborter.forget()

    # -- messages of the agent

    def _received(self, message: messages.Halt | messages.Rescue | messages.EndWorker) -> None:
        if isinstance(message, messages.EndWorker):
            if self._ignored.ignores(message.signal):
                trackers.end_all("failed" if message.failed else "stopped", _TRACKER_TIMEOUT)
                self._ignored.die(message.signal)
        elif isinstance(message, messages.Rescue):  # may take long, and more messages may arrive
            threading.Thread(target=self._rescue, name="phalanx-rescue", daemon=True).start()
        elif message.step is not None:
            self._halting.settle(message.step)
        else:
            self._acknowledge_halt(self._channel.generation)

    def _acknowledge_halt(self, generation: int) -> None:
        self._channel.send(messages.HaltAck(self._halting.ask(), generation, self._halting.stuck))

    def _rescue(self) -> None:
        if self._rescuing.acquire(blocking=False):
            try:
                self._channel.send(self._rescued())
            except Exception as error:  # the agent continues as if it had not asked
                logger.debug("rescuing the state of a rank that cannot leave its group", exc_info=True)
                self._channel.send(messages.Rescued(why=f"{type(error).__name__}: {error}"[:1000]))
            finally:
                self._rescuing.release()

    def _rescued(self) -> messages.Rescued:
        """Copy the state to memory while the main thread sleeps in an operation of a lost group.

        If it wakes up, it commits nothing: `_should_halt` rejects the next step.
        """
        from phalanx.train.elastic.rescue import rescue, stillness
        from phalanx.worker.snapshot_memory import SnapshotMemoryClient

        still, recovery, memory = stillness(), self._recovery, environment().get(MEMORY)
        if still is None:
            return messages.Rescued(why="its main thread is running")
        if self._assignment is None or not self._channel.has_moved(self._assignment):
            return messages.Rescued(why="its group is not lost")
        if not memory or not (self._last.has_snapshots or (recovery is not None and recovery.has_snapshots)):
            return messages.Rescued(why="there are no snapshots in memory")
        if recovery is not None and recovery.torn:
            return messages.Rescued(why="an update has begun, and its step is not committed")
        offer = self._last.offer if recovery is None else recovery.current_offer(asleep=True)
        if offer is None:
            return messages.Rescued(why="it has no state of a committed step")
        client = SnapshotMemoryClient(memory, str(self._training))
        try:
            why = rescue(offer, client, still)
        finally:
            client.close()
        return messages.Rescued(why=why) if why else messages.Rescued(offer.step)

    def _is_elsewhere(self) -> bool:
        """Return whether there is a newer generation than that of the run."""
        recovery = self._recovery
        return recovery is not None and self._channel.generation > recovery.generation.number

    def _should_halt(self, step: int) -> bool:
        if self._halting.asked and self._halting.reached(step, self._is_elsewhere):
            self._channel.send(messages.HaltAck(step, self._channel.generation))
            return True
        recovery = self._recovery
        if recovery is not None and self._channel.generation > recovery.generation.number:
            raise RuntimeError("the group is being formed again")
        return False

    def _steps(self) -> int:
        recovery = self._recovery
        return 0 if recovery is None else recovery.counter.steps

    def _heartbeat(self) -> messages.Heartbeat:
        """Return the progress of the training. Called by the thread of the channel."""
        recovery, blocked = self._recovery, self._is_blocked()
        # Again: the group that the main thread now waits in may not have existed the first time, or not completely. The
        # script may create one, for example a device mesh.
        self._aborter.cut_if(lambda: self._assignment is not None and self._channel.has_moved(self._assignment))
        if recovery is not None:
            return messages.Heartbeat(recovery.counter.steps, recovery.counter.samples, blocked)
        return messages.Heartbeat(0, blocked=blocked)

    def _is_blocked(self) -> bool:
        """Return whether the GPU does not let the main thread leave a lost group that others form again.

        While there are too few nodes, the main thread waits with its state, and has left nothing.
        """
        assignment = self._assignment
        is_lost = assignment is not None and self._channel.generation > assignment.generation
        return self._gpu_wait.is_endless(assignment.generation if assignment is not None and is_lost else None)

    def close(self) -> None:
        """Close the channel to the agent."""
        self._aborter.end_watching()
        self._channel.close()
        self._ignored.end()


def _is_broken(run: Run | None) -> bool:
    """Return whether the CUDA context is broken: after an illegal address, a device assert or a memory error every call
    fails, and only another process can continue.
    """
    if run is None or run.device.type != "cuda":
        return False
    import torch

    try:
        torch.cuda.synchronize(run.device)
    except RuntimeError:
        return True
    return False


def _patience(error: Exception, whole: float) -> float:
    """Return how many seconds to wait for the agent to report a death that may have caused `error`.

    torch reports a lost peer with many different texts, but always with these types. Most other errors of these types
    are the script's own, and are not delayed for long.
    """
    import torch
    import torch.distributed as dist

    from phalanx.collectives.errors import CallRefused, CollectiveMismatch

    if not isinstance(error, RuntimeError | OSError | JoinError):
        return 0.0
    if isinstance(error, (torch.OutOfMemoryError, *_ABOUT_FILES)):
        return 0.0
    text = str(error).lower()
    lost = isinstance(error, OSError | JoinError | dist.DistError) or any(word in text for word in _PEER_WORDS)
    lost = lost and not isinstance(error, CollectiveMismatch | CallRefused)
    return whole if lost else min(_OTHER_PATIENCE, whole)
