"""The examples and the demo, as the documentation says to run them."""

from __future__ import annotations

import ast
import difflib
import gzip
import importlib.util
import re
import struct
from pathlib import Path

import pytest

from tests.kit.cli import Result, phalanx, python, torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = ("digits", "resnet", "gpt")
# What one rank says last: how the numbers in it are checked is the test's own.
READ = r"rank (\d) of 2: ([\d.]+)% of 360 \w+ it has never seen"


def example(name: str, ranks: int, *options: str) -> Result:
    result = phalanx("run", "-g", str(ranks), "--cpu", str(EXAMPLES / f"{name}.py"), *options, timeout=120)
    assert result.code == 0, result.out + result.err
    return result


def said(result: Result, line: str) -> dict[str, tuple[str, ...]]:
    """By rank: what else the pattern took. Each rank says it once."""
    found = re.findall(line, result.out)
    by_rank = {rank: tuple(rest) for rank, *rest in found}
    assert len(by_rank) == len(found), result.out
    return by_rank


def test_hello() -> None:
    result = example("hello", 4)
    assert sorted(said(result, r"rank (\d) of 4: the ranks add up to (6)")) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("spelling", ["--pass-local-rank", "--pass-local-rank=underscore"])
def test_the_old_way(spelling: str) -> None:
    result = phalanx("run", "-g", "2", "--cpu", spelling, str(EXAMPLES / "oldway.py"))
    assert sorted(re.findall(r"my local rank is (\d) of 2", result.out)) == ["0", "1"]


def test_demo() -> None:
    result = phalanx("demo", timeout=120)
    assert result.code == 0, result.err
    found = re.search(r"([\d.]+)% of 360 digits it has never seen", result.out)
    assert found is not None
    assert float(found[1]) > 95
    assert "rank 1 failed: RuntimeError: this rank has read a broken sample" in result.err


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives(ranks: int) -> None:
    names = said(example("collectives", ranks), rf"rank (\d) of {ranks}: \d+ collectives are right: (.+)")
    assert sorted(names) == [str(rank) for rank in range(ranks)]
    (listed,) = set(names.values())
    assert {name.partition("(")[0] for name in listed[0].split(", ")} == {
        *("broadcast", "scatter", "reduce", "gather", "all_reduce", "all_gather", "all_gather_single"),
        *("reduce_scatter", "reduce_scatter_single", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
    }


def test_point_to_point() -> None:
    found = said(example("p2p", 4), r"rank (\d) of 4: (\d) before me, (\d) after me, the ring adds up to 6")
    assert found == {"0": ("3", "1"), "1": ("0", "2"), "2": ("1", "3"), "3": ("2", "0")}


def test_groups() -> None:
    found = said(example("groups", 4), r"rank (\d) of 4: alike (\[.*?\]), my node (\[.*?\]), all add up to 6")
    evens, odds, node = "[0, 2]", "[1, 3]", "[0, 1, 2, 3]"
    assert found == {"0": (evens, node), "1": (odds, node), "2": (evens, node), "3": (odds, node)}


def test_stores() -> None:
    found = said(example("stores", 4), r"rank (\d) of 4: won by TCP (\d), prefix (\d), file (\d); 3 threads agree")
    assert sorted(found) == ["0", "1", "2", "3"]
    assert len(set(found.values())) == 1  # all saw the same winners


def test_rpc() -> None:
    found = said(example("rpc", 3), r"rank (\d) of 3: worker(\d) says 2 x \d = (\d), its counter for me is at 10")
    assert found == {"0": ("1", "0"), "1": ("2", "2"), "2": ("0", "4")}


def test_parameter_server() -> None:
    found = said(example("parameter_server", 3), r"rank (\d) of 3: (\w+), weights (\[.*?\])")
    weights = "[3.0, -2.0, 0.5]"
    assert found == {"0": ("server", weights), "1": ("trainer", weights), "2": ("trainer", weights)}


def test_pipeline() -> None:
    found = said(example("pipeline", 2), r"rank (\d) of 2: stage \d, (\d) gradients as in one process")
    assert found == {"0": ("2",), "1": ("4",)}


def test_ddp_with_rpc() -> None:
    result = example("ddp_rpc", 3)
    trainers = said(result, r"rank (\d) of 3: trainer, loss ([\d.]+) -> ([\d.]+), dense parameters add up to (\S+)")
    assert sorted(trainers) == ["0", "1"]
    for first, last, _ in trainers.values():
        assert float(last) < 0.2 < 0.5 < float(first)
    assert len({dense for *_, dense in trainers.values()}) == 1
    assert "rank 2 of 3: table, 20 of 20 rows were trained" in result.out


def test_breakpoint_on_rank_0() -> None:
    script = str(EXAMPLES / "breakpoint.py")
    result = phalanx("run", "-g", "2", "--cpu", "--stdin", "0", script, input="up\np total * 10 + world\nc\n")
    assert result.code == 0, result.out + result.err
    assert "tensor([12.])" in result.out
    assert sorted(said(result, r"rank (\d) of 2: after the breakpoint, total 1")) == ["0", "1"]


@pytest.mark.parametrize(("model", "epochs", "percent"), [("digits", 6, 95), ("resnet", 3, 90)])
def test_images(model: str, epochs: int, percent: float) -> None:
    found = said(example(f"{model}_ddp", 2, "--epochs", str(epochs)), READ)
    assert sorted(found) == ["0", "1"]
    assert len(set(found.values())) == 1  # the same model on every rank
    assert float(found["0"][0]) > percent


def test_gpt() -> None:
    found = said(example("gpt_ddp", 2, "--epochs", "3"), r"rank (\d) of 2: loss ([\d.]+) on text .* guess has ([\d.]+)")
    assert sorted(found) == ["0", "1"]
    ((loss, blind),) = set(found.values())
    assert float(loss) < 2.8 < 4 < float(blind)


@pytest.mark.parametrize(
    ("model", "line"),
    [("digits", r"([89]\d)\.\d% of 360"), ("resnet", r"([89]\d)\.\d% of 360"), ("gpt", r"loss 2\.\d")],
)
def test_plain(model: str, line: str) -> None:
    script = str(EXAMPLES / f"{model}_plain.py")
    result = python(script, "--epochs", "2", env={"OMP_NUM_THREADS": "1"})
    assert result.code == 0, result.err
    assert re.search(line, result.out.splitlines()[-1]), result.out


def test_with_phalanx() -> None:
    found = re.findall(r"([\d.]+)% of 360 digits it has never seen", example("digits", 2, "--epochs", "6").out)
    assert len(found) == 1
    assert float(found[0]) > 95


@pytest.mark.parametrize("model", MODELS)
def test_few_lines_make_it_distributed(model: str) -> None:
    plain, many = ((EXAMPLES / f"{model}_{kind}.py").read_text().splitlines() for kind in ("plain", "ddp"))
    changed = [line for line in difflib.ndiff(plain, many) if line.startswith("+ ")]
    assert len(changed) <= 20, "\n".join(changed)


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
    result = example("digits_ddp", 2, "--data", str(tmp_path), "--epochs", "1")
    assert sorted(said(result, r"rank (\d) of 2: [\d.]+% of 20 digits")) == ["0", "1"]


def test_digits_that_are_not_there(tmp_path: Path) -> None:
    result = phalanx("run", "-g", "2", "--cpu", str(EXAMPLES / "digits_ddp.py"), "--data", str(tmp_path / "none"))
    assert result.code == 1
    assert f"no train-images-idx3-ubyte (or train-images-idx3-ubyte.gz) in {tmp_path}/none" in result.err
    assert "--data DIR" in result.err


def test_an_accelerate_script() -> None:
    found = said(example("accelerate_digits", 2), READ)
    assert sorted(found) == ["0", "1"]
    assert len(set(found.values())) == 1
    assert float(found["0"][0]) > 88


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="transformers is in the extra dev")
def test_a_trainer_script() -> None:
    found = said(example("trainer_gpt", 2), r"rank (\d) of 2: loss ([\d.]+) on text .* guess has ([\d.]+)")
    ((loss, _),) = set(found.values())
    assert sorted(found) == ["0", "1"]
    assert float(loss) < 3


@pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="lightning is in the extra dev")
def test_a_lightning_script() -> None:
    found = said(example("lightning_digits", 2), r"rank (\d) of 2: ([\d.]+)% of digits it has never seen")
    assert sorted(found) == ["0", "1"]
    assert len(set(found.values())) == 1
    assert float(found["0"][0]) > 88


def test_torchrun_runs_them_too() -> None:
    result = torchrun("--nproc-per-node", "2", "--standalone", str(EXAMPLES / "collectives.py"))
    assert result.code == 0, result.err
    assert sorted(said(result, r"rank (\d) of 2: \d+ collectives are right")) == ["0", "1"]


def test_every_example_says_how_to_run_it_and_is_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for path in sorted(EXAMPLES.glob("*.py")):
        how = (ast.get_docstring(ast.parse(path.read_text())) or "").partition(":")[0]
        assert f"examples/{path.name}" in how or path.name in {"hello.py", "oldway.py"}, path.name
        assert f"({path.name})" in listed, path.name
