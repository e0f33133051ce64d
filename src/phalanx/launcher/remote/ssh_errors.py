"""Explains why a host of `run --hosts` cannot take part, or its connection has ended."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence

from phalanx.errors import JoinError
from phalanx.launcher.remote.node_spec import NodeRefused
from phalanx.launcher.remote.ssh_link import SshLink
from phalanx.launcher.runs.root_cause import in_words

REMOTE_PYTHON = "PHALANX_REMOTE_PYTHON"
NO_FOLDER, NO_PYTHON, SSH_FAILED = 93, 94, 255  # exit codes of the child process


def explain(link: SshLink, code: int) -> NodeRefused:
    """Return why a child process ended before its host answered."""
    host, details = link.host, quoted(link.stderr)
    text = "\n".join(link.stderr)
    if code == SSH_FAILED and not link.near:
        return NodeRefused(what="ssh cannot connect", details=details, fix=_remedy(host, text))
    if code == NO_FOLDER:
        return NodeRefused(
            what="the current folder does not exist there",
            details=(f"expected {link.cwd}",),
            fix="copy it there, or work in a folder on a shared disk",
        )
    if code == NO_PYTHON:
        return NodeRefused(
            what="no such Python",
            details=(f"expected {link.python}, as here",),
            fix=f"install it there too, or export {REMOTE_PYTHON}=/path/to/python, the same for all other hosts",
        )
    if re.search(r"No module named '?phalanx\b", text):
        install = f"{link.python} -m pip install phalanx"
        return NodeRefused(what="phalanx is not installed there", details=details, fix=f"ssh {host} {install}")
    return NodeRefused(
        what=f"phalanx node ended before it could answer: {in_words(code)}",
        details=details,
        fix=f"ssh {host} true shows whether its shell works" if not details else "",
    )


def explain_end(link: SshLink, code: int) -> NodeRefused:
    """Return why a child process ended after its host had answered."""
    lines = [line.removeprefix("phalanx: ") for line in link.stderr]
    if code == SSH_FAILED and not link.near:
        what = "the ssh connection ended" if lines else "ssh ended: phalanx was killed there, or the connection was cut"
        return NodeRefused(what=what, details=quoted(link.stderr))
    if not lines:
        return NodeRefused(what=f"phalanx ended there: {in_words(code)}")
    fix = next((line.strip().removeprefix("fix: ") for line in lines if line.strip().startswith("fix: ")), "")
    return NodeRefused(
        what=lines[0],
        details=tuple(line.strip() for line in lines[1:] if not line.strip().startswith("fix: ")),
        fix=fix,
    )


def combined(troubles: Mapping[str, NodeRefused], hosts: int = 1) -> JoinError:
    """Combine the failures of several hosts into one error."""
    by_host = {
        host: JoinError(trouble.what, details=trouble.details, fix=trouble.fix) for host, trouble in troubles.items()
    }
    if len(troubles) == 1:
        ((host, trouble),) = troubles.items()
        return JoinError(f"{host}: {trouble.what}", details=trouble.details, fix=trouble.fix, by_host=by_host)
    details = []
    for host, trouble in troubles.items():
        details.append(f"{host}: {trouble.what}")
        details += [f"  {line}" for line in trouble.details]
        if trouble.fix:
            details.append(f"  fix: {trouble.fix}")
    return JoinError(f"{len(troubles)} of {hosts} hosts cannot take part", details=details, by_host=by_host)


def _remedy(host: str, text: str) -> str:
    if "Permission denied" in text:
        return f"ssh-copy-id {host}, so that ssh {host} true does not ask for a password"
    if "Host key verification failed" in text or "IDENTIFICATION HAS CHANGED" in text:
        return f"run ssh {host} true once by hand, and compare the key that it shows"
    if "Could not resolve" in text:
        return f"correct the name, or add it to /etc/hosts or ~/.ssh/config; ssh {host} true shows the same"
    return f"ssh {host} true shows the same: is the host up, and does sshd run there?"


def quoted(lines: Sequence[str] | deque[str]) -> tuple[str, ...]:
    """Return the last lines that a host has written to stderr."""
    return tuple(list(lines)[-8:])
