"""torchrun's options compared with torchrun itself: they have the same meaning, and invalid values are refused."""

from __future__ import annotations

import contextlib
import shlex
from typing import Any

import pytest
import torch.distributed.launch
import torch.distributed.run
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from phalanx.cli.options import HelpRequested, RunOptions, parse_run
from phalanx.cli.options.table import OPTIONS
from phalanx.errors import OptionError
from tests.cli.command_line import fields, parse
from tests.cli.torchrun import Refused, decide


def comparable(options: RunOptions, theirs: dict[str, Any]) -> dict[str, Any]:
    """Return our fields that torchrun has too, with torchrun's default where ours is "not given"."""
    ours = fields(options, theirs)
    for name in ("output.redirects", "output.tee"):
        ours[name] = {rank: ours[name].of(rank)[rank] for rank in range(10)}
    if ours["workers.count"] is None and theirs["workers.count"] == 1:
        ours["workers.count"] = 1
    address = "rendezvous.master_addr"
    if ours[address] is None and ours["nodes.max_nodes"] > 1 and theirs[address] == "127.0.0.1":
        ours[address] = "127.0.0.1"  # with several nodes this default is always wrong, so phalanx has none
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
    "PET_LOGS_SPECS": "none",  # torchrun has no variable for these two
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
    """Each is declared the same: names, default, variable, choices."""
    row = next(option for option in OPTIONS if option.name in action.option_strings)
    assert set(row.torchrun_spellings) == set(action.option_strings)
    assert row.origin == "torchrun"
    if action.dest == "help":
        return
    assert row.dest == action.dest
    assert (row.kind is None) == (action.nargs == 0)
    # An option that is not given is None here; torchrun has a default that means the same.
    silent = {"nproc_per_node": "1", "node_rank": 0, "master_addr": "127.0.0.1", "local_ranks_filter": ""}
    if row.kind is not None and not isinstance(action.default, list):
        expected = None if row.default is None else (action.type or str)(row.default)
        assert expected == (None if silent.get(action.dest, object()) == action.default else action.default)
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


# Values that torchrun accepts and that do not contradict each other.
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


@pytest.mark.extended
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
        # torchrun waits ten minutes for a node that cannot join
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
