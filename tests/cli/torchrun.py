"""What torchrun itself decides for a command line: its parser and its decisions, stopped before the launch."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import uuid
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

_RANDOM = uuid.UUID(int=7)


class Refused(Exception):
    """torchrun refuses this command line."""


def decide(argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return torchrun's decisions, by the fields of RunOptions."""
    with (
        mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", **environ}, clear=True),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        try:
            args = run.parse_args(list(argv))
            config, command, rest = _config(args)
        except (SystemExit, ValueError, AssertionError, RuntimeError) as error:
            raise Refused(str(error)) from error
    return {
        **_command(args, command, rest),
        **_meeting(config),
        "nodes.min_nodes": 1 if args.standalone else config.min_nodes,
        "nodes.max_nodes": 1 if args.standalone else config.max_nodes,
        "workers.count": config.nproc_per_node,
        "workers.role": config.role,
        "recovery.max_restarts": config.max_restarts,
        "output.log_dir": args.log_dir,
        "output.redirects": _streams(config.logs_specs.redirects),
        "output.tee": _streams(config.logs_specs.tee),
        "output.local_ranks": config.logs_specs.local_ranks_filter,
        "output.line_prefix": config.log_line_prefix_template or None,
        "output.stdout_filters": tuple(config.duplicate_stdout_filters),
        "output.stderr_filters": tuple(config.duplicate_stderr_filters),
        "workers.virtual_local_rank": config.virtual_local_rank,
        "workers.numa_binding": config.numa_options and config.numa_options.affinity_mode.value,
        "shutdown.signals": tuple(getattr(signal, name.strip()) for name in config.signals_to_handle.split(",")),
        "shutdown.timeout": config.shutdown_timeout,
    }


def _config(args: Any) -> tuple[Any, Any, list[str]]:
    """Return the LaunchConfig, command and arguments that torchrun would pass to its agent."""
    caught: list[Any] = []

    def launch(config: Any, entrypoint: Any) -> Any:
        return lambda *rest: caught.extend((config, entrypoint, list(rest)))

    with (
        mock.patch.object(run, "elastic_launch", launch),
        mock.patch.object(run.uuid, "uuid4", return_value=_RANDOM),
        mock.patch.object(run, "determine_local_world_size", _size),
        mock.patch.object(run, "_get_logs_specs_class", return_value=SimpleNamespace),
        mock.patch.object(run.torch.multiprocessing, "_set_thread_name"),
        mock.patch.object(run, "logger"),
    ):
        run.run(args)
    return caught[0], caught[1], caught[2]


def _size(text: str) -> int | str:
    """Parse a number of workers like torchrun, without counting devices."""
    try:
        return int(text)
    except ValueError:
        if text in ("auto", "gpu", "cpu", "xpu"):
            return text
        raise


def _command(args: Any, command: Any, rest: list[str]) -> dict[str, Any]:
    if callable(command):
        return {"script.kind": "path", "script.target": rest[0], "script.args": tuple(rest[1:])}
    if args.no_python:
        return {"script.kind": "program", "script.target": command, "script.args": tuple(rest)}
    assert rest[0] == "-u"
    if rest[1] == "-m":
        return {"script.kind": "module", "script.target": rest[2], "script.args": tuple(rest[3:])}
    return {"script.kind": "script", "script.target": rest[1], "script.args": tuple(rest[2:])}


def _meeting(config: Any) -> dict[str, Any]:
    chosen_by_torchrun = config.run_id == str(_RANDOM)
    if chosen_by_torchrun:
        return {"rendezvous.run_id": None, "rendezvous.master_addr": None, "rendezvous.master_port": None}
    meeting: dict[str, Any] = {"rendezvous.run_id": config.run_id or None}
    if config.rdzv_backend == "static":
        address, port = parse_rendezvous_endpoint(config.rdzv_endpoint, -1)
        if port == -1:
            raise Refused("no port")
        meeting |= {"rendezvous.master_addr": address, "rendezvous.master_port": port or None}
    elif config.rdzv_endpoint:
        # 29400 is the port of the rendezvous; on one node, workers get a free port.
        address, port = parse_rendezvous_endpoint(config.rdzv_endpoint, 29400 if config.max_nodes > 1 else 0)
        meeting |= {"rendezvous.master_addr": address, "rendezvous.master_port": port or None}
    else:
        meeting |= {"rendezvous.master_addr": None, "rendezvous.master_port": 29400 if config.max_nodes > 1 else None}
    return meeting


def _streams(chosen: Any) -> dict[int, int]:
    return {rank: int(chosen if isinstance(chosen, Std) else chosen.get(rank, 0)) for rank in range(10)}
