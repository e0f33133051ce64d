"""The page's server: access control, and what is shown."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import resource
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from phalanx.errors import OptionError, PortError, UsageError
from phalanx.watch.page import address, keys
from phalanx.watch.page.address import PageAddress
from phalanx.watch.page.keys import PageKeys
from tests.kit.cli import start

pytestmark = pytest.mark.xdist_group("page")  # they share a server
SCRIPT = str(Path(__file__).parents[1] / "scripts" / "page.py")
KEY = "0123456789abcdef" * 4
SECRETS = ("simulated", "train", "rank", "loss", "gpu", "node0", KEY)


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    headers: Mapping[str, str]


@dataclass
class Served:
    port: int
    cookie: str = ""
    name: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    def ask(self, path: str, method: str = "GET", body: str | None = None, **headers: str) -> Answer:
        """Send a request with exactly these headers (an underscore for a dash), and none that a browser would add."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            line.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            sent_headers = {"Host": f"127.0.0.1:{self.port}"}
            sent_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
            if body is not None:
                sent_headers["Content-Length"] = str(len(body))
            for name, value in sent_headers.items():
                line.putheader(name, value)
            line.endheaders(body.encode() if body is not None else None)
            answer = line.getresponse()
            return Answer(answer.status, answer.read().decode(errors="replace"), dict(answer.getheaders()))
        finally:
            line.close()

    @contextlib.contextmanager
    def live(self) -> Iterator[Iterator[tuple[str, dict[str, object]]]]:
        """Yield the events of the stream, like a browser."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        line.request("GET", "/live", headers={"Cookie": self.cookie})
        with contextlib.closing(line), line.getresponse() as answer:
            assert answer.status == 200
            assert answer.getheader("Content-Type") == "text/event-stream"

            def messages() -> Iterator[tuple[str, dict[str, object]]]:
                name = ""
                while line := answer.readline():
                    word, _, rest = line.decode().rstrip("\n").partition(": ")
                    if word == "event":
                        name = rest
                    elif word == "data":
                        yield name, json.loads(rest)

            yield messages()


@pytest.fixture(scope="module")
def page() -> Iterator[Served]:
    with start(words=(sys.executable, SCRIPT, "0", KEY)) as job:
        (found,) = job.wait_for(re.compile(r"http://127\.0\.0\.1:(\d+)/#(\w+)"))
        assert found[2] == KEY
        served = Served(int(found[1]))
        entered = served.ask("/enter", "POST", KEY, Origin=f"http://127.0.0.1:{served.port}")
        assert entered.status == 204
        served.cookie, *rest = entered.headers["Set-Cookie"].split("; ")
        served.name = served.cookie.partition("=")[0]
        folder = entered.headers["Content-Location"]
        assert sorted(rest) == ["HttpOnly", f"Path=/{folder}", "SameSite=Strict"]
        assert served.ask(f"/{folder}why", Cookie=served.cookie).status == 200
        assert served.ask(f"/{folder}why").status == 401  # knowing the path is not enough
        assert KEY not in folder
        assert str(served.port) in served.name
        assert KEY not in served.cookie
        yield served


DATA = ("/live", "/log?rank=0", "/search?text=a", "/why", "/metrics")


def test_a_client_with_the_cookie_sees_everything(page: Served) -> None:
    assert json.loads(page.ask("/log?rank=1&stream=stderr&start=5&size=7", Cookie=page.cookie).text) == {
        "start": 5,
        "end": 7,
        "text": "stderr of rank 1",
    }
    found = json.loads(page.ask("/search?text=a+b&ranks=0,2", Cookie=page.cookie).text)
    assert [(line["rank"], line["line"]) for line in found] == [(0, "a b"), (2, "a b")]
    because = page.ask("/why", Cookie=page.cookie, Sec_Fetch_Site="same-origin")
    assert json.loads(because.text) == {"report": "nothing is wrong", "verdicts": [], "stacks": {"0": "train.py"}}
    assert "phalanx_up" in page.ask("/metrics", Cookie=page.cookie).text
    with page.live() as stream:
        (first, whole), (then, update) = next(stream), next(stream)
    assert (first, then) == ("whole", "update")
    assert len(whole["rows"]) == 4  # type: ignore[arg-type]
    assert float(update["at"]) >= float(whole["at"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/log?rank=x", 400, "a whole number was expected, not 'x'"),
        ("/log", 400, "a whole number was expected"),
        ("/log?rank=0&stream=../../etc", 400, "stream is stdout or stderr"),
        ("/log?rank=0&start=-1", 400, "a whole number was expected"),
        ("/log?rank=3", 503, "node 1 has not answered"),
        ("/search?text=", 400, "text is missing"),
        ("/stop", 404, "not found"),
    ],
)
def test_invalid_requests_are_refused(page: Served, path: str, status: int, message: str) -> None:
    answer = page.ask(path, Cookie=page.cookie)
    assert (answer.status, message in answer.text) == (status, True), answer.text


def test_prometheus_has_no_cookie(page: Served) -> None:
    assert page.ask("/metrics", Authorization=f"Bearer {KEY}").status == 200
    for path in DATA[:-1]:
        assert page.ask(path, Authorization=f"Bearer {KEY}").status == 401
    assert page.ask("/metrics", Authorization=f"Bearer {KEY[:-1]}").status == 401
    assert page.ask("/metrics", Authorization=f"Basic {KEY}").status == 401


@pytest.mark.parametrize("path", DATA)
def test_other_clients_see_nothing(page: Served, path: str) -> None:
    here = f"127.0.0.1:{page.port}"
    other = f"{page.name.replace(str(page.port), str(page.port + 1))}={page.cookie.partition('=')[2]}"
    wrong = [
        {},
        {"Cookie": f"{page.name}={KEY}"},  # the key is not the cookie
        {"Cookie": page.cookie[:-1]},
        {"Cookie": f"{page.name}="},
        {"Cookie": other},  # of the page of another port
        {"Cookie": page.cookie, "Host": "evil.example"},  # a foreign name that resolves to this address
        {"Cookie": page.cookie, "Host": f"evil.example:{page.port}"},
        {"Cookie": page.cookie, "Host": f"127.0.0.1:{page.port}@evil.example"},
        {"Cookie": page.cookie, "Host": "127.0.0.1.evil.example"},
        {"Cookie": page.cookie, "Host": ""},
        {"Cookie": page.cookie, "Host": here, "Origin": "http://evil.example"},
        {"Cookie": page.cookie, "Host": here, "Origin": "http://127.0.0.1:1"},  # another program of this machine
        {"Cookie": page.cookie, "Host": here, "Origin": "null"},
        {"Cookie": page.cookie, "Host": here, "Sec_Fetch_Site": "cross-site"},
        {"Cookie": page.cookie, "Host": here, "Sec_Fetch_Site": "same-site"},
        {"Cookie": page.cookie, "Host": here, "Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"},
    ]
    for headers in wrong:
        answer = page.ask(path, **headers)
        assert answer.status in (400, 401, 403), (headers, answer)
        assert not [secret for secret in SECRETS if secret in answer.text.replace("phalanx", "")], (headers, answer)
        assert "Set-Cookie" not in answer.headers
        assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize(
    ("method", "body", "headers", "status"),
    [
        ("POST", KEY[:-1], {}, 403),
        ("POST", "", {}, 403),
        ("POST", KEY, {"Origin": "http://evil.example"}, 403),
        ("POST", KEY, {"Sec_Fetch_Site": "cross-site"}, 403),
        ("POST", KEY, {"Host": "evil.example"}, 403),
        ("POST", "x" * 5000, {}, 413),
        ("POST", "x" * 10, {"Content_Encoding": "gzip"}, 403),
        ("GET", None, {}, 405),
    ],
    ids=["wrong", "empty", "another origin", "another site", "another name", "too long", "packed", "no post"],
)
def test_there_is_no_cookie_without_the_key(
    page: Served, method: str, body: str | None, headers: dict[str, str], status: int
) -> None:
    answer = page.ask("/enter", method, body, **headers)
    assert answer.status == status
    assert "Set-Cookie" not in answer.headers


def test_names_of_this_machine(page: Served) -> None:
    for host in ("localhost", f"LocalHost:{page.port}", "[::1]:8080", "127.0.0.2:1", "127.0.0.1:9999"):  # ssh -L
        assert page.ask("/why", Cookie=page.cookie, Host=host).status == 200, host


def test_cookies_of_whatever_else_was_on_this_host(page: Served) -> None:
    others = "; ".join(f"username-localhost-{port}={'x' * 200}" for port in range(8888, 8912))
    assert page.ask("/why", Cookie=f"{others}; {page.cookie}").status == 200


def test_the_shell_holds_nothing_and_no_file_is_reached_through_it(page: Served) -> None:
    shell = page.ask("/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")  # a link in a chat
    assert shell.status in (200, 404)  # as far as this checkout has one
    assert "simulated" not in shell.text
    for name, value in (("X-Frame-Options", "DENY"), ("X-Content-Type-Options", "nosniff")):
        assert shell.headers[name] == value
    assert shell.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'")
    assert page.ask("/", Sec_Fetch_Site="cross-site").status == 403
    for path in ("../server.py", "%2e%2e/server.py", "..%2fserver.py", "/etc/passwd", "....//keys.py", "keys.py\0.js"):
        with contextlib.suppress(http.client.InvalidURL):
            answer = page.ask(f"/assets/{path}")
            assert answer.status in (400, 404), path
            assert "import" not in answer.text
            assert "root:" not in answer.text


def test_what_an_unauthenticated_client_may_send(page: Served) -> None:
    for sent in (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 10_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 100_000,
        b"GET /" + b"x" * 100_000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 100,
        b"POST /enter HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + b"fffff\r\n" + b"x" * 99_999,
        b"",
    ):
        with socket.create_connection(("127.0.0.1", page.port), timeout=20) as line:
            message = b""
            with contextlib.suppress(ConnectionError):
                line.sendall(sent)
                while part := line.recv(4096):  # until it is closed: an unauthenticated client has a second here
                    message += part
            assert not [secret for secret in SECRETS if secret.encode() in message], message
    assert page.ask("/why", Cookie=page.cookie).status == 200


def test_a_thousand_unauthenticated_clients(page: Served) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with contextlib.ExitStack() as held, page.live() as stream:
            next(stream)
            for _ in range(1000):
                line = held.enter_context(socket.create_connection(("127.0.0.1", page.port), timeout=20))
                with contextlib.suppress(ConnectionError):
                    line.sendall(b"GET / HTTP/1.1\r\n")
            began = time.time()
            while float(next(stream)[1]["at"]) < began:  # type: ignore[arg-type]
                pass
            assert page.ask("/why", Cookie=page.cookie).status == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- where it listens


@pytest.mark.parametrize(
    ("text", "found", "loopback"),
    [
        (None, PageAddress("127.0.0.1", None), True),
        ("29600", PageAddress("127.0.0.1", 29600), True),
        (":29600", PageAddress("127.0.0.1", 29600), True),
        ("localhost", PageAddress("localhost", None), True),
        ("[::1]:80", PageAddress("::1", 80), True),
        ("::", PageAddress("::", None), False),
        ("0.0.0.0:0", PageAddress("0.0.0.0", 0), False),
        ("head.example:443", PageAddress("head.example", 443), False),
    ],
    ids=str,
)
def test_places(text: str | None, found: PageAddress, loopback: bool) -> None:
    assert address.parse(text) == found
    assert found.loopback is loopback


@pytest.mark.parametrize("text", ["", "a:b", "host:99999", "http://host", "[::1]80", "user@host", "a b", "²"])
def test_invalid_addresses_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--page-at is") as caught:
        address.parse(text)
    assert "--page-at 127.0.0.1:29580" in caught.value.fix


def test_a_port_that_is_taken() -> None:
    with address.listen(PageAddress("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match=f"port {port}: the port is in use") as caught:
            address.listen(PageAddress("127.0.0.1", port))
        assert caught.value.fix == "--page-at 127.0.0.1 takes the next free port"
    with pytest.raises(PortError, match="no interface has this address"):
        address.listen(PageAddress("192.0.2.1", 0))
    with pytest.raises(PortError, match="unknown host name"):
        address.listen(PageAddress("x" * 70, 0))
    with address.listen(PageAddress()) as one, address.listen(PageAddress()) as other:
        assert one.getsockname() != other.getsockname()


def test_a_cookie_is_of_one_run_at_one_port() -> None:
    own = PageKeys(KEY, 29580, "train-1")
    assert own.knows(PageKeys(KEY, 29580, "train-1").cookie)
    for other in (
        PageKeys(KEY, 29581, "train-1"),
        PageKeys(KEY, 29580, "train-2"),
        PageKeys(KEY[::-1], 29580, "train-1"),
    ):
        assert not own.knows(other.cookie)
        assert own.cookie_name != other.cookie_name
    assert not own.knows(None)
    assert not own.knows(KEY)


def test_keys() -> None:
    one, other = keys.new(), keys.new()
    assert one != other
    assert len(one) == 43  # 256 bits
    assert keys.new("ab" * 16) == "ab" * 16
    for wrong in ("short", "x" * 64, "ab" * 16 + "\n"):
        with pytest.raises(UsageError, match="is not a valid key"):
            keys.new(wrong)
