"""Makes the plan of a run from its options, devices and environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace

from phalanx.cli.launch_context import LaunchContext
from phalanx.cli.options import RunOptions
from phalanx.cli.options.misplaced import misplaced
from phalanx.cluster import missing_devices, nvidia, sharing, slots
from phalanx.cluster.cluster import Cluster, Node, Slot
from phalanx.cluster.inventory import Inventory
from phalanx.cluster.placement import place
from phalanx.cluster.sources.surroundings import cores
from phalanx.contract.checkpoint_key import read_key
from phalanx.contract.variables import CHECKPOINT_KEY, PAGE_KEY, THREADS, TOKEN
from phalanx.errors import DeviceError, OptionError, ScriptError
from phalanx.launcher.command import Command
from phalanx.launcher.plan import DeviceVisibility, GroupLayout, Plan, PlanRemarks, SpareWorkers
from phalanx.launcher.runs.run_folder import make_run_id

# Modules that run a script, and fail if torch was imported before that.
_NEED_FRESH = ("coverage",)


def make_plan(options: RunOptions, environ: Mapping[str, str], context: LaunchContext | None = None) -> Plan:
    """Return everything that is decided before the first process starts. Raise if the run is impossible."""
    context = context or LaunchContext()
    rendezvous = context.rendezvous
    script, workers, nodes, output = options.script, options.workers, options.nodes, options.output
    command = Command(
        script.kind, script.target, script.args, script.python or sys.executable, script.local_rank_option
    )
    command.check()
    key = {**environ, **options.script.env}.get(CHECKPOINT_KEY)
    if key is not None:
        read_key(key)  # raises here, not in every rank
    inventory = nvidia.survey({**environ, **options.script.env})
    here, unused = _slots(options, inventory, context.node)
    seats = place(Cluster((Node(0, os.uname().nodename, here),)))
    task = rendezvous.task if rendezvous is not None else None
    tasks = task.local_tasks if task is not None else 1
    follows = task is not None and bool(task.placement.local_rank)  # the first task on this host warns for all
    spares = nodes.spares if rendezvous is None else 0
    inherited = _inherited(options, environ, here, crowded=len(here) * tasks > 1, spares=spares)
    notes = list(options.notes)
    if rendezvous is None:
        _check_ranks(options, len(seats))
    hidden = sorted(rank for rank in output.local_ranks or () if rank >= len(here))
    if hidden:
        notes.append(f"--local-ranks-filter names rank {hidden[-1]}, and this node has {len(here)}, counted from 0")
    note = misplaced(script)
    if note is not None:
        notes.append(note)
    mig = any(slot.device is not None and slot.device.kind == "mig" for slot in here)
    if mig and not workers.virtual_local_rank:
        notes.append("a process can use one MIG slice only, so each worker sees its own, as device 0 (LOCAL_RANK is 0)")
    shared = _shared(here)
    if shared:
        notes.append(shared)
    if rendezvous is not None and rendezvous.task is not None:
        asked = [f"-n {nodes.min_nodes}:{nodes.max_nodes}"] * (nodes.min_nodes < nodes.max_nodes)
        asked += [f"--spares {nodes.spares}"] * (nodes.spares > 0)
        if asked:
            notes.append(f"{' '.join(asked)} has no effect: {rendezvous.source} has started all the nodes there are")
    if output.log_dir == os.devnull:
        notes.append("--log-dir /dev/null: the console reads the logs, so they are kept in the run folder")
        output = replace(output, log_dir=None)
    if rendezvous is not None and not rendezvous.echo and not rendezvous.leads:
        output = replace(output, quiet=True)
    measured = script.kind == "module" and script.target.partition(".")[0] in _NEED_FRESH
    if measured:
        notes.append(f"{script.target} looks at all imported modules: every rank imports its own (as with --fresh)")
    wrapped = script.kind != "program" and _is_wrapper(command.python)
    if wrapped:
        notes.append(f"{command.python} is a script, not an interpreter: every rank is started by it (as with --fresh)")
    fresh = options.start.fresh or script.kind == "program" or wrapped or measured
    return Plan(
        run_id=options.rendezvous.run_id or output.name or make_run_id(script.target),
        command=command,
        environ=inherited,
        group=GroupLayout(
            seats=seats,
            topology=str(len(seats)),
            master_addr=options.rendezvous.master_addr or "127.0.0.1",
            master_port=options.rendezvous.master_port or 0,
            role=workers.role,
            spares=SpareWorkers(count=spares, slots=unused),
        ),
        devices=DeviceVisibility(
            isolated=workers.isolate or mig or workers.share_gpu,
            virtual_local_rank=workers.virtual_local_rank or mig or workers.share_gpu,
        ),
        stdin_rank=script.stdin_rank,
        start=replace(options.start, fresh=fresh),
        recovery=options.recovery,
        hang=options.hang,
        shutdown=options.shutdown,
        output=output,
        viewers=options.viewers,
        remarks=PlanRemarks(
            notes=tuple(notes),
            warnings=() if workers.cpu or workers.count == "cpu" or follows else missing_devices.warnings(inventory),
        ),
        hyperparameters=dict(script.hyperparameters),
        rendezvous=rendezvous,
    )


def _check_ranks(options: RunOptions, world_size: int) -> None:
    """Raise if an option names a rank that does not exist. Unknown nodes may have any rank."""
    read_by = () if options.script.stdin_rank is None else (options.script.stdin_rank,)
    for name, ranks in (("--show-ranks", options.output.ranks or ()), ("--stdin", read_by)):
        missing = sorted(rank for rank in ranks if rank >= world_size)
        if missing:
            there = "is 1 rank: 0" if world_size == 1 else f"are {world_size} ranks: 0-{world_size - 1}"
            raise OptionError(
                f"{name} names rank {missing[-1]}, but there {there}",
                fix=f"phalanx run {name} 0 …, or phalanx run -g {missing[-1] + 1} …",
            )


def _is_wrapper(python: str) -> bool:
    """Return whether the interpreter is a script, which may start Python in a way that skips phalanx's hook."""
    try:
        with open(_path(python), "rb") as file:
            return file.read(2) == b"#!"
    except OSError as error:
        raise ScriptError(
            f"the interpreter {python} cannot be found", fix="unset PYTHON_EXEC, or set it to a Python"
        ) from error


def _path(program: str) -> str:
    if os.sep in program:
        return program
    import shutil  # imported here: at the top it would delay the fork server

    return shutil.which(program) or program


def _slots(options: RunOptions, inventory: Inventory, node: int) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
    """Return the slots of the workers, and the unused slots."""
    asked, cpu = options.workers.count, options.workers.cpu
    if asked is None and options.workers.slots is not None and node < len(options.workers.slots):
        asked = options.workers.slots[node]
    match asked:
        case "cpu":
            asked, cpu = cores(), True
        case "auto":
            asked = None if inventory.visible else cores()
        case "gpu" if not inventory.visible:
            raise DeviceError(
                "--nproc-per-node gpu: no GPU is usable on this node",
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
    devices = None if options.workers.devices is None else ",".join(options.workers.devices)
    chosen = slots.choose(inventory, asked=asked, devices=devices, cpu=cpu, share=options.workers.share_gpu)
    left = [] if cpu or devices is not None else [one for one in map(Slot, inventory.visible) if one not in chosen]
    if options.workers.numa_binding is None:
        return chosen, tuple(left)
    from phalanx.cluster import affinity

    return affinity.bind(chosen, options.workers.numa_binding, affinity.read()), ()


def _shared(here: tuple[Slot, ...]) -> str:
    """Return a note about devices that several workers share, or an empty string."""
    devices = [slot.device for slot in here if slot.device is not None]
    if sharing.most(here) < 2:
        return ""
    count = len(set(devices))
    noun = ("MIG slice" if devices[0].kind == "mig" else "GPU") + ("s" if count > 1 else "")
    return f"{len(devices)} ranks share {count} {noun}: to try and debug a script, not for speed"


def _inherited(
    options: RunOptions, environ: Mapping[str, str], here: tuple[Slot, ...], *, crowded: bool, spares: int
) -> dict[str, str]:
    inherited = {**environ, **options.script.env}
    for name in (TOKEN, PAGE_KEY):  # secrets that workers do not need: scripts print their environment
        inherited.pop(name, None)
    if crowded:
        # As in torchrun: workers that use all cores slow each other down.
        inherited.setdefault(THREADS, "1")
    inherited |= sharing.for_all(here, inherited, spares)
    if options.workers.devices is not None:
        inherited["CUDA_VISIBLE_DEVICES"] = ",".join(slot.device.handle for slot in here if slot.device is not None)
    if options.workers.cpu:
        # Hide the GPUs from libraries. Accelerate, and thus the Trainer, needs its own variable.
        inherited["CUDA_VISIBLE_DEVICES"] = ""
        inherited.setdefault("ACCELERATE_USE_CPU", "true")
    return inherited
