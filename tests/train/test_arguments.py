"""Arguments of `Run`: a wrong type is named, with what to type instead. And all of `Run` is documented."""

from __future__ import annotations

import inspect
import json
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx
from phalanx.errors import OptionError, UsageError
from phalanx.train import other_names
from phalanx.train.model import sharding
from phalanx.train.model.wrapped import Wrapped
from phalanx.train.run import Run
from phalanx.worker.process_group.group import WorkerProcessGroup

DATA = TensorDataset(torch.zeros(8, 1))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[phalanx.Run]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with phalanx.Run(phalanx.init(device="cpu")) as run:
        yield run


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (0.5, r"given a float, .*\n.*loss.item\(\)(.*\n)*.*run.backward\(loss\)"),
        (numpy.float32(0.5), "given a float32"),
        (numpy.zeros(1), "given a ndarray"),
        (torch.tensor(0.5), "a tensor without gradients"),
    ],
)
def test_a_loss(run: phalanx.Run, loss: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run.backward(loss)


def test_a_number_of_epochs(run: phalanx.Run) -> None:
    for wrong in ("2", 2.0, None, [1, 2], -1, torch.tensor(3.0), numpy.array([1, 2])):
        with pytest.raises(UsageError, match=r"epochs\(\) was given .*, expected a number(.*\n)*.*run.epochs\(10\)"):
            list(run.epochs(wrong))  # type: ignore[arg-type]
    assert list(run.epochs(numpy.int64(2))) == [0, 1]


def test_the_loss_of_a_step_can_be_given_by_position(run: phalanx.Run, tmp_path: Path) -> None:
    run.group.folder = str(tmp_path)
    model = nn.Linear(1, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for loss in (0.5, numpy.float32(0.25), torch.tensor(0.125)):
        run.backward(model(torch.ones(1, 1)).mean())
        run.step(opt, loss, lr=0.1)
    run.group.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["loss"], line["lr"]) for line in lines] == [(0.5, 0.1), (0.25, 0.1), (0.125, 0.1)]


def test_a_step(run: phalanx.Run) -> None:
    opt = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    for wrong, message in (
        (torch.tensor(0.5), r"step\(\) was given a tensor, expected an optimizer\n.*run.step\(optimizer, loss=loss\)"),
        (0.5, "given a float, expected an optimizer"),
        (nn.Linear(1, 1), "given a Linear, expected an optimizer"),
        (torch.optim.SGD, "the class SGD, expected an optimizer"),
        (torch.optim.LBFGS([torch.zeros(1)]), "LBFGS calls the model several times for one update"),
    ):
        with pytest.raises(UsageError, match=message):
            run.step(wrong)
    for options, message in (
        ({"clip": "1"}, "clip='1': expected the largest norm"),
        ({"clip": 0}, "clip=0"),
        ({"clip": True}, "clip=True"),
        ({"scheduler": 0.1}, "scheduler is a float"),
    ):
        with pytest.raises(UsageError, match=message):
            run.step(opt, **options)


def test_a_model(run: phalanx.Run) -> None:
    with pytest.raises(UsageError, match=r"the class Linear, expected a torch.nn.Module\n.*run.wrap\(Linear\(\)\)"):
        run.wrap(nn.Linear)
    with pytest.raises(UsageError, match=r"given an Adam, expected a torch\.nn\.Module"):
        run.wrap(torch.optim.Adam(nn.Linear(1, 1).parameters()))
    for wrong, message in (
        ({"how": torch.optim.Adam(nn.Linear(1, 1).parameters())}, r"given a Adam after the model, expected one of ddp"),
        ({"accumulate": "4"}, "accumulate='4': expected 1 or more"),
    ):
        with pytest.raises(UsageError, match=message):
            run.wrap(nn.Linear(1, 1), **wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"shard='Block': expected a class of module"):
        sharding.units(nn.Linear(1, 1), "Block")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="find_unused_parameters"):
        run.wrap(nn.Linear(1, 1), find_unused_parameters=True)  # type: ignore[call-arg]


def names(owner: object) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}


def test_run_is_small_and_documented(run: phalanx.Run) -> None:
    """At most 20 names; each has a docstring that begins with its use. So has the group's."""
    assert dir(run) == sorted(names(Run))
    assert len(names(Run)) <= 20
    assert Run.checkpoint is Run.save  # people try both
    for name in names(Run):
        assert f"run.{name}" in (inspect.getdoc(getattr(Run, name)) or "").partition("\n")[0], name
    internal = {"join", "print_inside", "seed_generator", "abandon", "forget_groups"}
    for name in names(WorkerProcessGroup) - internal:
        assert f"group.{name}" in (inspect.getdoc(getattr(WorkerProcessGroup, name)) or ""), name
    signatures = [inspect.signature(getattr(Run, name)) for name in ("wrap", "backward", "checkpoints")]
    kinds = {parameter.kind for signature in signatures for parameter in signature.parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds


def test_a_name_of_another_object_says_where_it_is(run: phalanx.Run) -> None:
    moved = names(run.group) - names(run)
    assert {"barrier", "mean", "is_main", "local_rank", "store", "on_resize", "close", "folder"} <= moved
    for name in moved:
        with pytest.raises(AttributeError, match=rf"^Run has no '{name}'\. .*: run\.group\.{name}(\(\))?$"):
            getattr(run, name)
    for name, there in (
        ("barrier", "The process group has it: run.group.barrier()"),
        ("local_group", "The process group has it: run.group.local_group"),
        ("export", "The module that run.wrap returns has it: ddp.export()"),
    ):
        with pytest.raises(AttributeError) as caught:
            getattr(run, name)
        assert str(caught.value) == f"Run has no '{name}'. {there}"
        assert not hasattr(run, name)
    for name, typed in (
        ("is_main_process", "run.group.is_main"),
        ("wait_for_everyone", "run.group.barrier()"),
        ("all_gather", "run.group.gather(x, all=True)"),
        ("autocast", 'run.wrap(model, precision="bf16")'),
    ):
        with pytest.raises(AttributeError, match=rf"^Run has no '{name}'\. What you may mean: {re.escape(typed)}$"):
            getattr(run, name)
    with pytest.raises(AttributeError, match=r"^Run has no 'batchs'$") as caught:
        run.batchs  # type: ignore[attr-defined]  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("batchs", run)  # so that Python finds: Did you mean: 'batches'?
    with pytest.raises(AttributeError, match=r"no 'keep'. Training needs a run: run = phalanx\.Run\(group\)$"):
        run.group.keep  # type: ignore[attr-defined]  # noqa: B018


def test_names_of_other_libraries_say_what_to_type_here(run: phalanx.Run) -> None:
    """No name is one of ours, and everything that is suggested exists."""
    assert not other_names.OTHER.keys() & (names(Run) | names(run.group))
    for typed in other_names.OTHER.values():
        for path in re.findall(r"\b(?:run|phalanx|ddp)(?:\.\w+)+", typed):
            operator.attrgetter(path)(SimpleNamespace(run=run, phalanx=phalanx, ddp=Wrapped))


def test_the_package_names_what_it_has() -> None:
    assert {"Run", "main", "spawn"} <= set(dir(phalanx))
    with pytest.raises(AttributeError, match="phalanx has no run") as caught:
        phalanx.run  # type: ignore[attr-defined]  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("run", phalanx)  # Did you mean: 'Run'?


def test_a_value_is_no_attribute(run: phalanx.Run) -> None:
    with pytest.raises(AttributeError, match=r'run\.state\["best"\]'):
        run.state.best  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r'run\.state\.best is not kept: run\.state\["best"\] = …'):
        run.state.best = 0.5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (5, {}, r"loader\(\) was given an int, expected a data set(.*\n)*.*run\.loader\(dataset, batch_size=64\)"),
        ("data/train", {}, r"loader\(\) was given a str, expected a data set"),
        (nn.Linear(1, 1), {}, r"loader\(\) was given a Linear, expected a data set"),
        (TensorDataset, {}, r"the class TensorDataset, expected(.*\n)*.*run\.loader\(TensorDataset\(…\), batch_size"),
        ({"train": DATA}, {}, r"given a dict, expected(.*\n)*.*run\.loader\(data\['train'\], batch_size=64\)"),
        (DATA, {"seed": "x"}, "seed='x': expected a whole number"),
        (DATA, {"weights": numpy.array([1.0, 2.0])}, "2 weights for 1 rank"),
        (DATA, {"weights": 3}, r"weights=3: expected one number per rank\n.*weights=\[1\]"),
        (DATA, {"collate_fn": 3}, "collate_fn=3: expected a function"),
        (DATA, {"num_workers": 1.5}, "num_workers=1.5: expected a whole number"),
    ],
)
def test_a_loader(run: phalanx.Run, dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run.loader(dataset, 4, **options)


def test_a_loader_is_not_loaded_again(run: phalanx.Run) -> None:
    with pytest.raises(UsageError, match=r"given a loader of run\.loader(.*\n)*.*run\.batches\(loader\)"):
        run.loader(run.loader(DATA, 4), 4)
    for wrong in (5, None, nn.Linear(1, 1), TensorDataset):
        with pytest.raises(UsageError, match=r"batches\(\) was given .*, expected a loader"):
            run.batches(wrong)


def test_what_is_kept(run: phalanx.Run) -> None:
    model = nn.Linear(1, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for given, message in (
        ([model, opt], r"keep\(\) was given a list of objects\n.*fix: run\.keep\(model, optimizer\)$"),
        ({"model": model}, r"keep\(\) was given a dict of objects\n.*fix: run\.keep\(model\)$"),
        (DATA, r"cannot be kept(.*\n)*.*data = run\.loader\(dataset\), and run\.keep\(data\)"),
        (model.state_dict(), r"a value needs a name: run\.keep\(name=…\)$"),
        (5, r"a value needs a name: run\.keep\(name=5\)$"),
    ):
        with pytest.raises(UsageError, match=message):
            run.keep(given)


def test_an_error_inside_a_property_is_not_hidden(run: phalanx.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "steps", property(lambda run: run._counter.stepz))
    with pytest.raises(AttributeError, match="'TrainingProgress' object has no attribute 'stepz'"):
        run.steps  # noqa: B018


def test_a_process_group(run: phalanx.Run) -> None:
    for wrong in (None, run, "gloo"):
        with pytest.raises(UsageError, match=r"Run\(\) was given .*, expected a process group\n.*phalanx\.init\(\)\)"):
            phalanx.Run(wrong)  # type: ignore[arg-type]


def test_a_run_is_closed_with_its_group(tmp_path: Path) -> None:
    """The process group closes what was created in it, and raises its errors."""
    group = phalanx.init(device="cpu")
    run = phalanx.Run(group)
    assert run.group is group
    model = nn.Linear(1, 1)
    run.checkpoints(tmp_path / "kept")
    run.keep(model)
    run.backward(model(torch.ones(1, 1)).mean())
    run.step(torch.optim.SGD(model.parameters(), lr=0.1))
    run.save()
    closed: list[bool] = []

    def refuses(failed: bool) -> None:
        closed.append(failed)
        raise OSError("no space left")

    group.closing.first(refuses)
    with pytest.raises(OSError, match="no space left"):
        group.close()
    assert (closed, group.closed) == ([False], True)
    assert [path.name for path in (tmp_path / "kept").iterdir() if "step" in path.name]
    group.close()
    assert closed == [False]


def test_a_seed_is_checked_before_the_group_forms(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Under `phalanx run` no one checks it later."""
    monkeypatch.setattr("phalanx.train.main._run", lambda *_: pytest.fail("the group formed"))
    with pytest.raises(SystemExit):
        phalanx.main(lambda run: None, seed="1")
    assert "seed='1': expected a whole number\n  fix: seed=1" in capfd.readouterr().err


@pytest.mark.parametrize("failed", [False, True])
def test_a_run_that_failed_is_not_compared_with_ranks_that_may_be_gone(
    monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    with phalanx.init(device="cpu") as group:
        run = phalanx.Run(group)
        compared: list[bool] = []
        monkeypatch.setattr(run._misuse._comparison, "close", lambda: compared.append(True) or [])
        group.close(failed=failed)
        assert compared == ([] if failed else [True])


@pytest.mark.parametrize("name", ["folder", "every", "keep_last", "keep_best"])
def test_options_of_checkpoints_are_not_kept_as_values(run: phalanx.Run, name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} is an option of checkpoints") as raised:
        run.keep(nn.Linear(1, 1), **{name: 3})
    assert raised.value.fix == f"run.checkpoints({name}=3), before run.keep(…)"
