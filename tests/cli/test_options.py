"""The command line: phalanx's own options as tables, and their help."""

from __future__ import annotations

import signal
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.main import VERBS, main
from phalanx.cli.options import HelpRequested, parse_chaos, parse_plan
from phalanx.cli.options.misplaced import misplaced
from phalanx.cli.options.run_options import GROUPS
from phalanx.cli.options.table import OPTIONS, SECTIONS
from tests.cli.command_line import fields, parse


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
        # torchrun calls this ambiguous, although it is one option with two spellings
        ("--nproc 2 --max 1 t.py", {"workers.count": 2, "recovery.max_restarts": 1}),
        # ambiguous words after the script are passed to the script
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


# texts


def test_help_of_all_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) >= 80] == []
    assert len(lines) <= 24  # fits a terminal of 80 columns and 24 rows
    assert {verb for line in lines for verb in line.split()[:2]} >= set(VERBS)


@pytest.mark.parametrize("line", ["-h", "--help", "--he", "-g 4 -h", "--unknown --help", "-h -g x"])
def test_help(line: str) -> None:
    with pytest.raises(HelpRequested) as caught:
        parse(line)
    text = caught.value.text
    assert text.startswith("usage: phalanx run ")
    assert text.index("--slots") < text.index("--log-dir") < text.index("--help-all")
    assert 12 <= text.count("\n  -") <= 16
    assert len(text.splitlines()) <= 24  # fits a terminal of 80 columns and 24 rows
    assert max(map(len, text.splitlines())) < 80
    assert "--json" not in text
    assert "--rdzv-conf" not in text


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
    """A field of a group, a variable of the workers, something that also depends on other options, or nothing."""
    combined = {
        *("slots", "nproc_per_node", "nnodes", "hosts", "hostfile"),  # these give the number of nodes and workers
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
