"""A training over the generations of its group: when a rank dies, `train` is entered again, with what it keeps.

The agent knows of a death first, and says where everybody stands now. What the old group was held together by is
cut, so that whoever waits in a collective of it stops waiting; whatever exception that raises in the script is not the
script's fault, and ends its turn.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from phalanx.cluster.sources.surroundings import environment
from phalanx.contract import worker_messages as words
from phalanx.contract.variables import MEMORY, for_cuda
from phalanx.errors import JoinError
from phalanx.train.elastic.halting import Halted, Halting
from phalanx.train.elastic.handover import Handover
from phalanx.train.elastic.made_once import Once
from phalanx.train.elastic.state_offer import StateOffer
from phalanx.train.model import shard_placement
from phalanx.train.run import Run, trainings
from phalanx.worker.agent_channel import AgentChannel
from phalanx.worker.ignored_signals import IgnoredSignals
from phalanx.worker.process_group.aborter import GroupAborter
from phalanx.worker.rendezvous.device import cuda_device, warm_up
from phalanx.worker.rendezvous.membership import Membership

Result = TypeVar("Result")
_OF_PEERS = ("gloo", "nccl", "peer", "connect", "socket", "store", "timeout", "timed out", "process group", "pipe")
_OF_OTHERS = 1.0  # seconds


class ElasticLoop:
    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._options = options
        self._excepthook = sys.excepthook
        self._training = next(trainings)
        self._severing = GroupAborter()
        self._run: Run | None = None
        self._past: StateOffer | None = None
        self._handover: Handover | None = None  # of the group that is being formed
        self._once = Once()
        self._waited = 0.0  # since a checkpoint was due
        self._unwatched = self._severing.watch_groups()
        self._halting = Halting(self._steps)
        self._stuck = False  # its turn has ended by an exception, and nobody has said yet what comes of that
        self._forming: words.Assignment | None = None  # or formed: where this process is
        self._remembers = False  # there were snapshots in memory, in the last group that it has left
        self._rescuing = threading.Lock()  # one at a time
        here = words.Hello(cuda_device(options.get("device")), for_cuda(environment()))
        self._line = AgentChannel(name, self._severing.cut, self._halting.stir, self._pulse, self._heard, here=here)
        self._ignoring = IgnoredSignals(self._line.preempt)
        self._line.listen()

    def live(self, train: Callable[[Run], Result]) -> tuple[Run, Result]:
        """Through as many generations as it takes. The run is still open when it returns or raises."""
        warm_up(self._options.get("device"), spare=self._line.is_spare)
        while True:
            world = self._line.world
            self._forming = world
            try:
                run = self._begin(world)
                result = train(run)
                run.finish()
                self._line.tell(self._pulse())  # how far it came
                self._line.tell(words.Done())
                return run, result
            except Halted as halted:
                self._line.tell(words.HaltedAt(halted.step))
                raise
            except Exception as error:
                # A rank may feel that another has died before it is told so; what the script itself has done is told
                # at once.
                self._stuck = True
                moved = self._line.has_moved(world)
                if self._halting.asked and not moved:
                    self._stand(world.generation)
                patience = world.patience if moved or self._halting.asked else _patience(error, world.patience)
                if not patience or self._line.newer(world, patience) is None or _is_broken(self._run):
                    raise
                self._stuck = False
            self._leave()
            sys.excepthook = self._excepthook  # torch puts one of its own around it for every group

    def _begin(self, world: words.Assignment) -> Run:
        self._line.tell(words.Entering(world.generation, self._holds()))
        with self._severing.watching():
            word = self._past.word if self._past is not None else ""
            run = Run.join(**self._options, world=world, word=word, met=self._met if world.generation else None)
        self._run = run
        run.seed_everything()
        self._once.enter()
        run.made = self._once
        run.generation = world.generation
        run.halts = world.halt
        run.keeping = lambda folder: self._line.tell(words.Keeping(folder))
        run.halting = self._reached
        run.measured = self._line.mention
        run.training, run.regroups = self._training, True
        run.waited = self._waited
        run.committed = lambda step: self._line.tell(words.FirstStep(world.generation, step))
        if self._line.has_moved(world):  # it was cut before there was anything to cut
            self._severing.cut()
        run.guard(lambda: self._vouch(run, world))
        if world.generation:
            self._inherit(run, world)
        return run

    def _vouch(self, run: Run, world: words.Assignment) -> None:
        """Before gradients are used, that they are what the others have sent: of an operation of NCCL that was aborted
        nobody hears, and what follows it on the device would take whatever it has left for numbers."""
        import torch

        if run.device.type == "cuda":
            torch.cuda.current_stream(run.device).synchronize()
        if self._line.has_moved(world):
            raise JoinError("the group was left in the middle of a step, which will be done again")

    def _met(self, membership: Membership) -> None:
        """While those that are new still make themselves ready, those that have the state lay it out for them."""
        self._handover = Handover(membership, self._past)
        self._past = self._handover.past
        self._handover.prepare()

    def _inherit(self, run: Run, world: words.Assignment) -> None:
        run.past, self._past = self._past, None
        handover, self._handover = self._handover, None
        assert handover is not None  # noqa: S101
        run.handover = handover

        def committed(step: int) -> None:
            self._line.tell(words.FirstStep(world.generation, step, run.before))
            handover.conclude()

        run.committed = committed

    def _leave(self) -> None:
        run, self._run = self._run, None
        if run is None:  # it never came to be
            if self._handover is not None:
                self._handover.close()
                self._handover = None
            self._destroy()
            return
        self._waited, self._remembers = run.waiting, run.remembers
        self._past = None if run.torn else run.standing()
        if self._past is None:
            self._once.forget()
        self._severing.cut()
        run.abandon(self._left, held=self._past is not None and not self._past.sharded)
        self._severing.forget()

    def _holds(self) -> bool:
        """Of sharded replicas a rank has one shard, and others may be with ranks that still have to come: these must
        not be given up early. Where there are no replicas, a lost shard comes from a snapshot anyway."""
        past = self._past
        return past is not None and not (past.sharded and shard_placement.is_replicated(past.kept))

    def _left(self) -> None:
        """Out of the old group: what may take longer from here on, as a disk does, is no reason to be replaced."""
        self._line.tell(words.Entering(self._line.generation, self._holds()))

    def _destroy(self) -> None:
        """A group that was half formed."""
        import torch.distributed as dist

        with contextlib.suppress(Exception):
            if dist.is_initialized():
                dist.destroy_process_group()
        # torch has counted it, though it never came to be: the next one would not be called as a new rank calls it.
        dist.distributed_c10d._world.group_count = 0
        self._severing.forget()

    # -- what the agent says

    def _heard(self, message: words.Halt | words.Rescue | words.EndWorker) -> None:
        if isinstance(message, words.EndWorker):
            self._ignoring.die(message.signal)
        elif isinstance(message, words.Rescue):  # which may take long, and there is more to hear
            threading.Thread(target=self._rescue, name="phalanx-rescue", daemon=True).start()
        elif message.step is not None:
            self._halting.settle(message.step)
        else:
            self._stand(self._line.generation)

    def _stand(self, generation: int) -> None:
        self._line.tell(words.HaltAck(self._halting.ask(), generation, self._stuck))

    def _rescue(self) -> None:
        if self._rescuing.acquire(blocking=False):
            try:
                self._line.tell(self._rescued())
            except Exception as error:  # whatever it is: the agent goes on as if it had not asked
                self._line.tell(words.Rescued(why=f"{type(error).__name__}: {error}"[:1000]))
            finally:
                self._rescuing.release()

    def _rescued(self) -> words.Rescued:
        """The main thread sleeps in an operation of a group that is lost. Should it wake, it commits nothing: a step
        that begins now is refused (`_reached`)."""
        from phalanx.train.snapshot.rescue import rescue, stillness
        from phalanx.worker.snapshot_memory import SnapshotMemoryClient

        still, run, memory = stillness(), self._run, environment().get(MEMORY)
        if still is None:
            return words.Rescued(why="its main thread is at work")
        if self._forming is None or not self._line.has_moved(self._forming):
            return words.Rescued(why="it is where it should be")
        if not memory or not (self._remembers or (run is not None and run.remembers)):
            return words.Rescued(why="there are no snapshots in memory")
        if run is not None and run.torn:
            return words.Rescued(why="an update has begun, and its step is not committed")
        past = self._past if run is None else run.standing(asleep=True)
        if past is None:
            return words.Rescued(why="it has nothing that could be gone on from")
        vault = SnapshotMemoryClient(memory, str(self._training))
        try:
            why = rescue(past, vault, still)
        finally:
            vault.close()
        return words.Rescued(why=why) if why else words.Rescued(past.step)

    def _elsewhere(self) -> bool:
        """The group forms anew, and this rank has not left it yet."""
        return self._run is not None and self._line.generation > self._run.generation

    def _reached(self, step: int) -> bool:
        if self._halting.reached(step, self._elsewhere):
            self._line.tell(words.HaltAck(step, self._line.generation))
            return True
        if self._elsewhere():
            raise RuntimeError("the group forms anew")
        return False

    def _steps(self) -> int:
        run = self._run
        return 0 if run is None else run.steps

    def _pulse(self) -> words.Heartbeat:
        """Called by the line's thread now and then: how far it is."""
        run = self._run
        if run is not None:
            return words.Heartbeat(run.steps, run.samples)
        if self._forming is not None and self._line.has_moved(self._forming):
            self._severing.cut()  # again: what it waits for now may not have been there the first time
        return words.Heartbeat(0)

    @property
    def run(self) -> Run | None:
        return self._run

    def close(self) -> None:
        self._unwatched()
        self._line.close()
        self._ignoring.end()


def _is_broken(run: Run | None) -> bool:
    """Whether its CUDA context is: after an illegal address, a device assert or a memory error, every call fails. Only
    another process can go on from there."""
    if run is None or run.device.type != "cuda":
        return False
    import torch

    try:
        torch.cuda.synchronize(run.device)
    except RuntimeError:
        return True
    return False


def _patience(error: Exception, whole: float) -> float:
    """Seconds to wait for word of a death that may be behind it. torch tells of a lost peer in many words, but always
    by these kinds; most other errors of these kinds are the script's own, and are not held back for long."""
    import torch
    import torch.distributed as dist

    from phalanx.collectives.errors import CallRefused, CollectiveMismatch

    if not isinstance(error, RuntimeError | OSError | JoinError) or isinstance(error, torch.OutOfMemoryError):
        return 0.0
    told = str(error).lower()
    lost = isinstance(error, OSError | JoinError | dist.DistError) or any(word in told for word in _OF_PEERS)
    lost = lost and not isinstance(error, CollectiveMismatch | CallRefused)
    return whole if lost else min(_OF_OTHERS, whole)
