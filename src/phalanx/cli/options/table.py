"""Every option of `phalanx run`, one row each. Parser, help, completion and docs are made from it."""

from __future__ import annotations

from functools import partial

from phalanx.cli.options import values as kinds
from phalanx.cli.options.option import Option
from phalanx.cli.options.values import one_of

OFTEN = "Used most"
SIZE = "Workers and devices"
SCRIPT = "What is run"
OUTPUT = "Output"
START = "Starting and stopping"
NODES = "Several nodes, addresses"
IDLE = "Options of torchrun that are accepted, and have nothing left to do"
SECTIONS = (OFTEN, SIZE, SCRIPT, OUTPUT, START, NODES, IDLE)

_ours = partial(Option, origin="phalanx")

OPTIONS = (
    _ours(
        OFTEN,
        "--slots",
        "Workers on this node; with several nodes, the workers of each: 8,2.",
        kinds.SLOTS,
        short="-g",
    ),
    Option(OFTEN, "--module", "The script is a module, as in python -m.", short="-m"),
    Option(
        OFTEN,
        "--max-restarts",
        "How often a failure is got over. Not given: never; with phalanx.main, for as long as there is progress.",
        kinds.TIMES,
        "0",
    ),
    _ours(OFTEN, "--devices", "Only these devices, one worker each; 2 is what cuda:2 is here.", kinds.DEVICES),
    _ours(OFTEN, "--cpu", "CPU workers, though there are GPUs."),
    _ours(OFTEN, "--env", "Sets a variable in every worker; may be given again.", kinds.VARIABLE, repeated=True),
    _ours(OFTEN, "--checkpoints", "Folder of the checkpoints of a script that uses phalanx.main.", kinds.FOLDER),
    _ours(OFTEN, "--checkpoint-every", "How often they are made: 100 (steps), 10m (unless told).", kinds.INTERVAL),
    _ours(
        OFTEN,
        "--snapshot-every",
        "How often the state is copied to memory that outlives the workers: 100 (steps), 30s, off. Default: 30s; a "
        "model sharded by FSDP: every step, or as often as costs at most 3% of the time.",
        kinds.SNAPSHOTS,
    ),
    Option(OFTEN, "--log-dir", "Folder for the log files of the workers.", kinds.FOLDER),
    _ours(OFTEN, "--show-ranks", "Shows the output of these ranks only (global ranks).", kinds.RANKS),
    _ours(
        OFTEN,
        "--screen",
        "Shows the run as a whole, on the full screen of this terminal; q leaves it, and the run goes on.",
    ),
    _ours(
        OFTEN,
        "--page",
        "Shows it in a browser too, by a link that is printed. Not given: on a terminal, with one node.",
    ),
    _ours(
        OFTEN,
        "--check-collectives",
        "Compares every collective of all ranks before it is started: two that differ are told at once.",
    ),
    _ours(OFTEN, "--json", "Prints the plan as JSON.", only="plan"),
    _ours(OFTEN, "--kill-every", "Pause between two faults, on average.", kinds.DURATION, "5s", only="chaos"),
    _ours(OFTEN, "--seed", "Repeats the faults of another time. Not given: a random one.", kinds.ID, only="chaos"),
    _ours(
        OFTEN,
        "--faults",
        "Which kinds: kill, segv, abrt, bus, term, stop (a signal to a rank), store, fork server.",
        kinds.FAULTS,
        "kill",
        only="chaos",
    ),
    _ours(OFTEN, "--times", "So many faults, and no more.", kinds.TIMES, only="chaos"),
    _ours(OFTEN, "--victims", "Signals go to these ranks only.", kinds.RANKS, only="chaos"),
    Option(OFTEN, "--help", "Shows this text.", short="-h", pet=False),
    Option(
        SIZE,
        "--nproc-per-node",
        "Workers on this node. Not given: one for each visible GPU, or one CPU worker where there is none "
        "(torchrun starts 1 worker then).",
        kinds.WORKERS,
    ),
    _ours(SIZE, "--isolate", "Each worker sees its own device only."),
    _ours(
        SIZE,
        "--share-gpu",
        "More workers than GPUs: several NCCL ranks on each, to try and debug a script, not for speed. A worker sees "
        "its GPU as device 0, and LOCAL_RANK is 0.",
    ),
    Option(
        SIZE,
        "--virtual-local-rank",
        "As --isolate, and LOCAL_RANK is 0 in every worker: its device is always number 0.",
    ),
    Option(
        SIZE,
        "--numa-binding",
        "Binds each worker to the cores near its GPU.",
        one_of("node", "socket", "exclusive", "core-complex"),
        pet=False,
    ),
    Option(SIZE, "--role", "Name of the workers' role; ROLE_NAME in a worker.", kinds.NAME, "default"),
    Option(SCRIPT, "--no-python", "The script is a program of its own: it is run without Python."),
    Option(SCRIPT, "--run-path", "Runs the script with runpy.run_path; goes before --no-python."),
    _ours(
        SCRIPT,
        "--pass-local-rank",
        "Gives the script --local-rank=N, as the old launcher did; with =underscore, --local_rank=N.",
        attached=("dash", "underscore"),
    ),
    _ours(SCRIPT, "--stdin", "The rank that reads this terminal.", kinds.STDIN, "0"),
    Option(
        OUTPUT,
        "--tee",
        "Streams that go to a log file and to the console: 1 stdout, 2 stderr, 3 both, or by local rank.",
        kinds.STREAMS,
        "0",
        short="-t",
    ),
    Option(
        OUTPUT,
        "--redirects",
        "Streams that go to a log file only; numbers as for --tee.",
        kinds.STREAMS,
        "0",
        short="-r",
    ),
    Option(
        OUTPUT,
        "--log-line-prefix-template",
        "What stands before a line of a worker: ${role_name}, ${local_rank}, ${rank}, ${hostname}. "
        "Not given: TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE.",
        kinds.TEMPLATE,
        origin="torchrun 2.15",
    ),
    Option(OUTPUT, "--local-ranks-filter", "Shows the output of these local ranks only.", kinds.RANKS),
    Option(
        OUTPUT,
        "--duplicate-stdout-filters",
        "Copies lines of stdout that hold one of these texts to a file of their own; ,, is a comma.",
        kinds.FILTERS,
    ),
    Option(OUTPUT, "--duplicate-stderr-filters", "The same for stderr.", kinds.FILTERS),
    _ours(OUTPUT, "--color", "Colours on the console.", one_of("auto", "always", "never"), "auto"),
    _ours(OUTPUT, "--no-page", "No page for a browser."),
    _ours(
        OUTPUT,
        "--page-at",
        "Where the page listens. Not given: 127.0.0.1:29580, or the next free port; only this machine reaches that.",
        kinds.ENDPOINT,
    ),
    _ours(OUTPUT, "--timings", "Shows at the end how long each rank computed and waited, though none is slow."),
    _ours(OUTPUT, "--quiet", "No lines of phalanx's own but errors."),
    Option(
        OUTPUT,
        "--event-log-handler",
        "console prints the run's events; other handlers of torch are not called.",
        kinds.NAME,
        "null",
        no_effect="handlers that are registered in torch are not called",
    ),
    Option(
        OUTPUT,
        "--print-completion",
        "Prints a script that completes these options in a shell.",
        one_of("bash", "zsh", "tcsh"),
        origin="torchrun 2.15",
        pet=False,
    ),
    _ours(START, "--preload", "Modules to import once, before the workers are forked.", kinds.MODULES),
    _ours(START, "--fresh", "Starts every worker as a new Python, instead of a fork of one that has torch."),
    _ours(START, "--restart-window", "A run that is well this long may restart as often again.", kinds.DURATION, "1h"),
    _ours(
        START, "--worker-timeout", "A rank that can be replaced, and is silent this long, is.", kinds.DURATION, "60s"
    ),
    _ours(
        START,
        "--stall-timeout",
        "Says which rank is to blame, where and why, once no rank has gone on for so long and for several usual steps.",
        kinds.DURATION_OR_OFF,
        "30s",
    ),
    _ours(
        START,
        "--on-hang",
        "What then: only report it, kill the rank that is to blame (the others recover), or stop the run.",
        kinds.one_of("report", "kill", "stop"),
        "report",
    ),
    _ours(START, "--keep-warm", "Keeps torch imported this long for the next run.", kinds.DURATION),
    _ours(START, "--no-warm", "Does not use what an earlier run kept warm."),
    Option(
        START,
        "--signals-to-handle",
        "Signals that are passed on to the workers.",
        kinds.SIGNALS,
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    ),
    Option(
        START,
        "--shutdown-timeout",
        "Seconds from asking workers to stop to killing them. Not given: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, "
        "or 30 (5 once a rank has failed).",
        kinds.SECONDS,
    ),
    _ours(
        START,
        "--preempt-signal",
        "Signals that make a checkpoint and end the run with 75, where a script keeps one; or none.",
        kinds.PREEMPTION,
        "SIGTERM",
    ),
    _ours(START, "--grace", "How long that may take.", kinds.DURATION, "30s"),
    _ours(
        START,
        "--linger",
        "After a successful run, how long to wait for processes that ranks left running, before they are ended. "
        "0: end them at once. forever: leave them running and exit.",
        kinds.LINGER,
        "2m",
    ),
    Option(
        NODES,
        "--nnodes",
        "Number of nodes, or the least and the most: then nodes may come and go.",
        kinds.NODES,
        "1:1",
        aliases=("-n", "--nodes"),
    ),
    Option(
        NODES,
        "--node-rank",
        "Id of this node, from 0 on. Not given: 0 on one node.",
        kinds.ID,
        aliases=("-i", "--id"),
    ),
    _ours(NODES, "--master", "Node 0: its name or address, and its port if it is not 29500.", kinds.ENDPOINT),
    _ours(NODES, "--hosts", "Starts all nodes from here, over ssh: a:8,b:2 workers, a:0-7,b:1,3 devices.", kinds.HOSTS),
    _ours(NODES, "--hostfile", "The same from a file, as Open MPI, DeepSpeed or Horovod write it.", kinds.FILE),
    _ours(NODES, "--join-timeout", "How long to wait until nodes are here, or enough again.", kinds.DURATION, "5m"),
    _ours(NODES, "--last-call", "With MIN:MAX: how long to wait for more, once MIN are here.", kinds.DURATION, "3s"),
    _ours(NODES, "--spares", "So many more nodes, or workers of one node, stand by for a lost one.", kinds.TIMES, "0"),
    _ours(NODES, "--node-timeout", "A node that is silent this long is lost.", kinds.DURATION, "15s"),
    _ours(NODES, "--token-file", "The secret that lets nodes in. Not given: PHALANX_TOKEN, or your own.", kinds.FILE),
    _ours(NODES, "--no-auth", "Goes without a token: whoever reaches the port gets in."),
    Option(NODES, "--master-addr", "Address of node 0. Not given: 127.0.0.1 on one node.", kinds.ADDRESS),
    Option(
        NODES,
        "--master-port",
        "Port on node 0. Not given: a free one on one node, 29500 with several.",
        kinds.PORT,
    ),
    Option(NODES, "--local-addr", "Address of this node, as the others see it.", kinds.ADDRESS),
    Option(NODES, "--standalone", "One node, a free port, a random id, whatever the other --rdzv options say."),
    Option(
        NODES,
        "--rdzv-backend",
        "How nodes meet. Here they always meet at node 0, so only the address depends on it.",
        one_of("static", "c10d", "etcd", "etcd-v2"),
        "static",
    ),
    Option(NODES, "--rdzv-endpoint", "Address and port in one; port 0 takes a free one.", kinds.ENDPOINT, ""),
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
        "--monitor-interval",
        "How often torchrun looks whether the workers live.",
        kinds.SECONDS,
        "0.1",
        no_effect="the kernel tells at once when a worker ends",
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
    return tuple(option for option in OPTIONS if option.only in ("", verb))
