"""A real Chromium without a window, by its DevTools protocol over a pipe: for tests, measurements and pictures.

async with browser.started() as chromium:
    page = await chromium.page("http://127.0.0.1:29580/#KEY")
    await page.wait_for("document.querySelectorAll('.rank').length == 4")
    await page.press("j")
    await page.screenshot("page.png")

It ends when the block does; and by itself when this process is no more, because the pipe has ended then.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from typing import Any

from phalanx.cluster.sources.surroundings import environment
from phalanx.errors import LaunchError

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-crash-reporter",
    "--disable-dev-shm-usage",  # its shared memory lies in the temporary folder, and goes with it
    "--disable-extensions",
    "--disable-features=Translate,MediaRouter,OptimizationHints",
    "--disable-sync",
    "--hide-scrollbars",
    "--mute-audio",
    "--password-store=basic",
)
# Chromium reads commands from descriptor 3 and answers on 4; these numbers may be taken while Python starts it.
_EXEC = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for number, end in zip((3, 4), ends):
    os.dup2(end, number)
    os.close(end)
os.execv(sys.argv[3], sys.argv[3:])
"""
_MOST = 1 << 28  # bytes of one answer: a picture of a long page
_DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 100))))"
# What a key press needs beside its name, so that it does what it does by hand.
_CODES = {
    "Enter": 13,
    "Escape": 27,
    "Tab": 9,
    "Backspace": 8,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "PageUp": 33,
    "PageDown": 34,
    "End": 35,
    "Home": 36,
}


class BrowserError(LaunchError):
    """The browser says no, or a page does not become what was waited for."""


def found() -> str:
    """The browser of this machine."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    raise BrowserError(
        "there is no Chromium here", details=[f"looked for: {', '.join(NAMES)}"], fix="apt-get install chromium"
    )


@contextlib.asynccontextmanager
async def started(*options: str) -> AsyncIterator[Browser]:
    """A browser with a profile of its own, both gone afterwards."""
    path = found()
    words = [*OPTIONS, *options, *(("--no-sandbox",) if os.geteuid() == 0 else ())]
    with tempfile.TemporaryDirectory(prefix="phalanx-browser-", ignore_cleanup_errors=True) as folder:
        env = {**environment(), "HOME": folder, "TMPDIR": folder, "XDG_RUNTIME_DIR": folder}
        commands, ours = os.pipe()
        answers, theirs = os.pipe()
        with open(os.path.join(folder, "output"), "wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-S", "-c", _EXEC, str(commands), str(theirs)),
                *(path, f"--user-data-dir={folder}/profile", *words, "about:blank"),
                pass_fds=(commands, theirs),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,
            )
        os.close(commands)
        os.close(theirs)
        chromium = Browser(process, ours, answers)
        try:
            await chromium._open(os.path.join(folder, "output"))
            yield chromium
        finally:
            await chromium._end()


class Browser:
    def __init__(self, process: asyncio.subprocess.Process, commands: int, answers: int) -> None:
        self.pid = process.pid
        self._process = process
        self._pages: dict[str, Page] = {}  # by session
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self._reader: asyncio.Task[None] | None = None
        self._transport: asyncio.BaseTransport | None = None

    async def page(self, url: str = "about:blank", *, width: int = 1280, height: int = 800) -> Page:
        """A new page of that size, which has loaded; it shares its cookies with no other."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = await self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"], context)
        for domain in ("Page", "Runtime", "Log"):
            await page.call(f"{domain}.enable")
        await page.size(width, height)
        if url != "about:blank":
            await page.goto(url)
        return page

    async def call(self, method: str, *, session: str = "", limit: float = 60.0, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._commands.write(json.dumps(message).encode() + b"\0")
            told = await asyncio.wait_for(answer, limit)
        except (TimeoutError, BrokenPipeError):
            raise BrowserError(f"Chromium does not answer to {method}", details=[f"waited {limit:.0f} s"]) from None
        finally:
            self._waiting.pop(number, None)
        if "error" in told:
            raise BrowserError(f"Chromium refuses {method}: {told['error'].get('message')}")
        result: dict[str, Any] = told["result"]
        return result

    async def _open(self, output: str) -> None:
        stream = asyncio.StreamReader(limit=_MOST)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), self._answers)
        self._reader = asyncio.create_task(self._read(stream))
        try:
            await self.call("Browser.getVersion")
        except BrowserError:
            with open(output, errors="replace") as file:
                said = file.read().splitlines()[-5:]
            raise BrowserError("Chromium does not start", details=said) from None

    async def _read(self, stream: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                message = json.loads((await stream.readuntil(b"\0"))[:-1])
                answer = self._waiting.get(message.get("id", -1))
                if answer is not None and not answer.done():
                    answer.set_result(message)
                elif page := self._pages.get(message.get("sessionId", "")):
                    page._hear(message.get("method", ""), message.get("params", {}))
        gone: dict[str, Any] = {"error": {"message": "it has ended"}}
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(gone)

    async def _end(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(BrowserError):
                await self.call("Browser.close", limit=5.0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), 5.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what is left of its family; its group is its own
        await self._process.wait()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._transport is not None:
            self._transport.close()
        self._answers.close()
        self._commands.close()


class Page:
    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self.errors: list[str] = []  # exceptions, and what the console was told as an error
        self._browser = browser
        self._session = session
        self._context = context
        self._loaded = asyncio.Event()
        self._features: dict[str, str] = {}
        self._size = (1280, 800, False, 1.0)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.call(method, session=self._session, **params)

    async def goto(self, url: str, *, limit: float = 60.0) -> None:
        self._loaded.clear()
        told = await self.call("Page.navigate", url=url)
        if told.get("errorText"):
            raise BrowserError(f"{url}: {told['errorText']}")
        if "loaderId" in told:  # not only another fragment
            await asyncio.wait_for(self._loaded.wait(), limit)

    async def reload(self, *, limit: float = 60.0) -> None:
        self._loaded.clear()
        await self.call("Page.reload")
        await asyncio.wait_for(self._loaded.wait(), limit)

    async def evaluate(self, expression: str) -> Any:
        """What it is, as JSON; of a promise, what that becomes."""
        told = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if wrong := told.get("exceptionDetails"):
            raise BrowserError(f"{expression}: {_exception(wrong)}")
        return told["result"].get("value")

    async def wait_for(self, expression: str, *, limit: float = 60.0) -> Any:
        """Until it is true: what it is then, and of an element true."""
        end = time.monotonic() + limit
        asked = f"Promise.resolve({expression}).then(found => [Boolean(found), found instanceof Node || found])"
        wrong = ""
        while time.monotonic() < end:
            try:
                true, value = await self.evaluate(asked)
                if true:
                    return value
            except BrowserError as error:  # the page is just loading another, or what is asked for is not there yet
                wrong = str(error)
            await asyncio.sleep(0.02)
        text = await self.evaluate("document.body ? document.body.innerText : ''")
        raise BrowserError(
            f"the page has not become what was waited for in {limit:.0f} s: {expression}",
            details=[*filter(None, [wrong]), *self.errors[-5:], *str(text).splitlines()[:40]],
        )

    async def press(self, key: str) -> None:
        """A letter, or a name such as ArrowDown."""
        code = _CODES.get(key, ord(key.upper()) if len(key) == 1 and key.isalnum() else 0)
        text = "\r" if key == "Enter" else key if len(key) == 1 else ""
        for kind in ("keyDown", "keyUp"):
            told = {"text": text} if text and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **told)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def move(self, x: float, y: float) -> None:
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def click(self, selector: str) -> None:
        """In the middle of it."""
        where = f"""(() => {{ const it = document.querySelector({json.dumps(selector)});
            it.scrollIntoView({{block: 'center', behavior: 'instant'}});
            const box = it.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; }})()"""
        x, y = await self.evaluate(where)
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def wheel(self, x: float, y: float, by: float) -> None:
        await self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by)

    async def size(self, width: int, height: int, *, mobile: bool = False, scale: float = 1.0) -> None:
        self._size = (width, height, mobile, scale)
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )
        await self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)

    async def prefer(self, **features: str) -> None:
        """prefer(color_scheme="dark", reduced_motion="reduce")"""
        self._features |= {f"prefers-{name.replace('_', '-')}": value for name, value in features.items()}
        told = [{"name": name, "value": value} for name, value in self._features.items()]
        await self.call("Emulation.setEmulatedMedia", features=told)

    async def screenshot(self, path: str, *, whole: bool = False) -> None:
        """What is to be seen, or the whole page, as PNG."""
        width, height, mobile, scale = self._size
        if whole:  # in a window that is so high: what nobody sees need not have been drawn
            content = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
            await self.size(width, int(content["height"]), mobile=mobile, scale=scale)
            await self.evaluate(_DRAWN)
        told = await self.call("Page.captureScreenshot", format="png")
        if whole:
            await self.size(width, height, mobile=mobile, scale=scale)
        with open(path, "wb") as file:
            file.write(base64.b64decode(told["data"]))

    async def close(self) -> None:
        self._browser._pages.pop(self._session, None)
        await self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    def _hear(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Runtime.exceptionThrown":
                self.errors.append(_exception(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"].get("level") == "error":
                self.errors.append(f"{params['entry'].get('text')} {params['entry'].get('url', '')}")
            case "Runtime.consoleAPICalled" if params.get("type") == "error":
                self.errors.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in params["args"]))


def _exception(details: dict[str, Any]) -> str:
    told = details.get("exception", {})
    return str(told.get("description") or told.get("value") or details.get("text"))
