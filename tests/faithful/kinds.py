"""The kinds of scripts: the words after the launcher's name, and what may differ from run to run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import zipapp
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

SCRIPTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "scripts")


@dataclass(frozen=True)
class Kind:
    """One script. Its file is NAME.py, or all of the folder NAME; it runs in a copy."""

    name: str
    script: tuple[str, ...] = ()  # default: NAME.py
    args: tuple[str, ...] = ()
    ranks: int = 2  # 1 where a script fails: with more, the launcher stops the others at any point
    env: Mapping[str, str] = field(default_factory=dict)
    input: str | None = None
    old_launcher: bool = False  # torch.distributed.launch beside phalanx run --pass-local-rank
    needs: tuple[str, ...] = ()  # packages
    ignore: tuple[str, ...] = ()  # patterns of files that differ between two runs of torchrun
    masks: tuple[str, ...] = ()  # regular expressions for what differs in its output and files
    prepare: Callable[[str], object] | None = None  # called with the folder before each run
    scripts: str = SCRIPTS  # where its file is

    @property
    def command(self) -> tuple[str, ...]:
        return (*(self.script or (f"{self.name}.py",)), *self.args)

    def missing(self) -> list[str]:
        return [name for name in self.needs if importlib.util.find_spec(name) is None]

    def lay_out(self, folder: str) -> None:
        """Create the folder in which the script runs, with nothing else in it."""
        shutil.rmtree(folder, ignore_errors=True)
        source = os.path.join(self.scripts, self.name)
        if os.path.isdir(source):
            shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
        elif os.path.exists(f"{source}.py"):
            os.makedirs(folder)
            shutil.copy2(f"{source}.py", folder)
        else:
            os.makedirs(folder)
        if self.prepare:
            self.prepare(folder)


def _zipped(folder: str) -> None:
    zipapp.create_archive(os.path.join(SCRIPTS, "directory", "app"), os.path.join(folder, "app.pyz"))


def _linked(folder: str) -> None:
    os.makedirs(os.path.join(folder, "real"))
    shutil.copy2(os.path.join(SCRIPTS, "main_facts.py"), os.path.join(folder, "real", "main_facts.py"))
    os.symlink("real/main_facts.py", os.path.join(folder, "link.py"))


# The kinds that the test suite runs come first. Together they cover files closed at exit, variables set before torch is
# imported, numbers and the end of a group, a failure, what a script sees of itself, and its children.
KINDS = (
    Kind("csv_log"),
    Kind("env_assigned"),
    Kind("ddp_not_destroyed"),
    Kind("exception", ranks=1),
    Kind("main_facts", args=("--lr", "0.1", "a b", "")),
    Kind("mp_fork"),
    # Files, and what happens at exit.
    Kind("gzip_log"),
    Kind("zip_archive"),
    Kind("temp_files"),
    Kind("del_at_exit"),
    Kind("weakrefs"),
    Kind("atexit_order"),
    Kind("log_handlers"),
    Kind("threads_at_exit"),
    Kind("futures_at_exit"),
    Kind("tensorboard_log", needs=("tensorboard",), masks=(r"events\.out\.tfevents\.\S*",), ignore=("board-*",)),
    # Processes.
    Kind("mp_spawn"),
    Kind("mp_forkserver"),
    Kind("mp_manager"),
    Kind("spawn_inside"),
    Kind("subprocesses"),
    Kind("asyncio_main"),
    # Output.
    Kind("tqdm_bar", needs=("tqdm",)),
    Kind("bytes_out"),
    Kind("warning_filters"),
    Kind("encodings", args=("ä", "€"), env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    # Ends.
    Kind("usage_error", args=("--learning-rate", "1"), ranks=1),
    Kind("exit_code", ranks=1),
    Kind("exit_text", ranks=1),
    Kind("exit_none"),
    Kind("os_exit", ranks=1),
    Kind("exception_in_one"),
    Kind("exception_in_thread"),
    Kind("recorded", ranks=1),
    Kind("keyboard_interrupt", ranks=1),
    Kind("sigterm_handler"),
    Kind("signal_handlers"),
    Kind("killed", ranks=1),
    Kind("segfault", ranks=1),
    Kind("unittest_main", masks=(r"in \d+\.\d+s",)),
    Kind("unittest_fails", ranks=1, masks=(r"in \d+\.\d+s",)),
    # The environment before and after torch is imported.
    Kind("env_defaults"),
    Kind("env_putenv"),
    Kind("env_file", script=("main.py",)),
    Kind("env_logs"),
    Kind("env_after"),
    # How a script is named, and what it sees of itself.
    Kind("local_rank", args=("--lr", "0.5"), old_launcher=True),
    Kind("module", script=("-m", "pkg.train"), args=("--epochs", "3")),
    Kind("directory", script=("app",), args=("x",)),
    Kind("zipped", script=("app.pyz",), prepare=_zipped),
    Kind("symlink", script=("link.py",), prepare=_linked),
    Kind("shadowed", script=("main.py",)),
    Kind("stdin_reader", input="first\n1\n2\n3\n"),
    Kind("pickle_main", masks=(r"\d{15}",)),
    Kind("import_hooks"),
    # Numbers.
    Kind("random_seeded"),
    Kind("random_unseeded"),
    Kind("autograd"),
    Kind("compile_eager"),
    Kind("compile_inductor"),
    Kind("profiled", masks=(r"\d+:\d+ (?=Sync)",)),
    # torch.distributed, and what is built on it.
    Kind("ddp_plain"),
    Kind("ddp_digits", args=("--epochs", "2")),
    Kind("fsdp2"),
    Kind("tensor_parallel"),
    Kind("pipeline"),
    Kind("groups"),
    Kind("objects"),
    Kind("store"),
    Kind("gloo_timeout"),
    Kind("rpc"),
    Kind("sampler"),
    Kind("loader_fork"),
    Kind("loader_spawn"),
    Kind("save_load"),
    Kind("save_dcp", ignore=("checkpoint/.metadata",)),
    Kind("stateful_loader", needs=("torchdata",)),
    Kind("accelerator", needs=("accelerate",)),
    Kind("fabric", needs=("lightning",)),
    Kind("lightning_trainer", needs=("lightning",)),
    Kind(
        "hf_trainer",
        needs=("transformers", "accelerate"),
        ignore=("model/training_args.bin",),
        masks=(r"'train_(runtime|\w+_per_second)': '[\d.e-]+'", r"\[\d\d:\d\d<[^\]]*\]"),
    ),
)

BY_NAME = {kind.name: kind for kind in KINDS}
