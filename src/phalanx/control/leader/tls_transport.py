"""The leader's end of a TLS connection, as an asyncio transport.

asyncio's own TLS transport has a read buffer of 256 KiB and two memory BIOs per connection: a GiB for 4,096 members.
Here OpenSSL reads and writes the socket itself, and keeps buffers only while a record is incomplete.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Callable

_RECORD = 1 << 14  # bytes: a TLS record has no more
_HIGH_WATER = 1 << 16  # unsent bytes at which the protocol is asked to pause, as asyncio does
_LOW_WATER = 1 << 14

_NOT_NOW = (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError, InterruptedError)


async def accept(
    connection: socket.socket,
    context: ssl.SSLContext,
    protocol: Callable[[], asyncio.Protocol],
    *,
    timeout: float,
    close_timeout: float,
) -> TlsTransport:
    """Do the TLS handshake of a server, at most `timeout` seconds, and connect the protocol. Closes on any error.

    Raises OSError: also ssl.SSLError and TimeoutError. `close_timeout`: seconds for the peer to end TLS.
    """
    try:
        sock = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
    except BaseException:
        connection.close()
        raise
    try:
        async with asyncio.timeout(timeout):
            await _handshake(sock)
        return TlsTransport(sock, protocol(), close_timeout=close_timeout)
    except BaseException:
        sock.close()
        raise


async def _handshake(sock: ssl.SSLSocket) -> None:
    while True:
        try:
            sock.do_handshake()
            return
        except ssl.SSLWantReadError:
            await _ready(sock, write=False)
        except ssl.SSLWantWriteError:
            await _ready(sock, write=True)


async def _ready(sock: socket.socket, *, write: bool) -> None:
    """Wait until a socket can be read or written."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    (loop.add_writer if write else loop.add_reader)(sock, ready.set)
    try:
        await ready.wait()
    finally:
        (loop.remove_writer if write else loop.remove_reader)(sock)


class TlsTransport(asyncio.Transport):
    """Passes what arrives to a protocol, and sends what it writes. The handshake is done."""

    def __init__(self, sock: ssl.SSLSocket, protocol: asyncio.Protocol, *, close_timeout: float) -> None:
        info = {"socket": sock, "ssl_object": sock, "peername": sock.getpeername(), "sockname": sock.getsockname()}
        super().__init__(info)
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._protocol = protocol
        self._close_timeout = close_timeout
        self._unsent: deque[bytes] = deque()
        self._size = 0  # bytes of that
        self._protocol_paused = False
        self._reading = False
        self._closing = False  # nothing more is written or passed to the protocol
        self._closed = False
        self._deadline: asyncio.TimerHandle | None = None  # for the peer to end TLS
        protocol.connection_made(self)
        self.resume_reading()

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol."""
        return self._protocol

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or about to be."""
        return self._closing

    # -- reading

    def is_reading(self) -> bool:
        """Return whether the protocol gets what arrives."""
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        """Pass nothing to the protocol until `resume_reading`."""
        if self.is_reading():
            self._reading = False
            self._loop.remove_reader(self._sock)

    def resume_reading(self) -> None:
        """Pass to the protocol what arrives."""
        if not self._reading and not self._closing:
            self._reading = True
            self._loop.add_reader(self._sock, self._read)
            if self._sock.pending():  # the socket does not become readable for what OpenSSL has read already
                self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Pass one record to the protocol, and what else OpenSSL has read."""
        while self.is_reading():
            try:
                data = self._sock.recv(_RECORD)
            except _NOT_NOW:
                return
            except OSError as error:
                self._close(error)
                return
            if not data:
                self._protocol.eof_received()
                self._close(None)
                return
            try:
                self._protocol.data_received(data)
            except Exception as error:  # as asyncio's transports do: it is logged, and the connection is lost
                self._loop.call_exception_handler({"message": "data_received failed", "exception": error})
                self._close(error)
                return
            if self._closed or not self._sock.pending():
                return

    # -- writing

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that wait to be sent."""
        return self._size

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send data, at once if possible."""
        if self._closing or not data:
            return
        self._unsent.append(bytes(data))
        self._size += len(data)
        if len(self._unsent) == 1:
            self._write()
        if self._size > _HIGH_WATER and not self._protocol_paused:
            self._protocol_paused = True
            self._protocol.pause_writing()

    def _write(self) -> None:
        """Send what is possible. OpenSSL requires that a failed call is repeated with the same data."""
        try:
            while self._unsent:
                sent = self._sock.send(self._unsent[0])
                self._size -= sent
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                else:
                    self._unsent.popleft()
        except _NOT_NOW:
            self._loop.add_writer(self._sock, self._write)
            return
        except OSError as error:
            self._close(error)
            return
        finally:
            self._resume_protocol()
        if not self._closed:
            self._loop.remove_writer(self._sock)
            if self._closing:
                self._end_tls()

    def _resume_protocol(self) -> None:
        if self._protocol_paused and self._size <= _LOW_WATER and not self._closed:
            self._protocol_paused = False
            self._protocol.resume_writing()

    def can_write_eof(self) -> bool:
        """TLS cannot close one direction only."""
        return False

    # -- the end

    def close(self) -> None:
        """Send what is queued, end TLS, and close the connection."""
        if self._closing:
            return
        self._closing = True
        self._deadline = self._loop.call_later(self._close_timeout, self.abort)
        self._loop.remove_reader(self._sock)
        if not self._unsent:
            self._end_tls()

    def abort(self) -> None:
        """Close the connection at once."""
        self._close(None)

    def _end_tls(self) -> None:
        """Tell the peer that nothing follows, and wait until it has closed: an earlier close could drop sent data."""
        try:
            self._sock.unwrap()
        except _NOT_NOW:
            self._loop.add_reader(self._sock, self._drain)
        except (OSError, ValueError):
            self._close(None)
        else:
            self._close(None)

    def _drain(self) -> None:
        """Drop what the peer sends until it closes."""
        try:
            while self._sock.recv(_RECORD):
                pass
        except _NOT_NOW:
            return
        except OSError:
            pass
        self._close(None)

    def _close(self, error: Exception | None) -> None:
        if self._closed:
            return
        self._closing = self._closed = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._unsent.clear()
        self._size = 0
        with contextlib.suppress(OSError):
            self._sock.close()
        self._loop.call_soon(self._protocol.connection_lost, error)

    def __repr__(self) -> str:
        return f"<TlsTransport fd={self._sock.fileno()}{' closing' if self._closing else ''}>"
