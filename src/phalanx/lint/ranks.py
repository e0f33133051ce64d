"""Which values differ between ranks, and which are the number of ranks."""

from __future__ import annotations

import ast

from phalanx.lint.origin import Origin
from phalanx.lint.script import Script

_RANKS = frozenset(
    [
        "rank",
        "local_rank",
        "global_rank",
        "world_rank",
        "node_rank",
        "process_index",
        "local_process_index",
        "proc_id",
        "RANK",
        "LOCAL_RANK",
    ]
)
_FIRST = frozenset(
    [
        "is_main",
        "is_main_process",
        "is_local_main_process",
        "is_master",
        "is_master_process",
        "is_local_master",
        "is_global_zero",
        "is_rank_zero",
        "is_rank_0",
        "is_rank0",
        "is_main_rank",
        "is_first_rank",
        "is_chief",
        "is_last_process",
        "is_world_process_zero",
        "is_local_process_zero",
        "master_process",
        "main_process",
    ]
)
_DECORATORS = frozenset(  # decorators of functions that do nothing on other ranks
    [
        "rank_zero_only",
        "on_main_process",
        "on_local_main_process",
        "on_last_process",
        "main_process_only",
        "master_only",
    ]
)
_WORLDS = frozenset(["world_size", "num_processes", "num_replicas", "WORLD_SIZE", "nranks", "n_ranks"])
_RANK_CALLS = (
    frozenset(["get_rank", "get_local_rank", "get_global_rank_id", "get_node_local_rank", "get_group_rank"]) | _FIRST
)
_RANK_VARIABLES = frozenset(
    [
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "NODE_RANK",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "PMI_RANK",
        "PMIX_RANK",
        "MV2_COMM_WORLD_RANK",
    ]
)
_WORLD_VARIABLES = frozenset(["WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
_RANDOM = ("random.", "numpy.random.", "torch.rand")
_CLOCKS = frozenset(
    [
        "time.time",
        "time.monotonic",
        "time.perf_counter",
        "time.time_ns",
        "time.perf_counter_ns",
        "time.monotonic_ns",
        "datetime.datetime.now",
        "datetime.datetime.utcnow",
        "datetime.now",
        "timeit.default_timer",
    ]
)
_SEEDS = frozenset(["seed", "manual_seed", "seed_everything", "set_seed", "seed_all"])


def ranks(script: Script) -> Origin:
    """Return where values depend on the rank."""
    spawned = first_parameters(script)
    world = worlds(script)

    def source(node: ast.expr) -> bool:
        if script.last(node.func if isinstance(node, ast.Call) else node) in _DECORATORS:
            return True
        if isinstance(node, ast.Call):
            return script.last(node.func) in _RANK_CALLS or _variable(script, node) in _RANK_VARIABLES
        if isinstance(node, ast.Attribute):
            return node.attr in _FIRST or (
                node.attr in _RANKS and script.name(node.value) not in script.imports.values()
            )
        if isinstance(node, ast.Name):
            scope = script.scope(node)
            return (scope, node.id) in spawned
        return _variable(script, node) in _RANK_VARIABLES

    def settled(node: ast.Compare) -> bool:
        return agreed(node) or (len(node.ops) == 1 and isinstance(node.ops[0], ast.Lt | ast.GtE) and plain_world(node))

    def plain_world(node: ast.Compare) -> bool:
        right = node.comparators[0]
        return isinstance(right, ast.Name | ast.Attribute | ast.Call) and world.depends(right)

    return Origin(script, source, _RANKS | _FIRST, settled)


def agreed(node: ast.Compare) -> bool:
    """Return whether a test only checks that there are other ranks, as `rank >= 0`: the result is the same on all
    ranks.
    """
    if len(node.ops) != 1:
        return False
    op, right = node.ops[0], node.comparators[0]
    if isinstance(op, ast.In | ast.NotIn):
        return False
    if isinstance(right, ast.Attribute) and right.attr == "MAIN_PROCESS_RANK":
        return True  # torch's own tests use -1 for the process that starts the ranks
    value: object
    try:
        value = ast.literal_eval(right)
    except ValueError:
        return False
    if isinstance(value, str):
        return not value.isdigit()  # a device, a mode
    return value in (-1, None) or (value == 0 and isinstance(op, ast.GtE | ast.Lt))


def worlds(script: Script) -> Origin:
    """Return where values depend on the world size."""

    def source(node: ast.expr) -> bool:
        if isinstance(node, ast.Call) and script.last(node.func) == "get_world_size":
            return True
        return _variable(script, node) in _WORLD_VARIABLES or (isinstance(node, ast.Attribute) and node.attr in _WORLDS)

    return Origin(script, source, _WORLDS)


def chance(script: Script) -> Origin:
    """Return where values come from clocks and random numbers, except with a common seed."""
    rank = ranks(script)
    seeded = any(
        script.last(call.func) in _SEEDS and not any(map(rank.mentions, call.args))
        for call in script.calls
        if call.args
    )

    def source(node: ast.expr) -> bool:
        if not isinstance(node, ast.Call):
            return False
        name = script.name(node.func)
        return name in _CLOCKS or (not seeded and name.startswith(_RANDOM) and script.last(node.func) not in _SEEDS)

    return Origin(script, source, always=True)


def first_parameters(script: Script) -> frozenset[tuple[ast.AST, str]]:
    """Return the first parameters of spawned functions, which are the rank."""
    found = set()
    for call in script.calls:
        if script.name(call.func) not in SPAWNS or not call.args:
            continue
        for function in script.functions.get(script.last(call.args[0]), ()):
            if function.args.args:
                found.add((function, function.args.args[0].arg))
    return frozenset(found)


SPAWNS = frozenset(
    [
        "torch.multiprocessing.spawn",
        "torch.multiprocessing.start_processes",
        "torch.multiprocessing.spawn.spawn",
        "torch.multiprocessing.spawn.start_processes",
    ]
)


def _variable(script: Script, node: ast.expr) -> str:
    """Return the environment variable that an expression reads."""
    if isinstance(node, ast.Subscript) and script.name(node.value) == "os.environ":
        key: ast.expr | None = node.slice
    elif isinstance(node, ast.Call) and script.name(node.func) in ("os.environ.get", "os.getenv", "os.environ.pop"):
        key = node.args[0] if node.args else None
    else:
        return ""
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""
