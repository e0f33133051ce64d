"""From what was typed to what will run: options, devices and environment become a Plan."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace

from phalanx.cli.options import RunOptions
from phalanx.cli.options.values import Streams
from phalanx.cli.surroundings import Surroundings
from phalanx.cluster import nvidia, sharing, slots
from phalanx.cluster.cluster import Cluster, Node, Slot
from phalanx.cluster.placement import place
from phalanx.cluster.sources.surroundings import cores
from phalanx.contract.variables import PAGE_KEY, THREADS, TOKEN
from phalanx.errors import DeviceError, ScriptError
from phalanx.launch.command import Command
from phalanx.launch.output.filters import Choice, Std
from phalanx.launch.plan import HangOptions, OutputOptions, Plan, ShutdownOptions, StartOptions, ViewerOptions
from phalanx.launch.runs.run_folder import make_run_id

# Modules that run a script and fail if torch has been imported before them.
_LOOK_AT_MODULES = ("coverage",)


def make_plan(options: RunOptions, environ: Mapping[str, str], around: Surroundings | None = None) -> Plan:
    """Everything that is decided before the first process starts. Raises where it cannot be done."""
    around = around or Surroundings()
    gathering = around.gathering
    command = Command(
        options.kind, options.script, options.args, options.python or sys.executable, options.local_rank_option
    )
    command.check()
    here, unused = _slots(options, environ, around.node)
    placement = place(Cluster((Node(0, os.uname().nodename, here),)))
    tasks = gathering.task.local_size if gathering is not None and gathering.task is not None else 1
    inherited = _inherited(options, environ, here, crowded=len(here) * tasks > 1)
    notes = list(options.notes)
    slices = any(slot.device is not None and slot.device.kind == "mig" for slot in here)
    if slices and not options.virtual_local_rank:
        notes.append("a process can use one MIG slice only, so each worker sees its own, as device 0 (LOCAL_RANK is 0)")
    shared = _shared(here)
    if shared:
        notes.append(shared)
    if gathering is not None and gathering.task is not None:
        asked = [f"-n {options.min_nodes}:{options.max_nodes}"] * (options.min_nodes < options.max_nodes)
        asked += [f"--spares {options.spares}"] * (options.spares > 0)
        if asked:
            notes.append(f"{' '.join(asked)} has no effect: {gathering.source} has started all the nodes there are")
    log_dir = options.log_dir
    if log_dir == os.devnull:
        notes.append("--log-dir /dev/null: the console reads the logs, so they are kept in the run folder")
        log_dir = None
    measured = options.kind == "module" and options.script.partition(".")[0] in _LOOK_AT_MODULES
    if measured:
        notes.append(f"{options.script} looks at all imported modules: every rank imports its own (as with --fresh)")
    wrapped = options.kind != "program" and _is_wrapper(command.python)
    if wrapped:
        notes.append(f"{command.python} is a script, not an interpreter: every rank is started by it (as with --fresh)")
    return Plan(
        run_id=options.run_id or make_run_id(options.script),
        command=command,
        placement=placement,
        node=0,
        nodes=1,
        environ=inherited,
        devices_isolated=options.isolate or slices or options.share_gpu,
        virtual_local_rank=options.virtual_local_rank or slices or options.share_gpu,
        role=options.role,
        master_addr=options.master_addr or "127.0.0.1",
        master_port=options.master_port or 0,
        max_restarts=options.max_restarts,
        restarts_told=options.restarts_told,
        restart_window=options.restart_window,
        silence=options.worker_timeout,
        hanging=HangOptions(options.stall_timeout, options.on_hang),
        watching=ViewerOptions(options.screen, options.page, options.page_at),
        stdin_rank=options.stdin,
        log_dir=log_dir,
        showing=_showing(options, quiet=gathering is not None and not gathering.echo and not gathering.leads),
        ending=_ending(options),
        start=StartOptions(
            fresh=options.fresh or options.kind == "program" or wrapped or measured,
            preload=options.preload,
            warm=options.warm,
            keep_warm=options.keep_warm or 0.0,
        ),
        notes=tuple(notes),
        topology=str(placement.world_size),
        gathering=gathering,
        check_collectives=options.check_collectives,
        spares=options.spares if gathering is None else 0,
        unused=unused,
    )


def _is_wrapper(python: str) -> bool:
    """A shell script may start Python in a way that skips the hook, and would then run the user's script as it is."""
    try:
        with open(shutil.which(python) or python, "rb") as file:
            return file.read(2) == b"#!"
    except OSError as error:
        raise ScriptError(
            f"the interpreter {python} cannot be found", fix="unset PYTHON_EXEC, or set it to a Python"
        ) from error


def _slots(options: RunOptions, environ: Mapping[str, str], node: int) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
    """Those of the workers, and those that are left."""
    inventory = nvidia.survey({**environ, **options.env})
    asked, cpu = options.workers, options.cpu
    if asked is None and options.slots is not None and node < len(options.slots):
        asked = options.slots[node]
    match asked:
        case "cpu":
            asked, cpu = cores(), True
        case "auto":
            asked = None if inventory.visible else cores()
        case "gpu" if not inventory.visible:
            raise DeviceError(
                "--nproc-per-node gpu: there is no GPU that a process here could use",
                details=[inventory.trouble] if inventory.trouble else [],
                fix="phalanx run -g 2 … for two CPU ranks",
            )
        case "gpu":
            asked = None
        case "xpu":
            raise DeviceError(
                "--nproc-per-node xpu: only NVIDIA devices are counted",
                fix="phalanx run -g N …, with the number of devices",
            )
    devices = None if options.devices is None else ",".join(options.devices)
    chosen = slots.choose(inventory, asked=asked, devices=devices, cpu=cpu, share=options.share_gpu)
    left = [] if cpu or devices is not None else [one for one in map(Slot, inventory.visible) if one not in chosen]
    if options.numa_binding is None:
        return chosen, tuple(left)
    from phalanx.cluster import affinity

    return affinity.bind(chosen, options.numa_binding, affinity.read()), ()


def _shared(here: tuple[Slot, ...]) -> str:
    """A note about devices that several workers share."""
    devices = [slot.device for slot in here if slot.device is not None]
    if sharing.most(here) < 2:
        return ""
    count = len(set(devices))
    noun = ("MIG slice" if devices[0].kind == "mig" else "GPU") + ("s" if count > 1 else "")
    return f"{len(devices)} ranks share {count} {noun}: to try and debug a script, not for speed"


def _inherited(
    options: RunOptions, environ: Mapping[str, str], here: tuple[Slot, ...], *, crowded: bool
) -> dict[str, str]:
    inherited = {**environ, **options.env}
    for name in (TOKEN, PAGE_KEY):  # no worker has a use for it, and many print their environment
        inherited.pop(name, None)
    if crowded:
        # As torchrun: workers that each use every core get in each other's way.
        inherited.setdefault(THREADS, "1")
    for name, value in sharing.for_all(here).items():
        inherited.setdefault(name, value)
    if options.devices is not None:
        inherited["CUDA_VISIBLE_DEVICES"] = ",".join(slot.device.handle for slot in here if slot.device is not None)
    if options.cpu:
        # A library that looks for GPUs is to find none. Accelerate, and with it the Trainer, has to be told besides.
        inherited["CUDA_VISIBLE_DEVICES"] = ""
        inherited.setdefault("ACCELERATE_USE_CPU", "true")
    return inherited


def _ending(options: RunOptions) -> ShutdownOptions:
    ending = ShutdownOptions(
        options.signals, preempt=options.preempt_signals, checkpoint_grace=options.grace, linger=options.linger
    )
    if options.shutdown_timeout is None:
        return ending
    return replace(ending, grace=options.shutdown_timeout, failure_grace=options.shutdown_timeout)


def _showing(options: RunOptions, *, quiet: bool) -> OutputOptions:
    return OutputOptions(
        redirects=_choice(options.redirects),
        tee=_choice(options.tee),
        ranks=options.show_ranks,
        local_ranks=options.local_ranks,
        template=options.log_line_prefix_template,
        role=options.role,
        stdout_needles=options.duplicate_stdout_filters,
        stderr_needles=options.duplicate_stderr_filters,
        colour={"auto": None, "always": True, "never": False}[options.color],
        quiet=options.quiet or quiet,
        paces=options.timings,
        events=options.event_log_handler == "console",
    )


def _choice(streams: Streams) -> Choice:
    return Choice(Std(streams.every), {local: Std(which) for local, which in streams.by_local_rank.items()})
