"""Where the ranks meet: env://, tcp://host:port, file:///shared/path, or a given store."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

from phalanx.contract.home import preferred
from phalanx.errors import UsageError
from phalanx.worker.rendezvous.identity import DEFAULT_PORT, OR_RUN, Identity

EXPECTED = "expected env://, tcp://HOST:PORT or file:///SHARED/PATH"


@dataclass(frozen=True)
class MeetingPoint:
    """Where the ranks meet."""

    kind: Literal["tcp", "file", "given", "alone"]
    host: str = ""
    port: int = 0
    path: str = ""
    setting: str = ""  # the setting that defines it, for messages: "MASTER_ADDR=node1"
    by_method: bool = False

    def __str__(self) -> str:
        if self.kind == "tcp":
            return f"{self.host} port {self.port}" + (f" ({self.setting})" if self.setting else "")
        return f"the file {self.path}" if self.kind == "file" else self.setting or "the store that was given"


@dataclass(frozen=True)
class RendezvousMethod:
    """A parsed URL: the place, and the rank and world size that torch allows in its query."""

    place: MeetingPoint | None  # None: env://
    rank: int | None = None
    world_size: int | None = None


def parse(text: str | None) -> RendezvousMethod:
    """Parse `method=`; raise UsageError if it is unknown."""
    if text is None:
        return RendezvousMethod(None)
    url = urlsplit(text)
    query = {name: values[-1] for name, values in parse_qs(url.query).items()}
    rank, size = _number(text, query, "rank"), _number(text, query, "world_size")
    if url.scheme == "env" and not url.netloc and url.path in ("", "/"):
        return RendezvousMethod(None, rank, size)
    if url.scheme == "tcp":
        try:
            host, port = url.hostname, url.port
        except ValueError:
            host = port = None
        if not host or not port:
            raise UsageError(
                f"the method {text} does not say where to meet",
                details=["expected tcp://HOST:PORT, with the host of rank 0 and a free port of it"],
                fix='phalanx.init(method="tcp://HOST:29500", …)',
            )
        return RendezvousMethod(MeetingPoint("tcp", host, port, setting=f"method={text}", by_method=True), rank, size)
    if url.scheme == "file":
        path = unquote(url.path)
        meant = os.path.abspath(f"/{url.netloc}{path}").rstrip("/") or "/path"
        if url.netloc not in ("", "localhost") or not os.path.isabs(path) or path.endswith("/"):
            raise UsageError(
                f"the method {text} does not name a file",
                details=[
                    "expected file:///SHARED/PATH: three slashes, a file that every rank sees and that does not exist"
                ],
                fix=f'phalanx.init(method="file://{meant}", …)',
            )
        return RendezvousMethod(MeetingPoint("file", path=path), rank, size)
    raise UsageError(f"the method {text!r} is not known", details=[EXPECTED], fix="leave method out: phalanx.init()")


def _number(text: str, query: Mapping[str, str], name: str) -> int | None:
    value = query.get(name)
    if value is not None and not re.fullmatch(r"\d{1,9}", value, re.ASCII):
        raise UsageError(f"{name}={value} in the method {text} is not a number")
    return None if value is None else int(value)


def choose(
    identity: Identity, method: RendezvousMethod, environ: Mapping[str, str], *, given: bool = False
) -> MeetingPoint:
    """Return where the ranks of this run meet."""
    if given:
        return MeetingPoint("given")
    if method.place is not None:
        return method.place
    if identity.world_size == 1:
        return MeetingPoint("alone")
    if identity.address is not None and identity.port is not None:
        if identity.assumed:
            setting = "MASTER_ADDR is not set"
        elif environ.get("MASTER_ADDR") == identity.address:
            setting = f"MASTER_ADDR={identity.address}"
        else:
            setting = f"the first node of {identity.launcher}"
        return MeetingPoint("tcp", identity.address, identity.port, setting=setting)
    if identity.address is not None:
        raise UsageError(
            "MASTER_ADDR is set, but MASTER_PORT is not",
            details=[f"set: MASTER_ADDR={identity.address}", "missing: MASTER_PORT, the same in every rank"],
            fix=f"MASTER_ADDR={identity.address} MASTER_PORT={DEFAULT_PORT} python …{OR_RUN}",
        )
    if not identity.job:
        raise UsageError(
            f"{identity.launcher} does not name its job, so its tasks cannot find each other by themselves",
            details=[f"this is rank {identity.rank} of {identity.world_size}, and MASTER_ADDR is not set"],
            fix=f"mpiexec -genv MASTER_ADDR HOST_OF_RANK_0 -genv MASTER_PORT {DEFAULT_PORT} … python …",
        )
    # MPI launchers do not provide the address of rank 0, but their clusters usually have a shared home folder.
    return MeetingPoint("file", path=os.path.join(preferred(environ), "meetings", f"{identity.job}.store"))
