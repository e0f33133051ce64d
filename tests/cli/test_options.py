"""The command line: torchrun's options against torchrun itself, ours by tables, and every complaint."""

from __future__ import annotations

import contextlib
import shlex
import signal
from collections.abc import Iterable
from dataclasses import fields as dataclass_fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.launch
import torch.distributed.run
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from phalanx.cli.options import HelpRequested, RunOptions, parse_chaos, parse_plan, parse_run
from phalanx.cli.options.misplaced import misplaced
from phalanx.cli.options.run_options import GROUPS
from phalanx.cli.options.table import OPTIONS, SECTIONS
from phalanx.errors import OptionError
from tests.cli.torchrun import Refused, decide


def parse(line: str, **environ: str) -> RunOptions:
    return parse_run(shlex.split(line), environ)


# the same as torchrun


def fields(options: RunOptions, names: Iterable[str]) -> dict[str, Any]:
    return {name: attrgetter(name)(options) for name in names}


def comparable(options: RunOptions, theirs: dict[str, Any]) -> dict[str, Any]:
    """Our fields that torchrun has too, with torchrun's default where ours is "not given"."""
    ours = fields(options, theirs)
    for name in ("output.redirects", "output.tee"):
        ours[name] = {rank: ours[name].of(rank)[rank] for rank in range(10)}
    if ours["workers.count"] is None and theirs["workers.count"] == 1:
        ours["workers.count"] = 1
    address = "rendezvous.master_addr"
    if ours[address] is None and ours["nodes.max_nodes"] > 1 and theirs[address] == "127.0.0.1":
        ours[address] = "127.0.0.1"  # with several nodes it can only be wrong, so we leave it open
    if ours["shutdown.timeout"] is None:
        ours["shutdown.timeout"] = 30
    return ours


def assert_same(argv: list[str], environ: dict[str, str]) -> None:
    theirs = decide(argv, environ)
    assert comparable(parse_run(argv, environ), theirs) == theirs


@pytest.mark.parametrize(
    "line",
    [
        "train.py",
        "train.py --lr 0.1 --help",
        "train.py -h --nnodes 3 --nproc_per_node=9",
        "-- train.py --x",
        "train.py -- --x",
        "train.py a -- b",
        "--nproc_per_node=4 train.py",
        "--nproc-per-node auto train.py",
        "--standalone --nproc-per-node=gpu train.py",
        "--nnodes=1 --nproc_per_node=8 --node_rank=0 --master_addr=localhost --master_port=22222 train.py",
        "--nnodes=2 --node_rank=1 --master_addr=10.1.2.3 train.py",
        "--nnodes 1:4 --max-restarts 3 --rdzv-id j7 --rdzv-backend c10d --rdzv-endpoint head:29400 train.py",
        "--nnodes 4 --rdzv-backend c10d --rdzv-endpoint head train.py",
        "--rdzv-backend c10d train.py",
        "--rdzv-backend c10d --node-rank 3 train.py",
        "--rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id x train.py",
        "--rdzv-backend c10d --rdzv-endpoint localhost:29403 -m examples.train --x",
        "--rdzv-endpoint [::1]:29501 train.py",
        "--master-addr ::1 --master-port 29501 train.py",
        "--master-addr [::1] --master-port 29501 train.py",
        "--rdzv-id j7 train.py",
        "--rdzv-id= --master-port 29500 train.py",
        "--master-addr somewhere train.py",
        "--master-port 0 train.py",
        "--rdzv-endpoint host:1 --master-port 2 --master-addr other train.py",
        "--standalone --rdzv-endpoint host:1 --rdzv-id x --master-port 3 train.py",
        "--standalone --nnodes 1:2 train.py",
        "-r3 -t 0:1,1:2 --log-dir logs train.py",
        "-r 0 --tee=3 --local-ranks-filter 0,2 train.py",
        "--duplicate-stdout-filters a,b,,c --duplicate_stderr_filters= train.py",
        "--no-python ./program --x",
        "--run-path --no-python -m /abs/train.py",
        "-m package.module -m",
        "-mr3 package.module",
        "--numa-binding core-complex --virtual-local-rank --role trainer --local-addr 10.0.0.1 train.py",
        "--signals-to-handle SIGUSR1,SIGTERM --shutdown-timeout 5 train.py",
        "--nnodes 3 --nnodes 1 train.py",
        "--stand --log-d x --rol y --nn 1 --ro z --no_ --max- 2 train.py",
        "--no- prog",
        "--shutdown-timeout 0 -- train.py",
    ],
)
def test_torchrun_decides_the_same(line: str) -> None:
    assert_same(shlex.split(line), {})


PET = {
    "PET_NNODES": "1:1",
    "PET_NPROC_PER_NODE": "3",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "head:1234",
    "PET_RDZV_ID": "j",
    "PET_RDZV_CONF": "timeout=3",
    "PET_STANDALONE": "1",
    "PET_MAX_RESTARTS": "4",
    "PET_MONITOR_INTERVAL": "1",
    "PET_START_METHOD": "fork",
    "PET_EVENT_LOG_HANDLER": "null",
    "PET_ROLE": "r",
    "PET_MODULE": "1",
    "PET_NO_PYTHON": "1",
    "PET_RUN_PATH": "1",
    "PET_LOG_DIR": "d",
    "PET_REDIRECTS": "3",
    "PET_TEE": "0:1",
    "PET_LOCAL_RANKS_FILTER": "1",
    "PET_DUPLICATE_STDOUT_FILTERS": "a,b",
    "PET_DUPLICATE_STDERR_FILTERS": "c",
    "PET_NODE_RANK": "0",
    "PET_MASTER_ADDR": "m",
    "PET_MASTER_PORT": "77",
    "PET_LOCAL_ADDR": "l",
    "PET_LOGS_SPECS": "none",  # torchrun reads no variable for these two
    "PET_NUMA_BINDING": "node",
    "PET_SIGNALS_TO_HANDLE": "SIGUSR2",
    "PET_SHUTDOWN_TIMEOUT": "9",
    "PET_VIRTUAL_LOCAL_RANK": "1",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}] ",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "8",
}


@pytest.mark.parametrize("name", PET)
def test_torchrun_reads_the_same_variables(name: str) -> None:
    assert_same(["train.py"], {name: PET[name]})
    assert_same(["--master-port", "5", "train.py"], {name: PET[name]})


def test_a_variable_of_zero_turns_a_flag_off() -> None:
    assert_same(["train.py"], {"PET_MODULE": "0"})
    assert_same(["-m", "train.py"], {"PET_MODULE": "0"})


def test_the_command_line_goes_before_a_variable() -> None:
    assert parse("--max-restarts 1 --role b t.py", PET_MAX_RESTARTS="2", PET_ROLE="a").recovery.max_restarts == 1
    assert parse("-g 2 t.py", PET_NPROC_PER_NODE="8").workers.count == 2


def _actions() -> list[Any]:
    parser = torch.distributed.run.get_args_parser()
    return [action for action in parser._actions if action.option_strings]


@pytest.mark.parametrize("action", _actions(), ids=lambda action: action.dest)
def test_every_option_of_torchrun_is_known_by_all_its_names(action: Any) -> None:
    """And is declared the same: names, default, variable, choices."""
    row = next(option for option in OPTIONS if option.name in action.option_strings)
    assert set(row.torchrun_spellings) == set(action.option_strings)
    assert row.origin == "torchrun"
    if action.dest == "help":
        return
    assert row.dest == action.dest
    assert (row.kind is None) == (action.nargs == 0)
    # not told is None for us, where torchrun has a value that says nothing
    silent = {"nproc_per_node": "1", "node_rank": 0, "master_addr": "127.0.0.1", "local_ranks_filter": ""}
    if row.kind is not None and not isinstance(action.default, list):
        told = None if row.default is None else (action.type or str)(row.default)
        assert told == (None if silent.get(action.dest, object()) == action.default else action.default)
    assert bool(row.variable) == (type(action).__name__ in ("env", "check_env"))
    if action.choices:
        assert row.kind is not None
        assert row.kind.metavar.split("|") == list(action.choices)


def test_the_old_launchers_option_and_the_newer_ones_are_known() -> None:
    assert torch.distributed.launch.parse_args(["--use_env", "t.py"]).use_env
    for name in ("--use-env", "--use_env"):
        assert "LOCAL_RANK" in parse(f"{name} t.py").notes[0]
    line = "--log_line_prefix_template '${rank}' t.py"
    assert parse(line, TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="x").output.line_prefix == "${rank}"
    assert parse("t.py", PET_LOG_LINE_PREFIX_TEMPLATE="y").output.line_prefix == "y"


# Values that torchrun takes and that do not contradict each other.
VALUES: dict[str, list[str]] = {
    "nnodes": ["1", "1:1", "2", "1:3"],
    "nproc_per_node": ["1", "2", "16", "auto", "cpu", "gpu", "xpu"],
    "rdzv_backend": ["static", "c10d"],
    "rdzv_endpoint": ["", "host:1", "localhost:0", "10.0.0.1:29500", "[::1]:80", "host"],
    "rdzv_id": ["none", "", "job 7"],
    "rdzv_conf": ["", "timeout=1", "a=b, c=d"],
    "max_restarts": ["0", "3"],
    "monitor_interval": ["0.1", "5"],
    "start_method": ["spawn", "fork"],
    "event_log_handler": ["null", "console", "other"],
    "role": ["default", "trainer"],
    "log_dir": ["logs", "/var/log/x"],
    "redirects": ["0", "3", "0:1", "0:1,3:2"],
    "tee": ["0", "1", "2:3"],
    "local_ranks_filter": ["", "0", "0,3"],
    "duplicate_stdout_filters": ["", "a", "a,,b,c"],
    "duplicate_stderr_filters": ["x,y"],
    "node_rank": ["0"],
    "master_addr": ["127.0.0.1", "host", "::1", "[::1]"],
    "master_port": ["0", "1", "65535"],
    "local_addr": ["10.0.0.1"],
    "logs_specs": ["plugin"],
    "numa_binding": ["node", "exclusive"],
    "signals_to_handle": ["SIGTERM", "SIGUSR1, SIGINT"],
    "shutdown_timeout": ["0", "12"],
}
FLAGS = ["standalone", "module", "no_python", "run_path", "virtual_local_rank"]
NAMES = {action.dest: action.option_strings for action in _actions()}
SCRIPT_WORDS = st.sampled_from(["--help", "-h", "--lr", "0.1", "--nnodes", "7", "-m", "--standalone", "x y", "--", ""])


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[list[str], dict[str, str]]:
    argv: list[str] = []
    for dest in draw(st.lists(st.sampled_from([*VALUES, *FLAGS]), max_size=6)):
        name = draw(st.sampled_from(NAMES[dest]))
        if name.startswith("--") and draw(st.integers(0, 3)) == 0:
            name = name[: draw(st.integers(3, len(name)))]
        if dest in FLAGS:
            argv.append(name)
            continue
        value = draw(st.sampled_from(VALUES[dest]))
        if name.startswith("--") and draw(st.booleans()):
            argv.append(f"{name}={value}")
        elif not name.startswith("--") and value and draw(st.booleans()):
            argv.append(name + value)
        else:
            argv += [name, value]
    argv += [
        draw(st.sampled_from(["train.py", "pkg.mod", "/abs/x.py"])),
        *draw(st.lists(SCRIPT_WORDS, max_size=4)),
    ]
    environ = {
        f"PET_{dest.upper()}": draw(st.sampled_from(["0", "1"] if dest in FLAGS else VALUES[dest]))
        for dest in draw(st.lists(st.sampled_from([*VALUES, *FLAGS]), max_size=2))
    }
    return argv, environ


@settings(derandomize=True, max_examples=400, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(command_lines())
def test_what_torchrun_takes_means_the_same(line: tuple[list[str], dict[str, str]]) -> None:
    argv, environ = line
    try:
        theirs = decide(argv, environ)
    except Refused:
        assume(False)
    try:
        options = parse_run(argv, environ)
    except OptionError as error:
        # torchrun waits ten minutes for a node that cannot come
        if "--standalone and" not in error.what and "PET_STANDALONE=1 and" not in error.what:
            raise
        return
    assert comparable(options, theirs) == theirs


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from([name for option in OPTIONS for name in option.spellings]),
            st.text(alphabet="-=_:,.0123456789abginpx ", max_size=6),
        ),
        max_size=6,
    )
)
def test_nonsense_is_complained_about_and_nothing_else_happens(argv: list[str]) -> None:
    with contextlib.suppress(OptionError, HelpRequested):
        assert isinstance(parse_run(argv, {}), RunOptions)


# ours


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "t.py",
            {
                "workers.count": None,
                "workers.slots": None,
                "script.stdin_rank": 0,
                "output.color": "auto",
                "start.warm": True,
                "notes": (),
            },
        ),
        (
            "t.py",
            {
                "nodes.min_nodes": 1,
                "nodes.max_nodes": 1,
                "nodes.node_rank": None,
                "start.keep_warm": 0.0,
                "shutdown.timeout": None,
            },
        ),
        (
            "t.py",
            {
                "rendezvous.run_id": None,
                "rendezvous.master_addr": None,
                "rendezvous.master_port": None,
                "script.python": None,
            },
        ),
        ("t.py", {"hang.stall_timeout": 30.0, "hang.action": "report"}),
        ("--stall-timeout 5m --on-hang kill t.py", {"hang.stall_timeout": 300.0, "hang.action": "kill"}),
        ("--stall-timeout off t.py", {"hang.stall_timeout": None}),
        ("t.py", {"shutdown.linger": 120.0}),
        ("--linger 5m t.py", {"shutdown.linger": 300.0}),
        ("--linger 0 t.py", {"shutdown.linger": 0.0}),
        ("--linger forever t.py", {"shutdown.linger": None}),
        ("-g 4 t.py", {"workers.count": 4, "workers.slots": (4,)}),
        ("-g4 t.py", {"workers.count": 4}),
        ("--slots=4 --nproc-per-node 4 t.py", {"workers.count": 4}),
        (
            "-n 2 -g 8,2 -i 1 t.py",
            {
                "workers.count": 2,
                "workers.slots": (8, 2),
                "nodes.node_rank": 1,
                "nodes.max_nodes": 2,
                "nodes.min_nodes": 2,
            },
        ),
        ("-n 2 -g 8,2 t.py", {"workers.count": None, "workers.slots": (8, 2), "nodes.node_rank": None}),
        ("-n 3 -g 8 t.py", {"workers.count": 8, "workers.slots": (8, 8, 8)}),
        ("-n 1:3 -g 8,4,2 --id 2 t.py", {"workers.count": 2, "nodes.min_nodes": 1, "nodes.max_nodes": 3}),
        ("--nodes 2 t.py", {"rendezvous.master_addr": None, "rendezvous.master_port": 29500}),
        ("--devices 0,2,5 t.py", {"workers.devices": ("0", "2", "5")}),
        ("--devices 0-3,GPU-1a2b,MIG-GPU-x/1/0 t.py", {"workers.devices": ("0-3", "GPU-1a2b", "MIG-GPU-x/1/0")}),
        (
            "--isolate --cpu --fresh --quiet --no-warm t.py",
            {"workers.isolate": True, "workers.cpu": True, "start.fresh": True, "start.warm": False},
        ),
        ("--cpu --nproc-per-node auto t.py", {"workers.cpu": True, "workers.count": "auto"}),
        ("--preload a,b.c t.py", {"start.preload": ("a", "b.c")}),
        ("--env A=1 --env B=x=y --env C= t.py", {"script.env": {"A": "1", "B": "x=y", "C": ""}}),
        ("--pass-local-rank train.py", {"script.local_rank_option": "--local-rank", "script.target": "train.py"}),
        ("--pass-local-rank=dash train.py", {"script.local_rank_option": "--local-rank"}),
        ("--pass-local-rank=underscore train.py", {"script.local_rank_option": "--local_rank"}),
        ("--pass_local_rank=underscore train.py", {"script.local_rank_option": "--local_rank"}),
        ("--pass train.py", {"script.local_rank_option": "--local-rank"}),
        ("--show-ranks 0,8 t.py", {"output.ranks": frozenset({0, 8}), "output.local_ranks": None}),
        ("--show-ranks 4-7 t.py", {"output.ranks": frozenset({4, 5, 6, 7})}),
        ("--stdin 3 t.py", {"script.stdin_rank": 3}),
        ("--stdin none t.py", {"script.stdin_rank": None}),
        ("--keep-warm 90 t.py", {"start.keep_warm": 90.0}),
        ("--keep-warm 90s t.py", {"start.keep_warm": 90.0}),
        ("--keep-warm 15m t.py", {"start.keep_warm": 900.0}),
        ("--keep-warm 2h t.py", {"start.keep_warm": 7200.0}),
        ("--color never t.py", {"output.color": "never"}),
        ("--event-log-handler console t.py", {"output.event_log_handler": "console", "notes": ()}),
        ("--signals-to-handle term,SIGUSR1,SIGTERM t.py", {"shutdown.signals": (signal.SIGTERM, signal.SIGUSR1)}),
        ("--shutdown-timeout 0.5 t.py", {"shutdown.timeout": 0.5}),
        ("-t 12:3 t.py", {"notes": ()}),
        # what torchrun calls ambiguous, though it is one option with two spellings
        ("--nproc 2 --max 1 t.py", {"workers.count": 2, "recovery.max_restarts": 1}),
        # ambiguous words behind the script are the script's business
        ("t.py --no --ma --json -x", {"script.args": ("--no", "--ma", "--json", "-x")}),
    ],
)
def test_meaning(line: str, expected: dict[str, Any]) -> None:
    options = parse(line)
    assert fields(options, expected) == expected


def test_the_environment_names_the_python() -> None:
    assert parse("t.py", PYTHON_EXEC="/opt/python").script.python == "/opt/python"


def test_json_is_for_plan() -> None:
    assert parse_plan(["--json", "-g", "2", "t.py", "--json"], {})[1]
    options, as_json = parse_plan(["t.py", "--json"], {})
    assert not as_json
    assert options.script.args == ("--json",)


@pytest.mark.parametrize(
    ("line", "environ", "words"),
    [
        ("--monitor-interval 5 t.py", {}, ["--monitor-interval has no effect"]),
        ("--local-addr 10.0.0.1 t.py", {}, ["--local-addr has no effect"]),
        ("--monitor_interval 5 t.py", {}, ["--monitor_interval has no effect"]),
        ("t.py", {"PET_MONITOR_INTERVAL": "5"}, ["PET_MONITOR_INTERVAL has no effect"]),
        ("--start-method fork t.py", {}, ["--start-method has no effect"]),
        ("--rdzv-conf timeout=9,is_host=1 t.py", {}, ["--rdzv-conf (timeout, is_host) has no effect"]),
        ("--rdzv-conf '' t.py", {}, []),
        ("--event-log-handler null t.py", {}, []),
        ("--event-log-handler mine t.py", {}, ["--event-log-handler has no effect"]),
        ("--logs-specs mine t.py", {}, ["--logs-specs has no effect"]),
        ("--use-env t.py", {}, ["--use-env has no effect"]),
        ("--rdzv-backend etcd --rdzv-endpoint e:2379 t.py", {}, ["--rdzv-backend etcd has no effect"]),
        ("--rdzv-id j t.py", {}, ["--rdzv-id not used"]),
        ("--master-addr localhost t.py", {}, []),
        ("--standalone --rdzv-id j --master-port 1 t.py", {}, ["--rdzv-id, --master-port not used"]),
        ("--rdzv-backend c10d --master-port 1 t.py", {}, ["--master-port not used"]),
        ("--rdzv-endpoint h:1 --master-port 1 t.py", {}, ["--master-port not used"]),
        ("--rdzv-backend c10d --rdzv-endpoint h:1 --rdzv-id j t.py", {}, []),
    ],
)
def test_notes_say_what_has_no_effect(line: str, environ: dict[str, str], words: list[str]) -> None:
    notes = parse(line, **environ).notes
    assert len(notes) == len(words)
    for note, begin in zip(notes, words, strict=True):
        assert note.startswith(begin)
        assert "\n" not in note


def test_etcds_address_is_not_node_0s() -> None:
    options = parse("--rdzv-backend etcd --rdzv-endpoint e:2379 t.py")
    assert (options.rendezvous.master_addr, options.rendezvous.master_port) == (None, None)


def test_a_file_for_a_store_is_not_an_address() -> None:
    options = parse("--rdzv-backend c10d --rdzv-conf store_type=file --rdzv-endpoint /tmp/x t.py")
    assert (options.rendezvous.master_addr, options.rendezvous.master_port) == (None, None)


# complaints


@pytest.mark.parametrize(
    ("line", "seen", "fix"),
    [
        ("", "no script", "phalanx run train.py"),
        ("--standalone", "no script", "phalanx run train.py"),
        ("-g 4", "no script", "phalanx run train.py"),
        ("''", "no script", "phalanx run train.py"),
        ("-g 8,x t.py", '-g is "8,x": "x" is not', "-g 8 "),
        ("-g 0 t.py", '-g is "0"', "-g 8 "),
        ("-g 1025 t.py", '-g is "1025": 1025 is more than 1024', "-g 8 "),
        ("-g 8,99999999 t.py", "99999999 is more than 1024", "-g 8 "),
        ("--nproc-per-node 1025 t.py", "1025 is more than 1024", "--nproc-per-node 4 "),
        ("--hosts a:1025 t.py", "a takes at most 1024 slots, not 1025", "--hosts a:8,b:2 "),
        ("--hosts a:0-1024 t.py", "names device 1024; the highest is 1023", "--hosts a:8,b:2 "),
        ("-n 100000 t.py", "100000 is more than 16384", "-n 2 "),
        ("--node-timeout 9999h t.py", "it is more than a year", "--node-timeout 15m "),
        ("-g '' t.py", '-g is ""', "-g 8 "),
        ("-g -1 t.py", '-g is "-1"', "-g 8 "),
        ("-g 8,0 t.py", "0 is less than 1", "-g 8 "),
        ("-g train.py", '-g is "train.py"', "-g 8 "),
        ("-g", "-g needs a value", "-g 8 "),
        ("--grace=-- t.py", "--grace ", "--grace 15m "),  # Python 3.13 takes it as a value, older ones do not
        ("--slots --cpu t.py", "--slots needs a value", "--slots 8 "),
        ("-n 1 -g 8,2 t.py", "-g 8,2 is for 2 nodes, but there is 1", "-n 2 -g 8,2 -i 0"),
        ("-n 2 -g 8,2,1 t.py", "for 3 nodes, but there are 2", "-n 3"),
        (
            "-g 4 --nproc-per-node 2 t.py",
            "-g 4 and --nproc-per-node 2 contradict",
            "without --nproc-per-node",
        ),
        ("-g 4 --nproc_per_node gpu t.py", "-g 4 and --nproc_per_node gpu contradict", "without"),
        ("-n 2 -g 8,2 -i 1 --nproc-per-node 8 t.py", "-g 8,2 and --nproc-per-node 8 contradict", "without"),
        ("--nnodes 0 t.py", '--nnodes is "0"', "--nnodes 2"),
        ("-n 0 t.py", '-n is "0"', "-n 2"),
        ("--nnodes 2:1 t.py", "the minimum, 2, is more than the maximum, 1", "--nnodes 2"),
        ("--nnodes 1:2:3 t.py", "more than one colon", "--nnodes 2"),
        ("--nnodes two t.py", '"two" is not a whole number', "--nnodes 2"),
        ("--max-restarts -1 t.py", "-1 is less than 0", "--max-restarts 3"),
        ("--max-restarts many t.py", '"many" is not', "--max-restarts 3"),
        ("--master-port 70000 t.py", "70000 is more than 65535", "--master-port 29500"),
        ("--nproc-per-node 0 t.py", "0 is less than 1", "--nproc-per-node 4"),
        ("--nproc-per-node abc t.py", '"abc" is not', "--nproc-per-node 4"),
        ("-i 1 t.py", "-i 1 is beyond the last node", "--nnodes 2 --node-rank 1"),
        ("-n 2 -i 2 t.py", "there are 2", "--nnodes 3 --node-rank 2"),
        ("-n 1 --spares 1 -i 1 t.py", "-i 1 is beyond the last node: there is 1", "--nnodes 2 --node-rank 1"),
        ("-n 2 --spares 1 -i 3 t.py", "-i 3 is beyond the last node: there are 3", "--nnodes 4"),
        ("--spares -1 t.py", "-1 is less than 0", "--spares 3"),
        ("--spares 1 --hosts a,b t.py", "--spares 1 and --hosts a,b", "-n 2 --spares 1 --master"),
        ("-n 1:2 --hosts a,b t.py", "-n 1:2 and --hosts a,b", "-n 1:2 --master HOST"),
        ("--snapshot-every often t.py", "neither a number of steps nor a time", "--snapshot-every 30s"),
        ("--stall-timeout soon t.py", "it is not a duration", "--stall-timeout 30s"),
        ("--preempt-signal FOO t.py", '"FOO" is not a signal', "--preempt-signal SIGTERM,SIGUSR1"),
        ("--preempt-signal KILL t.py", "no process can handle SIGKILL", "--preempt-signal"),
        ("--standalone --nnodes 2 t.py", "--standalone and --nnodes 2 contradict", "--standalone"),
        ("--env FOO t.py", '--env is "FOO": it has no =', "--env FOO=VALUE"),
        ("--env =1 t.py", "the name is missing", "--env NAME=VALUE"),
        ("--signals-to-handle SIGFOO t.py", '"SIGFOO" is not a signal', "SIGTERM"),
        ("--signals-to-handle SIGKILL t.py", "no process can handle SIGKILL", "SIGTERM"),
        ("--signals-to-handle '' t.py", "is not a signal", "SIGTERM"),
        ("--keep-warm soon t.py", '--keep-warm is "soon"', "--keep-warm 15m"),
        ("--keep-warm 0 t.py", "it must be more than 0", "--keep-warm 15m"),
        ("--keep-warm 5d t.py", "not a duration", "--keep-warm 15m"),
        ("--color red t.py", '--color is "red"', "--color auto"),
        ("--stdin first t.py", '"first" is not', "--stdin 0"),
        ("--show-ranks a t.py", '"a" is not', "--show-ranks 0,4-7"),
        ("--show-ranks 7-4 t.py", "4 is less than 7", "--show-ranks"),
        ("--show-ranks 0-99999999999 t.py", "more than", "--show-ranks"),
        ("--local-ranks-filter 0,,1 t.py", "a number is missing", "--local-ranks-filter"),
        ("--devices 0,x t.py", '"x" is not a device', "--devices 0,2,5"),
        ("--devices '' t.py", "a device is missing", "--devices 0,2,5"),
        ("--preload a-b t.py", '"a-b" is not the name of a module', "--preload"),
        ("--cpu --devices 0 t.py", "--cpu and --devices 0 contradict", "--cpu"),
        ("--cpu --nproc-per-node gpu t.py", "--cpu and --nproc-per-node gpu contradict", "--cpu"),
        ("--no-python -m t", "--no-python and --module contradict", "-m package.module"),
        ("--tee 4 t.py", '--tee is "4"', "--tee 3"),
        ("-r 0:1;1:2 t.py", '-r is "0:1;1:2"', "-r 3"),
        ("--numa-binding near t.py", '--numa-binding is "near"', "--numa-binding node"),
        ("--start-method thread t.py", '--start-method is "thread"', "spawn"),
        ("--rdzv-backend zeus t.py", '--rdzv-backend is "zeus"', "static"),
        ("--rdzv-endpoint head t.py", "it has no port", "--rdzv-endpoint head:29500"),
        ("--rdzv-endpoint head:99999 t.py", "99999 is more than", "localhost:29500"),
        ("--rdzv-endpoint 'a b:1' t.py", '"a b" is not the name', "localhost:29500"),
        ("--master-addr 'a b' --master-port 1 t.py", '"a b" is not the name', "--master-addr 127.0.0.1"),
        ("--rdzv-conf nothing t.py", '"nothing" is not key=value', "timeout=900"),
        ("--shutdown-timeout -3 t.py", '--shutdown-timeout is "-3"', "--shutdown-timeout 30"),
        ("--linger always t.py", '--linger is "always"', "--linger 2m"),
        ("--shutdown-timeout nan t.py", '--shutdown-timeout is "nan"', "--shutdown-timeout 30"),
        ("--monitor-interval often t.py", "not a number", "--monitor-interval"),
        ("--print-completion fish", '--print-completion is "fish"', "--print-completion bash"),
        ("--standalone=yes t.py", "--standalone takes no value", "--standalone …"),
        ("--pass-local-rank=plus t.py", "--pass-local-rank has an unknown value", "=underscore"),
        ("--json t.py", "not an option of phalanx run, but of phalanx plan", "phalanx plan --json"),
        ("--nproc-per-nodes 2 t.py", "did you mean --nproc-per-node?", "--nproc-per-node"),
        ("--nporc_per_node=2", "did you mean --nproc_per_node?", "--nproc_per_node"),
        ("--num_processes 2 t.py", "did you mean -g?", "-g"),
        ("--num-gpu=2 t.py", "did you mean -g?", "phalanx run -g 2 …"),
        ("-np 2 t.py", "-np is not an option of phalanx run; did you mean -g?", "phalanx run -g 2 …"),
        ("--num-gpu t.py", "did you mean -g?", "phalanx run -g …"),
        ("--lr 0.1 t.py", "--lr is not an option of phalanx run", "--help"),
        ("-x t.py", "-x is not an option of phalanx run", "--help"),
        (
            "--dup=a t.py",
            "--duplicate-stdout-filters, --duplicate-stderr-filters",
            "--duplicate-stdout-filters",
        ),
    ],
)
def test_complaints(line: str, seen: str, fix: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse(line)
    assert seen in caught.value.what
    assert fix in caught.value.fix
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("environ", "seen", "fix"),
    [
        ({"PET_MAX_RESTARTS": "x"}, 'PET_MAX_RESTARTS is "x"', "PET_MAX_RESTARTS=3"),
        ({"PET_MASTER_PORT": ""}, 'PET_MASTER_PORT is ""', "PET_MASTER_PORT=29500"),
        ({"PET_STANDALONE": "true"}, 'PET_STANDALONE is "true"', "PET_STANDALONE=1"),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"}, 'TORCH_ELASTIC_SHUTDOWN_TIMEOUT is "x"', "TIMEOUT=30"),
        (
            {"PET_STANDALONE": "1", "PET_NNODES": "2"},
            "PET_STANDALONE=1 and PET_NNODES=2 contradict",
            "--standalone",
        ),
    ],
)
def test_complaints_name_the_variable(environ: dict[str, str], seen: str, fix: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse("t.py", **environ)
    assert seen in caught.value.what
    assert fix in caught.value.fix


def test_env_without_a_value_says_that_it_is_inherited() -> None:
    with pytest.raises(OptionError) as caught:
        parse("--env FOO t.py", FOO="1")
    assert any("inherit" in line for line in caught.value.details)


# texts


@pytest.mark.parametrize("line", ["-h", "--help", "--he", "-g 4 -h", "--unknown --help", "-h -g x"])
def test_help(line: str) -> None:
    with pytest.raises(HelpRequested) as caught:
        parse(line)
    text = caught.value.text
    assert text.startswith("usage: phalanx run ")
    assert text.index("--slots") < text.index("--log-dir") < text.index("--help-all")
    assert 12 <= text.count("\n  -") <= 18
    assert len(text.splitlines()) <= 40  # fits a screen
    assert "--json" not in text
    assert "--rdzv-conf" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_help_of_all_options() -> None:
    with pytest.raises(HelpRequested) as caught:
        parse("--help-all")
    text = caught.value.text
    assert text.index("--slots") < text.index("--nproc-per-node") < text.index("--rdzv-conf")
    assert all((f"\n{section}:" in text) == (not section.startswith("Only")) for section in SECTIONS)
    assert all(option.name in text for option in OPTIONS if not option.only)
    assert "--json" not in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(("verb", "own"), [("plan", "--json"), ("chaos", "--kill-every")])
def test_help_of_a_verb_that_takes_the_options_of_run(verb: str, own: str) -> None:
    parse_verb = {"plan": parse_plan, "chaos": parse_chaos}[verb]
    texts = []
    for option in ("--help", "--help-all"):
        with pytest.raises(HelpRequested) as caught:
            parse_verb([option], {})
        texts.append(caught.value.text)
    short, long = texts
    assert short.startswith(f"usage: phalanx {verb} ")
    assert own in short
    assert "--slots" not in short
    assert "--slots" in long
    assert own in long


@pytest.mark.parametrize(
    ("text", "args", "note"),
    [
        ("", "-g 2", "-g 2 is passed to t.py. Options of phalanx go before the script: phalanx run -g 2 t.py"),
        ("", "--lr 1 --slots=2 x", "phalanx run --slots=2 t.py --lr 1 x"),
        ("", "--cpu x", "phalanx run --cpu t.py x"),
        ("parser.add_argument('-g', type=int)", "-g 2", None),
        ("import fire", "-g 2", None),
        ("", "--lr 1 -h", None),
        ("", "x -- -g 2", None),
        ("", "x", None),
    ],
)
def test_options_after_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, args: str, note: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.py").write_text(text)
    found = misplaced(parse(f"t.py {args}").script)
    assert (found is None) == (note is None)
    assert (note or "") in (found or "")


def test_every_option_says_what_it_sets() -> None:
    """A field of a group, a variable of the workers, something that depends on other options too, or nothing."""
    combined = {
        *("slots", "nproc_per_node", "nnodes", "hosts", "hostfile"),  # how many nodes and workers
        *("module", "no_python", "run_path", "env"),
        *("master", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint", "rdzv_id"),
        *("page", "no_page"),
        *("help", "help_all", "print_completion"),
    }
    free = {
        option.dest for option in OPTIONS if not (option.field or option.exports or option.no_effect or option.only)
    }
    assert free == combined
    known = {f"{group}.{field.name}" for group, kind in GROUPS.items() for field in dataclass_fields(kind)}
    set_ = [option.field for option in OPTIONS if option.field]
    assert len(set_) == len(set(set_))
    assert set(set_) <= known


@pytest.mark.parametrize("group", GROUPS.values())
def test_groups_are_small(group: type[Any]) -> None:
    assert len(dataclass_fields(group)) <= 15


def test_no_name_is_taken_twice() -> None:
    names = [name for option in OPTIONS for name in option.spellings]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("line", "environ", "use"),
    [
        ("t.py", {}, None),
        ("t.py", {"TERM": "xterm", "NO_COLOR": ""}, None),
        ("t.py", {"NO_COLOR": "1"}, False),
        ("t.py", {"TERM": "dumb"}, False),
        ("--color always t.py", {"NO_COLOR": "1", "TERM": "dumb"}, True),
        ("--color never t.py", {}, False),
    ],
)
def test_colors_are_used_on_a_terminal_that_wants_them(line: str, environ: dict[str, str], use: bool | None) -> None:
    assert parse(line).output.use_color(environ) is use
