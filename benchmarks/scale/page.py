"""Reads the page of a run like a browser, and measures how old events are when they arrive."""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
import time

from benchmarks.common.processes import ProcessLostError

TIMEOUT = 120.0
_ENTRY = re.compile(rb'\{"time":([0-9.]+),"kind":"([^"]*)","text":"((?:[^"\\]|\\.)*)"')


class PageReader:
    """A browser that shows the run. `latency`: seconds from an event to its arrival, by kind of event."""

    def __init__(self, address: str, key: str) -> None:
        self.latency: dict[str, list[float]] = {}
        self.size = 0  # bytes received
        self.failure = ""
        self._began = time.time()
        self._reader = http.client.HTTPConnection(address, timeout=TIMEOUT)
        self._reader.request("POST", "/enter", body=key, headers={"Origin": f"http://{address}"})
        answer = self._reader.getresponse()
        answer.read()
        if answer.status >= 300:
            raise ProcessLostError(f"the page refuses the key: {answer.status} {answer.reason}")
        cookie = (answer.headers.get("Set-Cookie") or "").partition(";")[0]
        self._reader.request("GET", "/live", headers={"Cookie": cookie})
        self._stream = self._reader.getresponse()
        self._thread = threading.Thread(target=self._read, name="page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave the page."""
        with contextlib.suppress(OSError, AttributeError):
            self._reader.sock.shutdown(2)
        self._thread.join(TIMEOUT)
        self._reader.close()

    def _read(self) -> None:
        try:
            for line in self._stream:
                self.size += len(line)
                if line.startswith(b"data: "):
                    self._take(line, time.time())
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.failure = self.failure or f"{type(error).__name__}: {error}"

    def _take(self, line: bytes, now: float) -> None:
        begin = line.rfind(b'"events":[')
        for when, kind, _ in _ENTRY.findall(line, begin) if begin >= 0 else ():
            if float(when) > self._began:
                self.latency.setdefault(kind.decode(), []).append(now - float(when))
