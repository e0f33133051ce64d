"""A run in a browser: opened by a link, served by a child process that starts with the first request and ends with the
run.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.contract import events
from phalanx.launcher.runs.run_folder import RunRecord
from phalanx.launcher.viewers import views
from tests.e2e.places import READY, script
from tests.kit.cli import Handle, alive, descendants, free_port, phalanx, start, until
from tests.kit.proc import command

SCRIPT = script("shown.py")
LINK = re.compile(r"see http://127\.0\.0\.1:(\d+)/#([\w-]+)\n")
FOLDER = re.compile(r"output in (\S+)")


class Browser:
    def __init__(self, port: int, key: str) -> None:
        self.port = port
        self.cookie = ""
        answer, headers = self.ask("POST", "/enter", key)
        assert answer == 204
        self.cookie = headers["Set-Cookie"].partition(";")[0]

    def ask(self, method: str, path: str, body: str = "") -> tuple[int, Any]:
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(line):
            line.request(method, path, body or None, {"Cookie": self.cookie})
            answer = line.getresponse()
            content = answer.read()
            return answer.status, json.loads(content) if content else dict(answer.getheaders())

    @contextlib.contextmanager
    def live(self) -> Iterator[Iterator[tuple[str, Any]]]:
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        line.request("GET", "/live", headers={"Cookie": self.cookie})
        with contextlib.closing(line), line.getresponse() as answer:

            def messages() -> Iterator[tuple[str, Any]]:
                name = ""
                while text := answer.readline().decode():
                    word, _, rest = text.rstrip("\n").partition(": ")
                    name = rest if word == "event" else name
                    if word == "data":
                        yield name, json.loads(rest)

            yield messages()


def servers(job: Handle) -> list[int]:
    return [pid for pid in descendants(job.pid) if "--page-fd" in command(pid)]


def test_a_page_from_its_link_to_the_end_of_the_run(tmp_path: Path) -> None:
    over = tmp_path / "over"
    with start("run", "-g", "2", "--cpu", "--fresh", "--max-restarts", "1", "--page", SCRIPT, str(over)) as job:
        (link,) = job.wait_for(LINK)
        job.wait_for(READY, 2)
        folder = Path(job.wait_for(FOLDER)[0][1])
        assert (folder / "page").stat().st_mode & 0o777 == 0o600
        assert json.loads((folder / "page").read_text()) == {
            "address": f"http://127.0.0.1:{link[1]}/",
            "key": link[2],
        }
        assert servers(job) == []  # no viewer yet
        browser = Browser(int(link[1]), link[2])
        (first,) = servers(job)
        assert link[2] not in command(first) + Path(f"/proc/{first}/environ").read_text()
        assert os.getpgid(first) != os.getpgid(job.pid)
        os.kill(first, signal.SIGKILL)  # the next request starts another, which accepts the same cookie
        until(lambda: not alive(first))
        assert "ready 1" in browser.ask("GET", "/log?rank=1")[1]["text"]
        assert [line["rank"] for line in browser.ask("GET", "/search?text=READY")[1]] == [0, 1]
        assert "shown.py" in browser.ask("GET", "/why")[1]["stacks"]["1"]
        (second,) = servers(job)
        assert second != first
        with browser.live() as stream:
            name, whole = next(stream)
            assert (name, whole["head"]["run"], whole["head"]["ended"]) == ("whole", folder.name, None)
            (fork_server,) = (pid for pid in descendants(job.pid) if re.search(r"forkserver \d", command(pid)))
            os.kill(fork_server, signal.SIGKILL)  # its leftovers are removed, and the server is not one of them
            job.wait_for(READY, 4)
            over.touch()
            rest = list(stream)
        assert [name for name, _ in rest][-2:] == ["update", "end"]
        assert rest[-2][1]["head"]["state"] == "done"
        assert job.wait() == 0
        assert not alive(second)
    assert not (folder / "page").exists()
    assert not (folder / "page.log").exists() or not (folder / "page.log").read_text()
    assert link[2] not in (folder / "events.jsonl").read_text()
    with start("watch", "--page", folder.name) as watching:  # once more, from the files
        (link,) = watching.wait_for(re.compile(LINK.pattern.removeprefix("see ")))
        with Browser(int(link[1]), link[2]).live() as stream:
            assert next(stream)[1]["head"]["code"] == 0
        watching.signal(signal.SIGINT)
        assert watching.wait() == 0


def test_nothing_is_left_of_a_agent_that_is_killed(tmp_path: Path) -> None:
    with start("run", "-g", "1", "--cpu", "--fresh", "--page", SCRIPT, str(tmp_path / "never")) as job:
        (link,) = job.wait_for(LINK)
        (rank,) = job.wait_for(READY)
        browser = Browser(int(link[1]), link[2])
        (server,) = servers(job)
        with browser.live() as stream:
            next(stream)
            os.kill(job.pid, signal.SIGKILL)
            job.wait()
            until(lambda: not alive(server) and not alive(int(rank[2])))
            with contextlib.suppress(ConnectionError, http.client.IncompleteRead):
                assert "end" not in [name for name, _ in stream]  # it did not end: its end is unknown
    socket.create_server(("127.0.0.1", int(link[1]))).close()  # no process listens there any more


def test_a_page_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = phalanx("run", "--cpu", "--fresh", "--page-at", f"127.0.0.1:{port}", SCRIPT, str(tmp_path / "never"))
        assert result.code == 2
        assert f"the page cannot listen on 127.0.0.1 port {port}: the port is in use" in result.err
        assert "--page-at 127.0.0.1 takes the next free port" in result.err
    result = phalanx("run", "--page-at", "here:there", SCRIPT)
    assert (result.code, '--page-at is "here:there": "there" is not a port' in result.err) == (2, True)
    result = phalanx("run", "--cpu", "--fresh", "--page", SCRIPT, str(tmp_path), env={"PHALANX_PAGE_KEY": "1234"})
    assert (result.code, "PHALANX_PAGE_KEY is not a valid key" in result.err) == (2, True)
    result = phalanx("watch", "--page", "nobody")
    assert (result.code, "no run called nobody is known here" in result.err) == (2, True)


def test_from_another_node(tmp_path: Path) -> None:
    over, port = tmp_path / "over", free_port()
    same = ("-n", "2", "-g", "1", "--master", f"127.0.0.1:{port}", "--no-auth", "--cpu", "--fresh", "--page")
    with (
        start("run", *same, "-i", "0", SCRIPT, str(over)) as leader,
        start("run", *same, "-i", "1", SCRIPT, str(over)) as node,
    ):
        folder = Path(node.wait_for(FOLDER)[0][1])
        node.wait_for(READY)
        leader.wait_for(LINK)
        leader.wait_for(READY, 2)  # what it is asked for below has been written
        assert "#" not in node.err  # one page, at the leader
        record = RunRecord(**json.loads((folder / "run.json").read_text()))
        assert record.pid == node.pid

        async def look() -> list[events.AnyEvent]:
            source, found = views.of(record), []
            async for event in source.events():
                found.append(event)
                if isinstance(event, events.WorkerStarted):
                    for rank in (0, 1):  # each says it in its own time
                        while f"ready {rank}" not in (await source.log(rank, "stdout")).text:
                            await asyncio.sleep(0.02)
                    over.touch()
            return found

        received = asyncio.run(asyncio.wait_for(look(), 60))
        assert isinstance(received[0], events.RunStarted)
        assert received[0].pid == leader.pid
        assert isinstance(received[-1], events.RunEnded)
        assert (leader.wait(), node.wait()) == (0, 0)
