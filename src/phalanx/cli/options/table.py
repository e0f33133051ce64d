"""Every option of `phalanx run`, `plan` and `chaos`, declared once.

The parser, the help text, docs/reference/options.md, shell completion, RunOptions and the plan all follow from these
rows. Only options whose meaning depends on each other, such as -g and --nproc-per-node, have no `field`: checks.py
combines them.
"""

from __future__ import annotations

import operator
import os
from functools import partial
from typing import Any

from phalanx.cli.options import values as kinds
from phalanx.cli.options.option import Option
from phalanx.cli.options.values import one_of
from phalanx.contract.variables import CHECKPOINT_EVERY, CHECKPOINT_KEY, CHECKPOINTS, ON_NAN, SNAPSHOT_EVERY

OFTEN = "Used most"
PLAN = "Only phalanx plan"
CHAOS = "Only phalanx chaos"
SIZE = "Workers and devices"
SCRIPT = "What is run"
OUTPUT = "Output"
START = "Starting and stopping"
NODES = "Several nodes, addresses"
IDLE = "torchrun options that are accepted and have no effect"
SECTIONS = (OFTEN, PLAN, CHAOS, SIZE, SCRIPT, OUTPUT, START, NODES, IDLE)

_LOCAL_RANK_OPTIONS = {False: "", "dash": "--local-rank", "underscore": "--local_rank"}

_ours = partial(Option, origin="phalanx")


def _absolute(path: str | None) -> str | None:
    return path and os.path.abspath(path)


def _or_empty(value: tuple[Any, ...] | None) -> tuple[Any, ...]:
    return value or ()


def _or_zero(value: float | None) -> float:
    return value or 0.0


OPTIONS = (
    _ours(
        OFTEN,
        "--slots",
        "Workers per node. One number, or one per node: 8,2.",
        kinds.SLOTS,
        short="-g",
        brief="Workers per node, or one number per node: 8,2.",
    ),
    Option(OFTEN, "--module", "Run the script as a module, as python -m does.", short="-m"),
    Option(
        OFTEN,
        "--max-restarts",
        "Maximum number of restarts. With phalanx.main and no value: restart as long as training makes progress.",
        kinds.TIMES,
        "0",
        field="recovery.max_restarts",
    ),
    _ours(
        OFTEN,
        "--devices",
        "Use only these devices, one worker per device. IDs are CUDA indices on this node.",
        kinds.DEVICES,
        field="workers.devices",
        brief="Use only these GPUs, one worker per GPU.",
    ),
    _ours(
        SIZE,
        "--share-gpu",
        "Allow more workers than GPUs: several NCCL ranks share a GPU. For debugging, not for speed. A worker sees its "
        "GPU as device 0, and LOCAL_RANK is 0.",
        field="workers.share_gpu",
    ),
    _ours(OFTEN, "--cpu", "Use CPU workers even if GPUs are available.", field="workers.cpu"),
    _ours(
        OFTEN,
        "--env",
        "Set an environment variable in every worker. Repeatable.",
        kinds.VARIABLE,
    ),
    _ours(
        OFTEN,
        "--checkpoints",
        "Checkpoint folder of a script that uses phalanx.main.",
        kinds.FOLDER,
        exports=CHECKPOINTS,
        convert=_absolute,
        brief="Checkpoint folder, with phalanx.main.",
    ),
    _ours(
        OFTEN,
        "--checkpoint-every",
        "Checkpoint interval: steps (100) or time (10m). Default: 10m.",
        kinds.INTERVAL,
        exports=CHECKPOINT_EVERY,
        brief="Interval: steps (100) or time. Default: 10m.",
    ),
    _ours(
        START,
        "--checkpoint-key",
        "File with a key that signs checkpoints; only signed ones are loaded. All nodes need it, with mode 600.",
        kinds.KEY_FILE,
        exports=CHECKPOINT_KEY,
        convert=_absolute,
    ),
    Option(
        OFTEN,
        "--nnodes",
        "Number of nodes, or MIN:MAX for a run whose nodes may join and leave.",
        kinds.NODES,
        "1:1",
        aliases=("-n", "--nodes"),
        brief="Number of nodes, or MIN:MAX.",
    ),
    _ours(
        OFTEN,
        "--hosts",
        "Start all nodes over ssh: a:8,b:2 (workers) or a:0-7,b:1,3 (devices).",
        kinds.HOSTS,
        brief="Start all nodes over ssh: a:8,b:2.",
    ),
    _ours(
        OFTEN,
        "--name",
        "Name of the run, for phalanx ps, logs, why and all other commands. If it is taken, the run is called NAME.2. "
        "Default: script, date and time.",
        kinds.RUN_NAME,
        field="output.name",
        brief="Name of the run. Default: script and time.",
    ),
    Option(OFTEN, "--log-dir", "Folder for the workers' log files.", kinds.FOLDER, field="output.log_dir"),
    _ours(OUTPUT, "--show-ranks", "Show the output of these global ranks only.", kinds.RANKS, field="output.ranks"),
    _ours(
        OFTEN,
        "--screen",
        "Show the run in a full-screen terminal view. q closes the view; the run continues.",
        field="viewers.screen",
        brief="Show a full-screen view. q closes it.",
    ),
    _ours(
        OFTEN,
        "--page",
        "Serve a browser page and print its link. Default: on, if run on a terminal with one node.",
    ),
    Option(
        OFTEN,
        "--help",
        "Show the options that are used most.",
        short="-h",
        pet=False,
        brief="Show this.",
    ),
    _ours(OFTEN, "--help-all", "Show all options."),
    _ours(PLAN, "--json", "Print the plan as JSON.", only="plan"),
    _ours(CHAOS, "--kill-every", "Average time from a recovery to the next fault.", kinds.DURATION, "5s", only="chaos"),
    _ours(CHAOS, "--seed", "Seed of the fault plan. Default: random.", kinds.ID, only="chaos"),
    _ours(
        CHAOS,
        "--faults",
        "Fault kinds: kill, segv, abrt, bus, term, stop (a signal to a rank); store, forkserver (SIGKILL to it), "
        "store-stop, forkserver-stop (SIGSTOP). Several at once: store+kill.",
        kinds.FAULTS,
        "kill",
        only="chaos",
    ),
    _ours(CHAOS, "--times", "Maximum number of faults.", kinds.TIMES, only="chaos"),
    _ours(CHAOS, "--victims", "Send signals to these ranks only.", kinds.RANKS, only="chaos"),
    Option(
        SIZE,
        "--nproc-per-node",
        "Workers on this node. Default: one per visible GPU, or one CPU worker without GPUs (torchrun always starts 1 "
        "by default).",
        kinds.WORKERS,
    ),
    _ours(SIZE, "--isolate", "Make only its own device visible to each worker.", field="workers.isolate"),
    Option(
        SIZE,
        "--virtual-local-rank",
        "Like --isolate, and set LOCAL_RANK=0 in every worker: its device is always 0.",
        field="workers.virtual_local_rank",
    ),
    Option(
        SIZE,
        "--numa-binding",
        "Bind each worker to the CPU cores near its GPU.",
        one_of("node", "socket", "exclusive", "core-complex"),
        pet=False,
        field="workers.numa_binding",
    ),
    Option(SIZE, "--role", "Role of the workers (ROLE_NAME).", kinds.NAME, "default", field="workers.role"),
    Option(SCRIPT, "--no-python", "Run the script as a program, without Python."),
    Option(SCRIPT, "--run-path", "Run the script with runpy.run_path. Overrides --no-python."),
    _ours(
        SCRIPT,
        "--pass-local-rank",
        "Pass --local-rank=N to the script, as torch.distributed.launch did; =underscore passes --local_rank=N.",
        attached=("dash", "underscore"),
        field="script.local_rank_option",
        convert=_LOCAL_RANK_OPTIONS.get,
    ),
    _ours(
        SCRIPT,
        "--param",
        "Record a hyperparameter of the run, besides those in the arguments of the script. Repeatable.",
        kinds.PARAMETER,
        field="script.hyperparameters",
        convert=_or_empty,
    ),
    _ours(SCRIPT, "--stdin", "The rank that reads this terminal's input.", kinds.STDIN, "0", field="script.stdin_rank"),
    Option(
        OUTPUT,
        "--tee",
        "Streams to write to the console and to a log file: 1 stdout, 2 stderr, 3 both; or per local rank.",
        kinds.STREAMS,
        "0",
        short="-t",
        field="output.tee",
    ),
    Option(
        OUTPUT,
        "--redirects",
        "Streams to write to a log file only. Values as for --tee.",
        kinds.STREAMS,
        "0",
        short="-r",
        field="output.redirects",
    ),
    Option(
        OUTPUT,
        "--log-line-prefix-template",
        "Prefix of a worker's lines: ${role_name}, ${local_rank}, ${rank}, ${hostname}. "
        "Default: TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE.",
        kinds.TEMPLATE,
        origin="torchrun 2.15",
        field="output.line_prefix",
        fallback="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
    ),
    Option(
        OUTPUT,
        "--local-ranks-filter",
        "Show the output of these local ranks only.",
        kinds.RANKS,
        field="output.local_ranks",
    ),
    Option(
        OUTPUT,
        "--duplicate-stdout-filters",
        "Copy stdout lines that contain one of these texts to a separate file. ,, is a literal comma.",
        kinds.FILTERS,
        field="output.stdout_filters",
        convert=_or_empty,
    ),
    Option(
        OUTPUT,
        "--duplicate-stderr-filters",
        "The same for stderr.",
        kinds.FILTERS,
        field="output.stderr_filters",
        convert=_or_empty,
    ),
    _ours(
        OUTPUT,
        "--color",
        "Use colors on the console. auto: on a terminal, unless NO_COLOR is set or TERM=dumb.",
        one_of("auto", "always", "never"),
        "auto",
        field="output.color",
    ),
    _ours(OUTPUT, "--no-page", "Serve no browser page."),
    _ours(
        OUTPUT,
        "--page-at",
        "Address of the browser page. Default: 127.0.0.1:29580 or the next free port (this machine only).",
        kinds.ENDPOINT,
        field="viewers.page_at",
    ),
    _ours(
        OUTPUT,
        "--timings",
        "Show step timings of every rank at the end, even if no rank is slow.",
        field="output.timings",
    ),
    _ours(OUTPUT, "--quiet", "Print only errors of phalanx itself.", field="output.quiet"),
    _ours(
        OUTPUT,
        "--verbose",
        "Show the traceback of every failed rank at once, not only the cause of the failure at the end.",
        field="output.verbose",
    ),
    Option(
        OUTPUT,
        "--event-log-handler",
        "console prints the run's events.",
        kinds.NAME,
        "null",
        no_effect="handlers that are registered in torch are not called",
        field="output.event_log_handler",
    ),
    Option(
        OUTPUT,
        "--print-completion",
        "Print a shell completion script.",
        one_of("bash", "zsh", "tcsh"),
        origin="torchrun 2.15",
        pet=False,
    ),
    _ours(
        START,
        "--preload",
        "Modules to import once, before workers are forked.",
        kinds.MODULES,
        field="start.preload",
        convert=_or_empty,
    ),
    _ours(START, "--fresh", "Start every worker as a new interpreter instead of forking it.", field="start.fresh"),
    _ours(
        START,
        "--snapshot-every",
        "Snapshot interval: steps (100), time (30s) or off. A snapshot copies the state to memory that outlives the "
        "workers. Default: 30s; for FSDP every step, or as often as costs at most 3% of the time.",
        kinds.SNAPSHOTS,
        exports=SNAPSHOT_EVERY,
    ),
    _ours(
        START,
        "--restart-window",
        "Reset the restart count after this long without a failure.",
        kinds.DURATION,
        "1h",
        field="recovery.restart_window",
    ),
    _ours(
        START,
        "--worker-timeout",
        "Replace a worker, store or fork server that sends no heartbeat for this long.",
        kinds.DURATION,
        "60s",
        field="recovery.worker_timeout",
    ),
    _ours(
        START,
        "--stall-timeout",
        "Report a stall, with the rank to blame, after this long and several usual steps without progress.",
        kinds.DURATION_OR_OFF,
        "30s",
        field="hang.stall_timeout",
    ),
    _ours(
        START,
        "--check-collectives",
        "Compare every collective across ranks before it starts, and report a mismatch at once.",
        field="hang.check_collectives",
    ),
    _ours(
        START,
        "--on-hang",
        "Action on a stall: report it, kill the rank to blame (the others recover), or stop the run.",
        kinds.one_of("report", "kill", "stop"),
        "report",
        field="hang.action",
    ),
    _ours(
        START,
        "--on-nan",
        "Action on a loss or gradient that is NaN or infinite: report it, rollback (drop the update and skip the "
        "batch), or stop the run with exit code 65. For scripts that use run.step.",
        kinds.one_of("report", "rollback", "stop"),
        "report",
        exports=ON_NAN,
        convert=lambda action: "" if action == "report" else action,
    ),
    _ours(
        START,
        "--keep-warm",
        "Keep a warm fork server this long for the next run.",
        kinds.DURATION,
        field="start.keep_warm",
        convert=_or_zero,
    ),
    _ours(START, "--no-warm", "Do not use a warm fork server.", field="start.warm", convert=operator.not_),
    Option(
        START,
        "--signals-to-handle",
        "Signals to forward to the workers.",
        kinds.SIGNALS,
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        field="shutdown.signals",
    ),
    Option(
        START,
        "--shutdown-timeout",
        "Seconds between asking workers to stop and killing them. Default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 30 (5 "
        "after a failure).",
        kinds.SECONDS,
        field="shutdown.timeout",
        fallback="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    ),
    _ours(
        START,
        "--preempt-signal",
        "Signals that checkpoint and end the run with exit code 75, if the script keeps checkpoints; or none.",
        kinds.PREEMPTION,
        "SIGTERM",
        field="shutdown.preempt_signals",
    ),
    _ours(
        START, "--grace", "Time limit for that checkpoint.", kinds.DURATION, "30s", field="shutdown.checkpoint_timeout"
    ),
    _ours(
        START,
        "--linger",
        "How long to wait, after a successful run, for processes that ranks left running. 0: end them at once. "
        "forever: leave them running and exit.",
        kinds.LINGER,
        "2m",
        field="shutdown.linger",
    ),
    Option(
        NODES,
        "--node-rank",
        "Index of this node, starting at 0. Default: 0 with one node.",
        kinds.ID,
        aliases=("-i", "--id"),
        field="nodes.node_rank",
    ),
    _ours(NODES, "--master", "Name or address of node 0, and its port if it is not 29500.", kinds.ENDPOINT),
    _ours(NODES, "--hostfile", "Read the hosts from a file in Open MPI, DeepSpeed or Horovod format.", kinds.FILE),
    _ours(
        NODES,
        "--join-timeout",
        "How long to wait until enough nodes have joined.",
        kinds.DURATION,
        "5m",
        field="rendezvous.join_timeout",
    ),
    _ours(
        NODES,
        "--last-call",
        "With MIN:MAX: how long to wait for more nodes once MIN have joined.",
        kinds.DURATION,
        "3s",
        field="rendezvous.last_call",
    ),
    _ours(
        NODES,
        "--spares",
        "Number of spare nodes, or spare workers with one node.",
        kinds.TIMES,
        "0",
        field="nodes.spares",
    ),
    _ours(
        NODES,
        "--node-timeout",
        "Treat a node as lost after this long without a message.",
        kinds.DURATION,
        "15s",
        field="rendezvous.node_timeout",
    ),
    _ours(
        NODES,
        "--token-file",
        "File with the token that nodes join with. Default: PHALANX_TOKEN, or the user's own token file.",
        kinds.FILE,
        field="rendezvous.token_file",
    ),
    _ours(
        NODES,
        "--no-auth",
        "Accept nodes without a token: anyone who reaches the port can join.",
        field="rendezvous.no_auth",
    ),
    _ours(
        NODES,
        "--attach-from",
        "Which nodes may attach a debugger to a rank of another node: node 0 (leader), all, or none.",
        kinds.one_of("leader", "all", "none"),
        "leader",
        field="rendezvous.attach_from",
    ),
    Option(NODES, "--master-addr", "Address of node 0. Default: 127.0.0.1 with one node.", kinds.ADDRESS),
    Option(
        NODES,
        "--master-port",
        "Port on node 0. Default: a free port with one node, 29500 with several.",
        kinds.PORT,
    ),
    Option(
        NODES,
        "--standalone",
        "One node, a free port and a random id; overrides the other --rdzv options.",
        field="nodes.standalone",
    ),
    Option(
        NODES,
        "--rdzv-backend",
        "Rendezvous backend. Nodes always meet at node 0; only the address depends on this option.",
        one_of("static", "c10d", "etcd", "etcd-v2"),
        "static",
    ),
    Option(NODES, "--rdzv-endpoint", "Address and port. Port 0 takes a free port.", kinds.ENDPOINT, ""),
    Option(NODES, "--rdzv-id", "Id of the run.", kinds.NAME, "none"),
    Option(
        IDLE,
        "--rdzv-conf",
        "Settings of torchrun's rendezvous.",
        kinds.PAIRS,
        "",
        no_effect="torchrun's rendezvous, which it sets up, is not used",
    ),
    Option(
        IDLE,
        "--local-addr",
        "Address of this node that torchrun announces to the others: as MASTER_ADDR, if it is node 0.",
        kinds.ADDRESS,
        no_effect="the others use the address at which they reached node 0",
    ),
    Option(
        IDLE,
        "--monitor-interval",
        "How often torchrun polls its workers.",
        kinds.SECONDS,
        "0.1",
        no_effect="the kernel reports immediately when a worker ends",
    ),
    Option(
        IDLE,
        "--start-method",
        "How torchrun starts functions.",
        one_of("spawn", "fork", "forkserver"),
        "spawn",
        no_effect="workers are forked from a process that has imported torch, or with --fresh are new ones",
    ),
    Option(
        IDLE,
        "--logs-specs",
        "A plugin for torchrun's logs.",
        kinds.NAME,
        pet=False,
        no_effect="plugins for torchrun's logs are not loaded",
    ),
    Option(
        IDLE,
        "--use-env",
        "For the old launcher: LOCAL_RANK in the environment instead of an argument.",
        origin="torch.distributed.launch",
        no_effect="LOCAL_RANK is always in the environment (--pass-local-rank also makes it an argument)",
    ),
)


def options_of(verb: str) -> tuple[Option, ...]:
    """Return the options that a verb accepts."""
    return tuple(option for option in OPTIONS if option.only in ("", verb))
