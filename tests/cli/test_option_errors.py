"""Every error about a command line: what was seen, and what to type."""

from __future__ import annotations

import pytest

from phalanx.errors import OptionError
from tests.cli.command_line import parse


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
        ("-n 16384 -g 1024 --master h t.py", "16777216 ranks: a run has at most 1048576", "-n 1024 -g 1024 "),
        ("--nnodes 2:16384 --nproc-per-node 65 --master-addr h t.py", "1064960 ranks", "-n 16131 -g 65 "),
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
        ("--grace=-- t.py", "--grace ", "--grace 15m "),  # Python 3.13 accepts it as a value, older versions do not
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
        ("--workers 2 t.py", "did you mean -g?", "-g 2"),
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
