"""The examples on a real GPU, as a plain script for a machine that has one: python tests/e2e/gpu_examples.py [NAME…]

One GPU is enough, and all that NCCL allows of one: a world of one rank. Prints a row of figures for each, and fails
where an example does not learn, or does so on the CPU. `--cpu` tries this script out on a machine without a GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
WORK = Path(tempfile.mkdtemp(prefix="gpu-examples-"))
READ, LOSS = r"([\d.]+)% of \d+ new \w+ are \w+ right", r"loss ([\d.]+) on new text"
FAST = ("--precision", "bf16", "--compile")

# What an example says of its device at the end, without a line in it that would be there for this test alone.
PROBE = """
import runpy, sys, phalanx, torch
real = phalanx.main
def main(train):
    def watched(run):
        train(run)
        peak = torch.cuda.max_memory_allocated() if run.device.type == "cuda" else 0
        print(f"on {run.device} by {run.group.backend}, {peak / 2**20:.0f} MiB at most", flush=True)
    real(watched)
phalanx.main = main
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Case:
    name: str
    words: tuple[str, ...]  # an example and its options
    result: str  # a pattern of what it says last
    least: float = 0.0
    most: float = 100.0
    batch: int = 64


CASES = (
    Case("digits", ("digits.py",), READ, least=95),
    Case("digits, DDP", ("digits_ddp.py",), READ, least=95),
    Case("resnet", ("resnet.py", "--epochs", "6"), READ, least=90),
    Case("resnet, bf16", ("resnet.py", "--epochs", "6", "--precision", "bf16"), READ, least=90),
    Case("resnet, bf16, compile", ("resnet.py", "--epochs", "6", *FAST), READ, least=90),
    Case("gpt", ("gpt.py",), LOSS, most=2.6, batch=32),
    Case("gpt, DDP", ("gpt_ddp.py",), LOSS, most=2.6, batch=32),
    Case("gpt, bf16", ("gpt.py", "--precision", "bf16"), LOSS, most=2.6, batch=32),
    Case("gpt, fp16", ("gpt.py", "--precision", "fp16"), LOSS, most=2.6, batch=32),
    Case("gpt, bf16, compile", ("gpt.py", *FAST), LOSS, most=2.6, batch=32),
    Case("gpt, FSDP, bf16", ("gpt.py", "--how", "fsdp", "--precision", "bf16"), LOSS, most=2.6, batch=32),
)


def phalanx(*args: str) -> tuple[int, str, float]:
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", *args],
        env={**os.environ, "PHALANX_HOME": str(WORK / "home")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr, time.monotonic() - begin


def try_out(case: Case, where: tuple[str, ...]) -> str:
    """Run a case. Return a row; its last word is the error, if any."""
    (WORK / "probe.py").write_text(PROBE)
    example, *options = case.words
    code, text, took = phalanx("run", "-g", "1", *where, str(WORK / "probe.py"), str(EXAMPLES / example), *options)
    found = re.findall(case.result, text)
    device = re.search(r"on (\S+) by (\S+), (\d+) MiB", text)
    plain = example.endswith("_ddp.py")  # not a script of phalanx: it does not report its device
    fine = code == 0 and found and case.least <= float(found[-1]) <= case.most
    fine = fine and (plain or where or (device is not None and device[1].startswith("cuda") and "nccl" in device[2]))
    speed = "" if plain else f"{steady(case.batch):.0f}"
    memory = device[3] if device else ""
    print(
        f"{case.name:24}{took:8.1f}{found[-1] if found else '':>10}{speed:>12}{memory:>8}  {'ok' if fine else 'FAIL'}"
    )
    return "" if fine else f"{case.name}: exit {code}\n{text}"


def steady(batch: int) -> float:
    """Return samples per second after the first epoch, which compiles and warms up; includes evaluations between
    epochs.
    """
    newest = max(WORK.glob("home/runs/*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    steps = [json.loads(line) for line in newest.read_text().splitlines()]
    first, last = next(step for step in steps if step["epoch"] == 1), steps[-1]
    return float(batch * (last["step"] - first["step"]) / (last["time"] - first["time"]))


def main() -> int:
    names = [word for word in sys.argv[1:] if word != "--cpu"]
    where = ("--cpu",) if "--cpu" in sys.argv else ()
    print(f"{'':24}{'seconds':>8}{'result':>10}{'samples/s':>12}{'MiB':>8}")
    wrong = [try_out(case, where) for case in CASES if not names or case.name in names]
    if not names:
        # CPU ranks beside a GPU: more of them than GPUs, and none of them uses one.
        for words in (("demo",), ("run", "-g", "2", "--cpu", str(EXAMPLES / "digits.py"), "--at-least", "95")):
            code, text, took = phalanx(*words)
            print(f"{words[0] + ' on CPUs':24}{took:8.1f}{'':30}  {'FAIL' if code else 'ok'}")
            wrong.append(f"{words}: exit {code}\n{text}" if code else "")
    print("\n\n".join(filter(None, wrong)))
    return 1 if any(wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
