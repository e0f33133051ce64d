"""One simulated node: a member's connection to the leader, without workers."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections import deque

import msgspec

from benchmarks.scale import frames
from benchmarks.scale.frames import Telemetry
from phalanx.control import messages
from phalanx.launcher.telemetry import node_sampler

_READ = 1 << 16
_TIMINGS_EVERY = 5  # seconds, as a real node


class LostError(Exception):
    """The leader has rejected or dropped a node."""


class SimulatedNode:
    """A member: joins, receives assignments, sends telemetry, answers pings and requests for evidence."""

    def __init__(self, info: messages.NodeInfo, context: ssl.SSLContext, where: tuple[str, int]) -> None:
        self.member = -1  # until it has joined
        self.generation = -1  # of the newest assignment; -1: there is none
        self.assigned = 0.0  # when that came, by the monotonic clock
        self.ended = False  # the leader has ended the run
        self._slow: frozenset[int] = frozenset()  # ranks that the others wait for while the run is stalled
        self._info = info
        self._telemetry: Telemetry | None = None
        self._place: messages.StartRanks | None = None
        self._attempt = 0
        self._sent = -1  # the latest period whose telemetry was sent
        self._received = 0  # messages of the leader
        self._upgraded = False
        self._input = bytearray()
        self._output: deque[bytes] = deque()
        plain = socket.socket()
        plain.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            plain.connect(where)
        self.sock = context.wrap_socket(plain, do_handshake_on_connect=False)
        self._shaken = False

    def fileno(self) -> int:
        """Return the descriptor to select on."""
        return self.sock.fileno()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks of this node."""
        return tuple(place.rank for place in self._place.placements) if self._place is not None else ()

    @property
    def writing(self) -> bool:
        """Return whether something waits to be sent, or the connection is not open yet."""
        return bool(self._output) or not self._shaken

    # -- the connection

    def ready(self, step: int) -> None:
        """Read and write as far as possible. `step`: the current step of all ranks. Raises LostError."""
        try:
            if not self._shaken and not self._shake():
                return
            self._flush()
            self._read(step)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            pass
        except OSError as error:
            raise LostError(f"node {self.member}: {error}") from error

    def _shake(self) -> bool:
        self.sock.do_handshake()
        self._shaken = True
        self._output.append(frames.UPGRADE)
        return True

    def send(self, frame: bytes) -> None:
        """Send a frame, at once if possible. Raises LostError."""
        self._output.append(frame)
        if self._shaken:
            try:
                self._flush()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                pass
            except OSError as error:
                raise LostError(f"node {self.member}: {error}") from error

    def _flush(self) -> None:
        while self._output:
            sent = self.sock.send(self._output[0])
            if sent < len(self._output[0]):
                self._output[0] = self._output[0][sent:]
            else:
                self._output.popleft()

    def _read(self, step: int) -> None:
        while True:
            data = self.sock.recv(_READ)
            if not data:
                raise LostError(f"node {self.member}: the leader has closed the connection")
            self._input += data
            if not self._upgraded:
                self._upgrade()
            if self._upgraded:
                for content in frames.parse(self._input):
                    self._take(content, step)

    def _upgrade(self) -> None:
        head, end, rest = bytes(self._input).partition(b"\r\n\r\n")
        if not end:
            return
        if not head.startswith(b"HTTP/1.1 101"):
            raise LostError(f"the leader answered {head[:80]!r}")
        self._input, self._upgraded = bytearray(rest), True
        join = messages.JoinRequest(protocol=messages.PROTOCOL, info=messages.encode(self._info))
        self.send(frames.frame(join))

    def close(self) -> None:
        """Simulate a death: close the connection without a message."""
        self.sock.close()

    # -- messages

    def _take(self, content: bytes, step: int) -> None:
        if self.member < 0:
            answer = messages.answer.decode(content)
            if not isinstance(answer, messages.Welcome):
                raise LostError(f"the leader answered {answer}")
            self.member = answer.member
            return
        self._received += 1
        try:
            message = messages.from_leader.decode(content)
        except msgspec.MsgspecError as error:
            raise LostError(f"node {self.member}: {error}") from error
        match message:
            case messages.Ping():
                pong = messages.Pong(ping=message.time, time=time.time(), received=self._received)
                self.send(frames.frame(pong))
            case messages.Start() | messages.Regroup():
                self._assigned(message, step)
            case messages.RpcFrame(kind="evidence") if self._place is not None:
                reply = self._prepared(self._place).evidence(step)
                self.send(frames.frame(messages.RpcFrame(kind="reply", number=message.number, content=reply)))
            case messages.Stop():
                self.ended = True
                self.send(frames.frame(messages.AttemptEnded(attempt=self._attempt)))
            case messages.EndMessage():
                self.ended = True
                self.send(frames.frame(messages.Leaving()))

    def _assigned(self, message: messages.Start | messages.Regroup, step: int) -> None:
        self._attempt = message.attempt
        self._place, self.generation, self.assigned = message.place, message.generation, time.monotonic()
        self._telemetry = None  # created when needed: all nodes get their assignment at once
        if isinstance(message, messages.Start):
            self.send(frames.frame(messages.RegroupReady(connected=True, all_connected=True)))
        else:
            first = messages.FirstStepCommitted(generation=message.generation, step=step, before=step)
            self.send(frames.frame(first))

    def stall(self, slow: frozenset[int]) -> None:
        """Blame these ranks for the next stall."""
        self._slow, self._telemetry = slow, None

    def report(self, now: float, step: int, *, stalled: bool) -> float:
        """Send telemetry, if it is the turn of this node. Return how late that is, in seconds."""
        if self._place is None:
            return 0.0
        place = self._place.placements[0]
        period = node_sampler.period(place.node_count)
        late = now % period - node_sampler.turn(place.node_rank, place.node_count)
        number = int(now // period)
        if number == self._sent or late < 0:
            return 0.0
        first, self._sent = self._sent < 0, number
        second = number * period
        timings = second // period % -(-_TIMINGS_EVERY // period) == 0
        tick = second // period * period * node_sampler.TENTHS
        self.send(self._prepared(self._place).message(tick, step, stalled=stalled, timings=timings))
        return 0.0 if first else late

    def _prepared(self, place: messages.StartRanks) -> Telemetry:
        if self._telemetry is None:
            period = node_sampler.period(place.placements[0].node_count)
            self._telemetry = Telemetry(place.placements, self._info.host, self._slow, period)
        return self._telemetry

    def log(self, number: int) -> None:
        """Send a line of output of one of the ranks."""
        ranks = self.ranks
        if ranks:
            self.send(frames.log_line(ranks[number % len(ranks)]))
