"""Messages and requests between the leader and the other nodes, besides the messages of the run itself."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field

from phalanx.control import messages
from phalanx.control.outbox import LimitExceededError
from phalanx.launcher.ipc.node_links import NodeLinks
from phalanx.launcher.ipc.pending_replies import PendingReplies

logger = logging.getLogger(__name__)

_REPLY = "reply"  # the kind of all replies; they have the number of the request

# A node has at most ASKED open requests to another one, and gives up after some seconds. The other node answers within
# ANSWER_TIMEOUT seconds. So a node that follows this never has more than MOST_QUESTIONS open.
ASKED = 8
MOST_QUESTIONS = 64
QUESTION_BYTES = 1 << 20  # of all open requests of a node
ANSWER_TIMEOUT = 60.0
_ANSWERING = 8  # requests of a node that are answered concurrently
_BACKLOG = 1 << 23  # bytes that a node has not received yet, above which replies to it wait
_BACKLOG_CHECK = 0.05  # seconds between two checks of the backlog

Handler = Callable[[int | None, int, bytes], None]  # sender (None: this node or the leader), number, content
RequestHandler = Callable[[int | None, bytes], Awaitable[bytes | None]]  # sender, content -> reply; None: no reply


class NodeRpc:
    """Sends messages and requests to other nodes, in frames of limited size, and dispatches those that arrive."""

    def __init__(self, links: NodeLinks) -> None:
        self._links = links
        self._handlers: dict[str, Handler] = {_REPLY: self._reply_received}
        self._replies: PendingReplies[bytes] = PendingReplies()
        self._questions: dict[int | None, _OpenQuestions] = defaultdict(_OpenQuestions)  # by sender
        self._asking: dict[int | None, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(ASKED))
        self._closed = False
        self._partial: dict[int | None, _PartialMessage] = {}  # by sender: its frames arrive in order

    def on(self, kind: str, handler: Handler) -> None:
        """Call `handler` for messages of this kind."""
        self._handlers[kind] = handler

    def serve(self, kind: str, handler: RequestHandler) -> None:
        """Answer requests of this kind with the result of `handler`."""

        def start(sender: int | None, number: int, content: bytes) -> None:
            if not self._closed:
                questions = self._questions[sender]
                if sender is not None or not self._links.leads:  # otherwise this node asks itself
                    questions.check(content)
                questions.add(self._answer(handler, kind, sender, number, content), len(content))

        self._handlers[kind] = start

    def close(self) -> None:
        """Stop answering requests."""
        self._closed = True
        for questions in self._questions.values():
            questions.cancel()

    def send(self, kind: str, number: int, content: bytes, to: int | None = None) -> None:
        """Send a message to a member or, if `to` is None, to the leader, which may be this node."""
        if to is None and self._links.leads:
            self._dispatch(None, kind, number, content)
            return
        size = messages.RPC_FRAME_LIMIT
        parts = [content[at : at + size] for at in range(0, len(content), size)] or [b""]
        for index, part in enumerate(parts):
            frame = messages.RpcFrame(kind=kind, number=number, content=part, more=index + 1 < len(parts))
            self._links.send_rpc(frame, to)

    async def request(self, kind: str, content: bytes = b"", *, timeout: float, to: int | None = None) -> bytes:
        """Send a request to a member or, if `to` is None, to the leader; return the reply. Raises TimeoutError."""
        async with asyncio.timeout(timeout), self._asking[to]:
            return await self._replies.request(
                lambda number: self.send(kind, number, content, to=to), timeout=None, peer=to
            )

    def receive(self, sender: int | None, frame: messages.RpcFrame) -> None:
        """Handle a frame. Each sender can have one unfinished message; one that is too long is dropped.

        Raises LimitExceededError if the sender has too many open requests.
        """
        partial = self._partial.pop(sender, None)
        if partial is None or partial.key != (frame.kind, frame.number):
            partial = _PartialMessage((frame.kind, frame.number))
        partial.add(frame.content)
        if frame.more:
            self._partial[sender] = partial
        elif not partial.too_long:
            self._dispatch(sender, frame.kind, frame.number, bytes(partial.content))

    def _dispatch(self, sender: int | None, kind: str, number: int, content: bytes) -> None:
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(sender, number, content)

    async def _answer(
        self, handler: RequestHandler, kind: str, sender: int | None, number: int, content: bytes
    ) -> None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT), self._questions[sender].answering:
                reply = await handler(sender, content)
                while reply is not None and self._links.backlog(sender) > _BACKLOG:
                    await asyncio.sleep(_BACKLOG_CHECK)
        except Exception:  # the other node gets no reply, and reports that
            logger.warning("cannot answer the request %r of %s", kind, _name(sender), exc_info=True)
            return
        if reply is not None:
            self.send(_REPLY, number, reply, to=sender)

    def _reply_received(self, sender: int | None, number: int, content: bytes) -> None:
        self._replies.resolve(number, content, peer=sender)


def _name(sender: int | None) -> str:
    return "the leader" if sender is None else f"node {sender}"


class _OpenQuestions:
    """The requests of one node that are not answered yet."""

    def __init__(self) -> None:
        self.answering = asyncio.Semaphore(_ANSWERING)
        self._tasks: set[asyncio.Task[None]] = set()
        self._size = 0

    def check(self, content: bytes) -> None:
        """Raise LimitExceededError if the limit of open requests is reached."""
        if len(self._tasks) >= MOST_QUESTIONS:
            raise LimitExceededError(f"it has {MOST_QUESTIONS} open questions, and asks another one")
        if self._size + len(content) > QUESTION_BYTES:
            raise LimitExceededError(f"its open questions have more than {QUESTION_BYTES >> 20} MiB")

    def add(self, answer: Coroutine[None, None, None], size: int) -> None:
        """Answer a request of `size` bytes."""
        task = asyncio.get_running_loop().create_task(answer)
        self._tasks.add(task)
        self._size += size

        def done(_: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._size -= size

        task.add_done_callback(done)

    def cancel(self) -> None:
        """Stop answering."""
        for task in self._tasks:
            task.cancel()


@dataclass
class _PartialMessage:
    """A message of which more frames follow."""

    key: tuple[str, int]  # kind and number
    content: bytearray = field(default_factory=bytearray)
    too_long: bool = False

    def add(self, part: bytes) -> None:
        self.too_long = self.too_long or len(self.content) + len(part) > messages.RPC_LIMIT
        if self.too_long:
            self.content.clear()
        else:
            self.content += part
