"""One node of a lab: runs commands in it, and injects faults."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Unpack

from tests.kit import imported, proc
from tests.kit.cli import PHALANX, Env, Options, Result, environment
from tests.kit.handle import Handle, Terminal, resize, take_terminal
from tests.kit.lab import entry

if TYPE_CHECKING:
    from tests.kit.lab.lab import Lab

DELAY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "delay.py")
Home = Literal["shared", "own"]


class Inside(NamedTuple):
    """A process in a node, by its pid outside."""

    pid: int
    command: str


class Node:
    """
    result = lab[0].run("doctor")
    job = lab[1].start(words=("sleep", "60"))
    """

    def __init__(self, lab: Lab, number: int, init: int) -> None:
        self.lab = lab
        self.number = number
        self.init = init  # its pid outside the node
        self.name, self.address, self.address6 = lab.name(number), lab.address(number), lab.address6(number)
        self._pids = os.stat(f"/proc/{init}/ns/pid").st_ino
        # What must be undone to reset the node, last first.
        self._undo: dict[str, Callable[[], object]] = {}

    def __repr__(self) -> str:
        return f"<{self.name} {self.address}>"

    # Commands

    def start(self, *args: str, words: Sequence[str] = (), home: Home = "shared", **options: Unpack[Options]) -> Handle:
        """Start `phalanx ARGS`, or the command `words`, in the node, like tests.kit.cli.start.

        PHALANX_HOME and TMPDIR are those of the test, on all nodes, as in a cluster with a shared disk; home="own"
        gives the node its own PHALANX_HOME.
        """
        text = options.get("input")
        env = self.environment(options.get("env"), home)
        if not words and text is None:
            forked = imported.command(args, env, options.get("cwd"), self.init)
            if forked is not None:
                return forked
        out, out_end = os.pipe2(os.O_CLOEXEC)
        err, err_end = os.pipe2(os.O_CLOEXEC)
        try:
            process = entry.spawn(
                self.init,
                words or (*PHALANX, *args),
                env=env,
                cwd=options.get("cwd"),
                stdin=subprocess.DEVNULL if text is None else subprocess.PIPE,
                stdout=out_end,
                stderr=err_end,
            )
        except BaseException:
            os.close(out)
            os.close(err)
            raise
        finally:
            os.close(out_end)
            os.close(err_end)
        job = Handle(process, {out: "out", err: "err"})
        if text is not None and process.stdin:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(text.encode())
                process.stdin.close()
        return job

    def python(self, *words: str, env: Env | None = None) -> Handle:
        """Start `python -u WORDS` in the node, with torch imported already, like tests.kit.imported.start."""
        return imported.start(*words, env=self.environment(env), init=self.init)

    def run(
        self,
        *args: str,
        words: Sequence[str] = (),
        home: Home = "shared",
        timeout: float = 60,
        **options: Unpack[Options],
    ) -> Result:
        """Same, to its end. Fails if a leftover process keeps its output open."""
        with self.start(*args, words=words, home=home, **options) as job:
            code = job.wait(timeout)
            assert job.drained(), (
                f"{job.process.args!r} ended, but its output is held open; on the node: {self.processes()}"
            )
            seconds = (job.ended or job.started) - job.started
            return Result(code, job.out, job.err, seconds, job.bytes("out"), job.bytes("err"))

    def terminal(
        self,
        *args: str,
        words: Sequence[str] = (),
        home: Home = "shared",
        env: Env | None = None,
        cwd: str | None = None,
        size: tuple[int, int] = (24, 80),
    ) -> Terminal:
        """Same in its own terminal."""
        screen, tty = os.openpty()
        resize(screen, *size)
        try:
            process = entry.spawn(
                self.init,
                words or (*PHALANX, *args),
                env=self.environment({"TERM": "xterm-256color", **(env or {})}, home),
                cwd=cwd,
                stdin=tty,
                stdout=tty,
                stderr=tty,
                preexec_fn=take_terminal,
            )
        except BaseException:
            os.close(screen)
            raise
        finally:
            os.close(tty)
        return Terminal(process, screen)

    def environment(self, changes: Env | None = None, home: Home = "shared") -> dict[str, str]:
        env = environment({"HOME": self.lab.home, **(changes or {})})
        if home == "own" and "PHALANX_HOME" in env:
            env["PHALANX_HOME"] += f"/{self.name}"
        return env

    def processes(self) -> list[Inside]:
        """Return all live processes in the node except its init and the shared fork server; includes services of the
        lab.
        """
        return [Inside(process.pid, proc.command(process.pid)) for process in self.living()]

    def living(self) -> list[proc.Process]:
        return [process for process in proc.every() if self._has(process)]

    def _has(self, process: proc.Process) -> bool:
        if process.dead or process.pid in (self.init, self.fork_server):
            return False
        with contextlib.suppress(OSError):  # ended meanwhile
            return os.stat(f"/proc/{process.pid}/ns/pid").st_ino == self._pids
        return False

    @property
    def fork_server(self) -> int:
        """The pid of the warm fork server that tests share; 0: there is none."""
        return self.lab.warm.fork_servers.get(self.name, 0)

    @property
    def memory(self) -> str:
        """Its /dev/shm, seen from outside."""
        return f"/proc/{self.init}/root/dev/shm"

    def shared_memory(self) -> set[str]:
        return set(os.listdir(self.memory))

    # Faults

    def hosts(self, kind: str) -> None:
        """Set the hosts file: good, good6 (IPv6), bad (Debian's 127.0.1.1 for its own name), none (own name missing),
        or a text.
        """
        self._undo["hosts"] = lambda: self._write_hosts("good")
        self._write_hosts(kind)

    def _write_hosts(self, kind: str) -> None:
        self.lab.write(self.number, "hosts", self.lab.hosts(self.number, kind))

    def link(self, up: bool) -> None:
        """Connect or disconnect the cable, at the switch: the node loses the carrier."""
        self._switch_on("link", up, lambda on: self.lab.ip(f"link set {self.port} {_up(on)}"))

    def nic(self, up: bool) -> None:
        """Set the interface up or down, inside the node. Its IPv6 addresses are removed with it, and restored here."""
        self._switch_on("nic", up, self._set_nic)

    def _set_nic(self, up: bool) -> None:
        self.ip(f"link set eth0 {_up(up)}")
        if up:
            self.ip(f"addr replace {self.address6}/64 dev eth0 nodad")

    def drop(self, on: bool) -> None:
        """Silently drop all packets, in and out."""
        self._filter("lose_all", on, "iif != lo drop", "oif != lo drop")

    def block(self, port: int, on: bool) -> None:
        """Silently drop the packets of one TCP port, at either end."""
        rule = f"tcp sport {port} drop; tcp dport {port} drop"
        self._filter(f"lose_{port}", on, rule, rule)

    def part(self, other: Node, on: bool) -> None:
        """Silently drop the packets between this node and another one."""
        rules = [f"ip {way} {other.address} drop; ip6 {way} {other.address6} drop" for way in ("saddr", "daddr")]
        self._filter(f"lose_{other.name}", on, *rules)

    def _filter(self, name: str, on: bool, inward: str, outward: str) -> None:
        def set_filter(free: bool) -> None:
            # Declare it before deleting it, because it may not exist.
            text = f"table inet {name} {{}}\ndelete table inet {name}\n"
            if not free:
                text += f"table inet {name} {{\n"
                for hook, rule in (("input", inward), ("output", outward)):
                    text += f"chain {hook} {{ type filter hook {hook} priority 0; {rule}; }}\n"
                text += "}\n"
            self.tool("nft", "-f", "-", text=text)

        self._switch_on(name, not on, set_filter)

    def ipv6_only(self) -> None:
        """Remove IPv4 except on loopback, and use a matching hosts file."""
        self._undo["ipv4"] = lambda: self.ip(f"addr replace {self.address}/24 dev eth0")
        self.ip(f"addr del {self.address}/24 dev eth0")
        self.hosts("good6")

    def add_interface(self, name: str, address: str) -> None:
        """Add a network interface, "10.88.0.1/24"; those of the same name are connected by their own switch."""
        port, bridge = f"{name}.{self.number}", f"br.{name}"
        if not self.lab.has_link(bridge):
            self.lab.ip(f"link add {bridge} type bridge mcast_snooping 0", f"link set {bridge} up")
        self.lab.ip(
            f"link add {port} type veth peer name {name} netns {self.init}", f"link set {port} master {bridge} up"
        )
        self._undo[f"interface {name}"] = lambda: self.lab.ip(f"link del {port}")
        self.ip(f"addr add {address} dev {name}", f"link set {name} up")

    def sysctl(self, name: str, value: str) -> None:
        """Change a kernel setting of its network: net.ipv4.tcp_retries2=5 makes TCP give up after 15 s, not 15
        minutes.
        """
        before = self.tool("sysctl", "-n", name).strip()
        self._undo.setdefault(f"sysctl {name}", lambda: self.tool("sysctl", "-qw", f"{name}={before}"))
        self.tool("sysctl", "-qw", f"{name}={value}")

    def delay(self, ms: float, loss: float = 0) -> None:
        """Delay each packet in each direction, and drop some percent; 0 ends it. Uses a relay in user space."""
        if stop := self._undo.pop("delay", None):
            stop()
        if not ms and not loss:
            return
        near, far = f"d{self.number}", f"e{self.number}"
        self.lab.ip(
            f"link add {near} type veth peer name {far}",
            f"link set {self.port} nomaster",
            f"link set {far} master br0 up",
            f"link set {near} up",
        )
        # Frames pass through a raw socket: the senders must compute checksums and segment themselves.
        self.lab.offload(False)
        words = (sys.executable, "-S", DELAY, self.port, near, str(ms), str(loss))
        relay = entry.spawn(self.lab.switch, words, cwd="/", stdout=subprocess.PIPE)
        assert relay.stdout

        def stop_delay() -> None:
            relay.kill()
            relay.wait()
            assert relay.stdout
            relay.stdout.close()
            self.lab.ip(f"link del {near}", f"link set {self.port} master br0")
            self.lab.offload(True)

        self._undo["delay"] = stop_delay
        assert relay.stdout.readline() == b"ready\n"

    def kill(self) -> None:
        """Kill everything with SIGKILL. The kernel still closes connections: for a power failure, call link(False)
        first.
        """

        def gone() -> bool:
            # Repeatedly: a killed process may just have forked.
            left = self.living()
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            return not left

        proc.until(gone, 10, f"everything on {self.name} to die")

    def reset(self) -> None:
        """Reset the node: good hosts, link up, nothing dropped, IPv4 and IPv6."""
        while self._undo:
            self._undo.popitem()[1]()

    # Implementation

    @property
    def port(self) -> str:
        """The other end of eth0, in the switch."""
        return f"p{self.number}"

    def tool(self, *words: str, text: str = "") -> str:
        return entry.tool(self.init, *words, text=text)

    def ip(self, *lines: str) -> None:
        self.tool("ip", "-batch", "-", text="\n".join(lines))

    def _switch_on(self, name: str, on: bool, do: Callable[[bool], None]) -> None:
        if on:
            self._undo.pop(name, None)
        else:
            self._undo[name] = lambda: do(True)
        do(on)


def _up(up: bool) -> str:
    return "up" if up else "down"
