"""Every command and Python fragment in the documentation runs, as far as possible on one host without a GPU."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from tests.docs import blocks
from tests.docs.blocks import EXAMPLES, Block
from tests.kit import imported
from tests.kit.cli import Handle, free_port, phalanx, run, start

pytestmark = [
    *(pytest.mark.extended, pytest.mark.warmed),
    pytest.mark.timeout(1200),  # a page has many commands
]
# Three groups that run concurrently. Pages of one group do not repeat a command that has run, see `done`.
TUTORIALS = pytest.mark.xdist_group("docs: tutorials")
COMMANDS = pytest.mark.xdist_group("docs: commands")
PYTHON = pytest.mark.xdist_group("docs: Python")

# Names that fragments use without defining them: a reader has them at that point.
PRELUDE = """
import os, torch, phalanx, torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

def train(lr):
    return lr

def evaluate(model):
    return 0.5

dataset = test_set = TensorDataset(torch.randn(600, 4), torch.randint(3, (600,)))
loss_fn = nn.functional.cross_entropy
make = lambda: (Net(), None)
accuracy = 0.5
"""
# For fragments that use a run.
RUNNING = """
run = phalanx.Run(phalanx.init(device="cpu"))
model = Net()
opt = optimizer = torch.optim.AdamW(model.parameters())
data = run.loader(dataset, global_batch=60, shuffle=True)
test = run.loader(test_set, batch_size=20, train=False)
"""
# For fragments that use a run and do not contain these lines.
WRAPPED = """
run.keep(model, opt, data, best=0.0)
ddp = run.wrap(model)
"""
FORMS_A_GROUP = r"phalanx\.init\(|init_process_group\("
# Commands whose exit code depends on the machine, or is a result.
CODES = {"phalanx doctor": {0, 1}, "diff": {0, 1}}
# Commands about an existing run: with this name, or any run.
NAMED, ABOUT_RUNS = "resnet", re.compile(r"\bphalanx (why|logs|ps|report|compare)\b")
STARTS = re.compile(r"\bphalanx run\b")
INJECTS = re.compile(r"\bphalanx chaos\b.* --times\b")  # whether a fault happens depends on the script
done: set[str] = set()  # commands that have run, for any page of this process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like that of a reader: a training script, a package, and the examples."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    for path in (*(EXAMPLES / "tutorial").iterdir(), EXAMPLES / "survive.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "package").mkdir()
    shutil.copy(tmp_path / "train.py", tmp_path / "package")
    return tmp_path


def with_bash(page: str) -> bool:
    return any(block.language == "bash" and not block.is_file for block in blocks.blocks(page))


def group(page: str) -> pytest.MarkDecorator:
    return TUTORIALS if page.startswith("docs/tutorials/") else COMMANDS


@TUTORIALS
def test_the_scripts_of_the_tutorial_learn(folder: Path) -> None:
    """They reach the accuracies that the pages show. With phalanx these are the same for any number of ranks."""
    line = re.compile(r"epoch \d: ([\d.]+)% of the test digits are correct")
    lines = ("python alone.py", "phalanx run -g 2 --cpu ddp.py", "phalanx run -g 2 --cpu train.py", "python train.py")
    alone, ddp, two, one = (line.findall(shell(folder, command)) for command in lines)
    assert len(alone) == len(ddp) == len(two) == 8
    assert min(float(last) for *_, last in (alone, ddp, two)) > 90
    assert one == two


@pytest.mark.parametrize("page", [pytest.param(page, marks=group(page)) for page in blocks.pages() if with_bash(page)])
def test_commands_run(page: str, folder: Path) -> None:
    """Runs the commands in the order of the page, so that a command finds the files of the previous one.

    Scripts train for fewer epochs if no fault happens meanwhile: the test above covers what they learn in all epochs.
    The hundred epochs in which a reader sees a fault are reduced too, because test machines are slow.
    """
    scripts = {path: path.read_text() for path in folder.glob("*.py")}
    begun: list[str] = []
    for block in blocks.blocks(page):
        if block.is_file and block.language in ("python", "bash"):
            scripts[folder / (block.title or "job.sh")] = block.text + "\n"
        elif block.language == "bash" and not block.needs:
            for line in blocks.lines(block):
                command = line.replace("RUN", NAMED).replace(f"[{NAMED}]", NAMED).replace("--epochs 100", "--epochs 40")
                repeats = normal(command) in done and not block.exits and not INJECTS.search(command)
                if not blocks.needs(line) and not repeats:
                    for path, text in scripts.items():
                        path.write_text(text if "phalanx chaos" in command else shorter(text))
                    if lacks_run(command, begun):
                        shell(folder, f"phalanx run --name {NAMED} --cpu -g 4 --quiet train.py --lr 0.1")
                        begun.append(NAMED)
                    shell(folder, command, {block.exits}, where=str(block))
                    begun.append(command)


def shorter(script: str) -> str:
    """Return the script with a quarter of its epochs."""
    return re.sub(r"(EPOCHS = |run\.epochs\()(\d+)", lambda found: f"{found[1]}{max(1, int(found[2]) // 4)}", script)


def lacks_run(command: str, begun: list[str]) -> bool:
    """Return whether the command is about a run that no earlier command has started."""
    if STARTS.search(command) or any(NAMED in earlier for earlier in begun):
        return False
    return NAMED in command or bool(ABOUT_RUNS.search(command) and not any(map(STARTS.search, begun)))


@pytest.mark.parametrize(
    ("command", "begun", "lacks"),
    [
        ("phalanx run train.py", [], False),
        ("phalanx run --name resnet train.py", [], False),
        ("phalanx why", [], True),
        ("phalanx why", ["phalanx lint train.py"], True),
        ("phalanx why", ["phalanx run train.py"], False),
        ("phalanx why resnet", ["phalanx run train.py"], True),
        ("phalanx why resnet", ["phalanx run --name resnet train.py"], False),
        ("phalanx logs", ["resnet"], False),
    ],
)
def test_a_command_about_a_run_has_one(command: str, begun: list[str], lacks: bool) -> None:
    assert lacks_run(command, begun) is lacks


def shell(folder: Path, command: str, codes: set[int] | None = None, where: str = "") -> str:
    """Run a command in bash and check its exit code. `phalanx run` starts 4 ranks, as on a machine with 4 devices."""
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    env = {"PATH": path, "PET_NPROC_PER_NODE": "4"}
    result = run(("bash", "-c", command), cwd=str(folder), env=env, timeout=300)
    print(f"{result.seconds:5.1f} s  {command}")
    expected = next((CODES[start] for start in CODES if command.startswith(start)), codes or {0})
    assert result.code in expected, f"{where}: {command}\n{result.out}{result.err}"
    assert "Traceback" not in result.err
    assert not INJECTS.search(command) or "all recovered" in result.err, f"{where}: no fault\n{result.err}"
    done.add(normal(command))
    return result.out


def normal(command: str) -> str:
    """Return the command without comment and padding."""
    return " ".join(blocks.words(command))


def fragments() -> list[Block]:
    """Return Python blocks that are not files or sketches, and need nothing else."""
    found = blocks.of_language("python")
    return [block for block in found if not block.is_file and not block.needs and "…" not in block.text]


@PYTHON
@pytest.mark.imported
@pytest.mark.parametrize("block", fragments(), ids=str)
def test_python_runs(block: Block, folder: Path) -> None:
    """Runs after the definitions in the text before it; on three ranks, unless the fragment starts ranks itself."""
    script = folder / "fragment.py"
    for text in alternatives(block.text):
        before = PRELUDE
        if not re.search(rf"{FORMS_A_GROUP}|phalanx\.(main|launch)\(|def train\(", text):
            before += RUNNING + ("" if re.search(r"run\.(keep|group\.on_resize|checkpoints)\(", text) else WRAPPED)
        if "phalanx.launch(" in text:
            script.write_text(f"{before}\nif __name__ == '__main__':\n{textwrap.indent(text, '    ')}\n")
            result = imported.python(str(script), cwd=str(folder))
        else:
            script.write_text(f"{before}\n{text}\n")
            result = phalanx("run", "-g", "3", "--cpu", str(script), cwd=str(folder))
        assert result.code == 0, f"{block}\n{result.out}{result.err}"


def alternatives(text: str) -> list[str]:
    """Return the text. If it forms a group in several ways, return one text for each way."""
    lines = [ast.unparse(node) for node in ast.parse(text).body]
    ways = [line for line in lines if re.search(FORMS_A_GROUP, line)]
    if len(ways) < 2:
        return [text]
    return ["\n".join(line for line in lines if line == way or line not in ways) for way in ways]


@PYTHON
def test_pods_find_each_other(folder: Path) -> None:
    """docs/how-to/containers.md: two processes with the variables of its Job, each with its own home."""
    texts = [block.text for block in blocks.blocks("docs/how-to/containers.md") if block.language == "yaml"]
    _, job = yaml.safe_load_all(next(text for text in texts if "kind: Job" in text))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    given = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert {name for name, value in given.items() if value is None} == {"PET_NODE_RANK", "PHALANX_TOKEN"}
    given |= {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(free_port()), "PHALANX_TOKEN": "5a" * 32}

    def pod(index: int) -> Handle:
        env = {**given, "PET_NODE_RANK": str(index), "PHALANX_HOME": str(folder / f"home{index}")}
        return start(*container["command"][1:], cwd=str(folder), env=env)

    pods = [pod(index) for index in range(int(given["PET_NNODES"]))]
    for one in pods:
        assert one.wait(120) == 0, one.out + one.err
    assert "epoch 7" in pods[0].out
    assert "2 nodes" in pods[0].err


@COMMANDS
def test_metrics_are_sent(folder: Path) -> None:
    shell(folder, "phalanx run -g 2 --cpu tracked.py")
    sent = [line.split(",") for line in (folder / "sent.csv").read_text().splitlines()]
    assert [int(step) for step, name, _ in sent if name == "loss"] == list(range(1, 45))
    assert [value for _, name, value in sent if name == "epochs_done"] == ["1", "2"]


@TUTORIALS
def test_the_notebook(folder: Path) -> None:
    """All cells run in a kernel, and the page shows the same cells."""
    script = folder / "execute.py"
    script.write_text(
        "import nbclient, nbformat\n"
        "notebook = nbformat.read('examples/notebook.ipynb', 4)\n"
        "nbclient.NotebookClient(notebook, timeout=150).execute()\n"
        "for cell in notebook.cells:\n"
        "    for out in cell.get('outputs', ()):\n"
        "        print(out.get('text') or out.get('data', {}).get('text/plain', ''))\n"
    )
    result = run((sys.executable, str(script)), cwd=str(folder), timeout=200)
    assert result.code == 0, result.err
    assert "[6.0, 6.0, 6.0, 6.0]" in result.out
    assert "rank 1 of 2: ValueError: a broken sample\n  Cell In[4]:3 in broken" in result.out
    assert "rank 1 is sleeping at Cell In[5]:3 in stuck; the other one (rank 0) waits for it" in result.out
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert cells == [block.text for block in blocks.blocks("docs/tutorials/notebook.md")]
