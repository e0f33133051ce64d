"""Makes the spec of each host of `phalanx run --hosts`: its options, the token of the run, and how it joins the
others.
"""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from phalanx.cli.launch_context import join_settings, script_digest
from phalanx.cli.options import RunOptions
from phalanx.cli.options.values import devices
from phalanx.cluster.software import versions
from phalanx.cluster.sources.hosts import Host
from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.variables import HOME
from phalanx.control import interfaces, tokens
from phalanx.control.tokens import Token
from phalanx.launcher.remote import node_spec
from phalanx.launcher.remote.node_spec import Go, NodeSpec
from phalanx.launcher.rendezvous_config import (
    JoinTerms,
    LeaderLocation,
    RendezvousConfig,
    RendezvousTimeouts,
)
from phalanx.launcher.runs import run_folder

_FOLLOWER_SHARE = 0.75  # of the join timeout


def node_specs(
    options: RunOptions, hosts: Sequence[Host], near: Sequence[bool], environ: Mapping[str, str]
) -> list[NodeSpec]:
    """Return what each host needs to take part in the run."""
    token = tokens.new()  # one per run, sent over ssh and stored in no file
    run_id = options.rendezvous.run_id or options.output.name or run_folder.make_run_id(options.script.target)
    promised = [host.workers for host in hosts]
    digest = ""
    if options.script.kind in ("script", "path") and os.path.isfile(options.script.target):
        digest = script_digest(options.script.target)
    return [
        NodeSpec(
            node=node,
            nodes=len(hosts),
            token=token,
            options=msgspec.to_builtins(
                options_of(options, hosts, node, near=near[node], run_id=run_id), str_keys=True
            ),
            digest=digest,
            versions=versions(),
            env=node_spec.chosen(environ),
            home=environ.get(HOME, ""),
            names=tuple(host.name for host in hosts),
            promised=tuple(count for count in promised if count is not None) if None not in promised else (),
            host=_leader_name(options.rendezvous.master_addr, hosts, near),
            port=options.rendezvous.master_port or 0,
        )
        for node in range(len(hosts))
    ]


def options_of(
    options: RunOptions, hosts: Sequence[Host], node: int, *, near: bool, run_id: str | None = None
) -> RunOptions:
    """Return the options that this host would have on its own command line."""
    host, nodes = hosts[node], len(hosts)
    leads_here = node == 0 and near
    color = options.output.color
    here = options.output.use_color(environment()) is None and os.isatty(1) and os.isatty(2)
    if node == 0 and not near and here:
        color = "always"  # it writes to this terminal through a pipe
    workers = replace(options.workers, slots=None)
    if host.devices is not None:
        workers = replace(workers, devices=devices(host.devices), count=None)
    elif host.slots is not None:
        workers = replace(workers, count=host.slots)
    return replace(
        options,
        script=replace(options.script, stdin_rank=options.script.stdin_rank if leads_here else None),
        workers=workers,
        nodes=replace(options.nodes, hosts=None, min_nodes=nodes, max_nodes=nodes, count_given=True, node_rank=node),
        rendezvous=replace(
            options.rendezvous,
            master_addr=None,
            run_id=run_id or options.rendezvous.run_id,
            token_file=None,
            no_auth=False,
        ),
        output=replace(options.output, color=color),
    )


def rendezvous_config(spec: NodeSpec, options: RunOptions, go: Go | None) -> RendezvousConfig:
    """Return how a node joins the others. `go` has the addresses of node 0, as soon as they are known."""
    return RendezvousConfig(
        source="ssh",
        expected=spec.nodes,
        member=spec.node,
        leads=spec.node == 0,
        token=Token(bytes.fromhex(spec.token), "phalanx run --hosts"),
        location=LeaderLocation(
            spec.host,
            spec.port if go is None else go.port,
            addresses=() if go is None else go.addresses,
        ),
        terms=JoinTerms(options.rendezvous.run_id or "", versions(), join_settings(options, spec.nodes, spec.promised)),
        promised=spec.promised,
        timeouts=RendezvousTimeouts(
            # A node that cannot reach the leader knows the reason, so it gives up before the leader does.
            join=options.rendezvous.join_timeout * (_FOLLOWER_SHARE if spec.node else 1),
            node=options.rendezvous.node_timeout,
        ),
        names=spec.names,
        attach_from=options.rendezvous.attach_from,
        echo=False,
    )


def _leader_name(given: str | None, hosts: Sequence[Host], near: Sequence[bool]) -> str | None:
    """Return the name by which other nodes reach node 0. None: no name works on another machine."""
    if all(near):
        return "127.0.0.1"
    for name in (given, hosts[0].name.rpartition("@")[2]):
        if name and name != "localhost" and not interfaces.is_loopback(name):
            return name
    return None


def is_near(name: str) -> bool:
    """Return whether the host is this machine and the user is the current user."""
    user, _, host = name.rpartition("@")
    if user and user != pwd.getpwuid(os.geteuid()).pw_name:
        return False
    if host in ("localhost", os.uname().nodename):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False  # ssh may have an alias for it
    here = interfaces.survey()
    return all(interfaces.owner(str(where[0]), here) is not None for *_, where in found)
