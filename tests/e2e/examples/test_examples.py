"""Runs the examples and the demo with the commands in their text, and checks their output."""

from __future__ import annotations

import ast
import difflib
import gzip
import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.demo import digits
from tests.kit import imported
from tests.kit.cli import Result, phalanx, python, start, terminal, warm_environment
from tests.kit.torchrun import Torchrun

pytestmark = pytest.mark.xdist_group("examples")  # one import of torch for all of them

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
MODELS = ("digits", "resnet", "gpt")
# Expected lines on stderr: the launcher's own line, and the progress.
QUIET = re.compile(r"phalanx: \S+: \d+ ranks?, output in \S+|(\[0\] )?(epoch \d+/\d+  )?step \d+/\d+ \(\d+%\)  loss .*")
places: dict[str, str] = {}  # of the warm fork server, while it exists


@pytest.fixture(scope="module", autouse=True)
def _warm() -> Iterator[None]:
    """Import torch and the modules of a training once for all examples."""
    with warm_environment() as env:
        places.update({name: str(value) for name, value in env.items()})
        yield
        places.clear()


@pytest.fixture(scope="module")
def torchrun() -> Iterator[Torchrun]:
    with Torchrun() as ready:
        yield ready


def docstring(name: str) -> str:
    return ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or ""


def command(name: str) -> list[str]:
    """Return the command in the example's docstring."""
    found = re.search(rf"phalanx (run -g \d .*?examples/{name}\.py)", docstring(name))
    assert found is not None, name
    return found[1].split()


def example(name: str, *options: str, ranks: int | None = None) -> Result:
    *words, script = command(name)
    if ranks is not None:
        words[2] = str(ranks)
    result = phalanx(*words, "--cpu", script, *options, timeout=150, cwd=str(ROOT), env=places)
    assert result.code == 0, result.out + result.err
    assert [name for name in os.listdir(places["TMPDIR"]) if not name.startswith("torchinductor_")] == []
    assert noise(result) == []
    return result


def noise(result: Result) -> list[str]:
    return [line for line in result.err.splitlines() if not QUIET.fullmatch(line)]


def matched(result: Result, line: str) -> dict[str, tuple[str, ...]]:
    """Return the groups of the pattern by rank. Each rank prints the line once."""
    found = re.findall(line, result.out)
    by_rank = {rank: tuple(rest) for rank, *rest in found}
    assert len(by_rank) == len(found), result.out
    return by_rank


# torch.distributed


@pytest.mark.smoke
def test_hello() -> None:
    assert sorted(matched(example("hello"), r"rank (\d) of 4: the ranks add up to (6)")) == ["0", "1", "2", "3"]


def test_torch_distributed_launch() -> None:
    assert sorted(re.findall(r"my local rank is (\d) of 2", example("oldway").out)) == ["0", "1"]


@pytest.mark.smoke
def test_collectives() -> None:
    names = matched(example("collectives"), r"rank (\d) of 4: \d+ collectives are right: (.+)")
    assert sorted(names) == ["0", "1", "2", "3"]
    (listed,) = set(names.values())
    assert {name.partition("(")[0] for name in listed[0].split(", ")} == {
        *("broadcast", "scatter", "reduce", "gather", "all_reduce", "all_gather", "all_gather_single"),
        *("reduce_scatter", "reduce_scatter_single", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
        *("broadcast_object_list", "scatter_object_list", "gather_object", "all_gather_object"),
    }


def test_point_to_point() -> None:
    found = matched(example("p2p"), r"rank (\d) of 4: (\d) before me, (\d) after me, the ring adds up to 6")
    assert found == {"0": ("3", "1"), "1": ("0", "2"), "2": ("1", "3"), "3": ("2", "0")}


def test_groups() -> None:
    found = matched(example("groups"), r"rank (\d) of 4: alike (\[.*?\]), my node (\[.*?\]), all add up to 6")
    evens, odds, node = "[0, 2]", "[1, 3]", "[0, 1, 2, 3]"
    assert found == {"0": (evens, node), "1": (odds, node), "2": (evens, node), "3": (odds, node)}


def test_stores() -> None:
    found = matched(example("stores"), r"rank (\d) of 4: won by TCP (\d), prefix (\d), file (\d); 3 threads agree")
    assert sorted(found) == ["0", "1", "2", "3"]
    assert len(set(found.values())) == 1  # all ranks have the same result


def test_rpc() -> None:
    found = matched(example("rpc"), r"rank (\d) of 3: worker(\d) says 2 x \d = (\d), its counter for me is at 10")
    assert found == {"0": ("1", "0"), "1": ("2", "2"), "2": ("0", "4")}


def test_parameter_server() -> None:
    found = matched(example("parameter_server"), r"rank (\d) of 3: (\w+), weights (\[.*?\])")
    weights = "[3.0, -2.0, 0.5]"
    assert found == {"0": ("server", weights), "1": ("trainer", weights), "2": ("trainer", weights)}


def test_pipeline() -> None:
    found = matched(example("pipeline"), r"rank (\d) of 2: stage \d, (\d) gradients as in one process")
    assert found == {"0": ("2",), "1": ("4",)}


def test_ddp_with_rpc() -> None:
    result = example("ddp_rpc")
    trainers = matched(
        result, r"rank (\d) of 3: trainer, loss ([\d.]+) -> ([\d.]+), the dense parameters have length (\S+)"
    )
    assert sorted(trainers) == ["0", "1"]
    for first, last, _ in trainers.values():
        assert float(last) < 0.2
        assert float(first) > 0.5
    assert len({dense for *_, dense in trainers.values()}) == 1
    assert "rank 2 of 3: holder, 20 of 20 rows of the table were trained" in result.out


def test_breakpoint_on_rank_0(tmp_path: Path) -> None:
    """In a terminal, for longer than the timeout of the group: the other ranks still wait."""
    text = (EXAMPLES / "breakpoint.py").read_text()
    hasty = "from datetime import timedelta\ndist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5))\n"
    script = tmp_path / "breakpoint.py"
    script.write_text(text.replace("dist.breakpoint(", f"{hasty}dist.breakpoint("))
    assert hasty in script.read_text()
    *words, _ = command("breakpoint")
    job = terminal(*words, "--cpu", str(script), env=places)
    for prompt, typed in enumerate(("up", "p total * 10 + world", "import time; time.sleep(1.5)", "c"), start=1):
        job.wait_for("(Pdb)", count=prompt)
        job.send(f"{typed}\n".encode())
    assert job.wait() == 0, job.out
    assert "tensor([12.])" in job.out
    assert sorted(re.findall(r"rank (\d) of 2: after the breakpoint, total 1", job.out)) == ["0", "1"]


@pytest.mark.parametrize("name", ["collectives", "rpc"])
def test_torchrun_runs_them_too(name: str, torchrun: Torchrun) -> None:
    result = torchrun("--nproc-per-node", "2", "--standalone", str(EXAMPLES / f"{name}.py"), timeout=150)
    assert result.code == 0, result.err
    assert "Warning" not in result.err
    assert sorted(re.findall(r"rank (\d) of 2: ", result.out)) == ["0", "1"]


# From one process to many


def messages(kind: str, name: str, *options: str) -> list[str]:
    """Return the output: of a single process, or of rank 0 or every rank."""
    if kind == "plain":
        plain = imported.python if imported.in_use() else python
        result = plain(str(EXAMPLES / f"{name}.py"), *options, env={"OMP_NUM_THREADS": "1"}, timeout=150)
        assert (result.code, noise(result)) == (0, [])
        return result.out.splitlines()
    return [re.sub(r"^\[\d\] ", "", line) for line in example(name, *options).out.splitlines()]


def last(lines: list[str], epochs: int, pattern: str) -> list[float]:
    """Return the number in the line of the last epoch, of each rank that prints it."""
    assert sum("epoch 1: " in line for line in lines) == sum(f"epoch {epochs}: " in line for line in lines)
    found = [re.search(pattern, line) for line in lines if f"epoch {epochs}: " in line]
    return [float(match[1]) for match in found if match is not None]


@pytest.mark.imported
@pytest.mark.parametrize("kind", ["plain", "ddp", "phalanx"])
@pytest.mark.parametrize(("model", "epochs", "percent"), [("digits", 2, 85), ("resnet", 2, 75)])
def test_images(model: str, epochs: int, percent: float, kind: str) -> None:
    lines = messages(kind, model if kind == "phalanx" else f"{model}_{kind}", "--epochs", str(epochs))
    found = last(lines, epochs, r"([\d.]+)% of 360 new \w+ are (?:correct|recognized)$")
    assert len(found) == (2 if kind == "ddp" else 1), lines
    assert len(set(found)) == 1  # the same model on every rank
    assert found[0] > percent


@pytest.mark.parametrize("kind", ["plain", "ddp", "phalanx"])
def test_gpt(kind: str) -> None:
    lines = messages(kind, "gpt" if kind == "phalanx" else f"gpt_{kind}", "--epochs", "1")
    found = last(lines, 1, r"loss ([\d.]+) on new text, 4\.\d+ by blind guess$")
    assert len(found) == (2 if kind == "ddp" else 1), lines
    assert len(set(found)) == 1
    assert found[0] < 3.2


@pytest.mark.imported
def test_any_number_of_ranks_gives_the_same_numbers(tmp_path: Path, torchrun: Torchrun) -> None:
    """One process, three ranks that share each batch of 32 unevenly, and torchrun."""
    text = tmp_path / "text"
    text.write_text((EXAMPLES / "data" / "asyoulikeit.txt").read_text()[:20000])
    options = "--epochs", "2", "--text", str(text)
    alone = [line for line in messages("plain", "gpt", *options) if line.startswith("epoch")]
    three = [line for line in example("gpt", *options, ranks=3).out.splitlines() if line.startswith("[0] epoch")]
    result = torchrun("--nproc-per-node", "2", "--standalone", str(EXAMPLES / "gpt.py"), *options, timeout=150)
    assert result.code == 0, result.err
    two = [line for line in result.out.splitlines() if line.startswith("epoch")]
    losses = [[float(re.findall(r"loss ([\d.]+)", line)[0]) for line in lines] for lines in (alone, two, three)]
    assert losses[0][1] < losses[0][0] < 4
    assert losses[1] == pytest.approx(losses[0], abs=0.002)
    assert losses[2] == pytest.approx(losses[0], abs=0.002)


@pytest.mark.smoke
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("kind", "most"), [("_ddp", 16), ("", 20)])
def test_few_lines_make_it_distributed(model: str, kind: str, most: int) -> None:
    """Docstrings, and options that a plain script does not have, are not counted."""
    plain, many = (ast.unparse(_without_docstrings(f"{model}{which}")).splitlines() for which in ("_plain", kind))
    changed = [line for line in difflib.ndiff(plain, many) if line.startswith("+ ") and "add_argument" not in line]
    assert 5 < len(changed) <= most, "\n".join(changed)


def _without_docstrings(name: str) -> ast.Module:
    module = ast.parse((EXAMPLES / f"{name}.py").read_text())
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return module


def test_digits_of_mnist(tmp_path: Path) -> None:
    """The real files are of 28 by 28 pixels, and some downloads unpack them."""
    for part, count in (("train", 64), ("t10k", 20)):
        labels = bytes(n % 10 for n in range(count))
        images = b"".join(bytes([25 * label]) * 784 for label in labels)
        pictures = struct.pack(">HBBIII", 0, 8, 3, count, 28, 28) + images
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(pictures)
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(
            gzip.compress(struct.pack(">HBBI", 0, 8, 1, count) + labels)
        )
    lines = messages("phalanx", "digits", "--data", str(tmp_path), "--epochs", "1")
    assert sum("% of 20 new digits are correct" in line for line in lines) == 1


@pytest.mark.smoke
def test_digits_that_are_not_there(tmp_path: Path) -> None:
    script = str(EXAMPLES / "digits.py")
    result = phalanx("run", "-g", "2", "--cpu", script, "--data", str(tmp_path / "none"), env=places)
    assert result.code != 0
    assert f"no train-images-idx3-ubyte (or train-images-idx3-ubyte.gz) in {tmp_path}/none" in result.err
    assert "--data DIR" in result.err


def test_digits_continue_where_they_were(tmp_path: Path) -> None:
    """From a checkpoint at the very end of an epoch, with more ranks."""
    kept = "--checkpoints", str(tmp_path / "kept"), "--checkpoint-every", "22"
    script = str(EXAMPLES / "digits.py")
    for ranks, epochs, begins in ((1, 1, None), (2, 2, 22)):
        words = ("run", "-g", str(ranks), "--cpu", *kept, script, "--epochs", str(epochs))
        result = phalanx(*words, timeout=150, env=places)
        assert result.code == 0, result.out + result.err
        assert (f"resumed at step {begins}, " in result.out) is (begins is not None)
        assert f"epoch {epochs}: " in result.out
    assert [json.loads(line)["step"] for line in (tmp_path / "kept" / "metrics.jsonl").open()] == [*range(1, 45)]


# Recovery


def test_survive() -> None:
    """The survivors stay, and the replacement has their state. Whether they had completed step 30 as well, by what the
    killed rank had sent before, depends on the network."""
    *words, script = command("survive")
    result = phalanx(*words, "--cpu", script, "--die", "2:30", timeout=150, cwd=str(ROOT), env=places)
    assert result.code == 0, result.out + result.err
    assert "rank 2 failed: SIGKILL" in result.err
    ((step, cost),) = re.findall(r"; regrouped, and step (\d+) was committed [\d.]+ s later, (.*)", result.err)
    # At most the step that only the killed rank had committed is repeated, if the rank had reported it.
    assert (step, cost) in {("31", "no step lost"), ("30", "no step lost"), ("30", "1 step done again")}
    assert set(re.findall(r"continues after step (\d+)", result.out)) == {str(int(step) - 1)}
    found = matched(result, r"rank (\d) of 3: (\d+) steps, train entered in generation (\[.*?\]), ([\d.]+)% of 360 new")
    assert {steps for steps, _, _ in found.values()} == {"88"}
    assert re.match(r"\[[12]", found["2"][1])  # 2: gloo did not release one of the others, which was replaced as well
    assert any(entered.startswith("[0, ") for _, entered, _ in found.values())
    (percent,) = {percent for _, _, percent in found.values()}
    assert float(percent) > 88


# Hangs

HANGS = {  # first words of the verdict
    "data": "probably: rank 2 is in data loading, hang.py:{} in __getitem__ (waiting for a lock); the other 2 wait",
    "uneven": "rank 2 left the loop earlier than the others, to barrier #{} at hang.py:{}, while the other 2 are still",
    "skip": "rank 0 called one more collective than the others, barrier #{} inside `if rank == 0` at hang.py:{} in",
    "mismatch": "rank 2 called broadcast at hang.py:{} in mismatch where the other 2 called all_reduce at hang.py:{}",
    "order": "deadlock between two groups: rank 0 is in all_reduce #1 of group data at hang.py:{} in order, which",
    "message": "rank 0 is in recv from rank 1 at hang.py:{} in message, and rank 1 does not send it: it is in",
    "stopped": "rank 2 is stopped (SIGSTOP) at hang.py:{} in stopped; the other 2 wait for it in all_reduce #{} (DDP,",
}


def test_hang() -> None:
    """All kinds at the same time, because they mostly wait; and the one that does not hang."""
    *words, script = command("hang")
    options = (*words, "--cpu", "--stall-timeout", "5", "--on-hang", "stop", script)
    jobs = {kind: start(*options, "--kind", kind, cwd=str(ROOT), env=places) for kind in HANGS}
    plain = phalanx(*options, cwd=str(ROOT), env=places)
    assert (plain.code, noise(plain)) == (0, [])
    assert sorted(matched(plain, r"rank (\d) of 3: (\d+) steps, and no rank hung")) == ["0", "1", "2"]
    for kind, job in jobs.items():
        assert job.wait(60) == 1, job.err
        lines = re.findall(r"^phalanx: (.*)", job.err, re.MULTILINE)
        verdict = re.escape(HANGS[kind]).replace(r"\{\}", r"\d+")
        # A slow rank has come to its collective just now, and does not count as waiting yet.
        verdict = verdict.replace(re.escape("the other 2 wait"), r"(?:the other 2 wait|rank \d waits)")
        assert re.match(verdict, lines[1]), job.err


# The demo


def test_demo_in_a_terminal() -> None:
    job = terminal("demo", env=places)
    assert job.wait(150) == 0, job.out
    assert re.search(r"━+─+  \d+/176  loss [\d.]+", job.out)  # a bar that grows
    percent = re.findall(r"epoch 8: ([\d.]+)% of 360 new digits are correct", job.out)
    assert len(percent) == 1
    assert float(percent[0]) > 95
    assert "rank 1 failed: RuntimeError: this rank has read a broken sample" in job.out


@pytest.mark.smoke
def test_the_demo_is_the_example() -> None:
    assert Path(digits.__file__).read_text() == (EXAMPLES / "digits.py").read_text()


def test_a_demo_that_learns_too_little_fails() -> None:
    result = phalanx("run", "-g", "2", "--cpu", digits.__file__, "--epochs", "0", "--at-least", "95", env=places)
    assert result.code == 1
    assert "less than 95% are correct" in result.err


# The documentation of the examples


@pytest.mark.smoke
def test_every_example_is_listed_with_its_command() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for path in sorted(EXAMPLES.glob("*.py")):
        assert f"({path.name})" in listed, path.name
        if path.stem.endswith("_plain"):
            assert docstring(path.stem).startswith(f"python examples/{path.name}: ")
        elif path.stem.partition("_")[0] not in MODELS:
            assert f"`phalanx {' '.join(command(path.stem))}`" in listed, path.name
