"""Command lines: every one ends with an exit code, and none with a traceback of phalanx."""

from __future__ import annotations

import contextlib
import io
import os
import random
import tempfile
from collections.abc import Callable, Iterator

from phalanx.cli.main import VERBS, main
from phalanx.cli.options.table import OPTIONS, options_of
from tests.fuzz.campaign import Check

SCRIPT = "train.py"
# Verbs that get any options. The others start something, or need a terminal or the network: they get only help options.
QUIET = ("plan", "ps", "why", "logs", "compare", "report", "stop", "attach", "lint")
HELP = tuple(verb for verb in VERBS if verb not in QUIET)
WORDS = (
    *("", "-", "--", "-1", "0", "1", "2", "8,2", "1:2", "2:1", "1025", "99999999999999999999", "1e999", "nan", "inf"),
    *("a:8,b:2", "a:0-7,b:1,3", "[::1]:8", "localhost", "localhost:99999", ":0", "off", "none", "forever", "30s", "5m"),
    *("\0", "\x1b[2J", "é", "\udcff", "x" * 5000, "/nowhere/", "/dev/null", "/nowhere/x", ".", SCRIPT, "no.py", "gpu"),
    *("RANK=1", "=", "lr=0.1", "SIGTERM", "SIGKILL", "0-3", "3-0", "GPU-", "torch", "..x", "${rank}", "%s", "{}", "*"),
)
OTHERS = (
    *("-a", "--all", "--json", "--forget", "--older", "--pid", "--slurm", "--here", "--stacks", "--timings", "-r"),
    *("-f", "--follow", "--tail", "--stream", "--metric", "--over", "--log", "--svg", "-o", "-c", "--debugpy"),
    *("-h", "--help", "--nonsense", "--jso", "-x", "--seed", "--force", "--name"),
)


@contextlib.contextmanager
def opened() -> Iterator[Check]:
    """Make a folder with a script, and an empty home."""
    before, home = os.getcwd(), os.environ.get("PHALANX_HOME")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        os.environ["PHALANX_HOME"] = os.path.join(folder, "home")
        os.chdir(folder)
        with open(SCRIPT, "w") as file:
            file.write("import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()\n")
        try:
            yield check
        finally:
            os.chdir(before)
            if home is None:
                del os.environ["PHALANX_HOME"]
            else:
                os.environ["PHALANX_HOME"] = home


def line(chance: random.Random) -> list[str]:
    """Return the words of a command."""
    verb = chance.choice([*QUIET, "plan", "plan", "plan", chance.choice(HELP)])
    words = [verb]
    if chance.random() < 0.02:
        words = [chance.choice(["", "-", "launch", "pla", SCRIPT, "--help", "--version", "help", "\x1b[2J"])]
    if verb in HELP and words == [verb]:
        return ["help", verb] if chance.random() < 0.5 else [verb, chance.choice(["--help", "-h"])]
    for _ in range(chance.randrange(6)):
        if chance.random() < 0.4:
            words.append(chance.choice(WORDS))
        elif verb == "plan":
            option = chance.choice(options_of("plan") if chance.random() < 0.9 else OPTIONS)
            name = chance.choice([*option.spellings])
            value = chance.choice([*WORDS, *(option.kind.example,) * 20] if option.kind else [*WORDS])
            words += [f"{name}={value}"] if chance.random() < 0.3 else [name] + [value] * (option.kind is not None)
        else:
            words.append(chance.choice(OTHERS))
    if verb == "plan" and chance.random() < 0.7:
        words += [SCRIPT, *chance.sample(WORDS, chance.randrange(3))]
    return words


def check(chance: random.Random, note: Callable[[object], None]) -> None:
    """Run a command in this process."""
    words = [word for word in line(chance) if "\0" not in word]  # no argument of a process can contain it
    note(words)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code: object = main(words)
        except SystemExit as ended:  # raised by argparse
            code = ended.code
    assert code in (0, 1, 2), code
    output = out.getvalue() + err.getvalue()
    assert "Traceback (most recent call last)" not in output
    assert "\x1b" not in output or output.startswith("usage: "), output  # argparse repeats the input
