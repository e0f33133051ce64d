"""Errors of Python that the training API explains."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx
from phalanx.errors import UsageError
from phalanx.train import wrong_calls
from phalanx.worker import error_file

DATA = TensorDataset(torch.zeros(8, 1))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[phalanx.Run]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with phalanx.Run(phalanx.init(device="cpu")) as run:
        yield run


@pytest.mark.parametrize(
    ("typed", "message", "fix"),
    [
        ("run.save('kept')", "save() takes no argument by position, and was given 1", 'run.checkpoints("FOLDER")'),
        ("run.log('accuracy', 0.5)", "log() takes one argument by position, and was given 2", "run.log(accuracy="),
        ("run.evaluate(5)", "evaluate() is called without measure", "run.evaluate(test, measure)"),
        ("run.step(opt, 1.0, loss=2)", "step() was given loss twice: by position and by name", "loss=loss)"),
        ("run.wrap(model, mixed_precision='fp16')", "wrap() has no argument mixed_precision", "fix: precision=…"),
        ("run.wrap(model, find_unused_parameters=True)", "no argument find_unused_parameters", "fix: find_unused=…"),
        ("run.wrap(model, device_ids=[0])", "its arguments: model, how, precision,", "ddp = run.wrap(model)"),
        ("run.checkpoints('x', monitor='loss')", "checkpoints() has no argument monitor", "fix: metric=…"),
        ("run.checkpoints('x', 100)", "takes one argument by position, and was given 2", "every=500)"),
        ("run.group.mean(1, op='max')", "mean() has no argument op", "group.mean(x)"),
        ("run.wrap(model).export()", "export() is called without path", "ddp.export("),
    ],
)
def test_a_wrong_call_says_what_to_type(run: phalanx.Run, typed: str, message: str, fix: str) -> None:
    model = nn.Linear(1, 1)
    names = {"model": model, "opt": torch.optim.SGD(model.parameters())}

    def train(run: phalanx.Run) -> None:
        exec(compile(typed, "script.py", "exec"), {**names, "run": run})

    with pytest.raises(UsageError, match=re.escape(message)) as raised:
        wrong_calls.call(train, run)
    assert fix in str(raised.value)
    assert [frame.filename for frame in error_file.script_frames(raised.value)][-1] == "script.py"


def test_other_type_errors_are_those_of_the_script(run: phalanx.Run) -> None:
    class Loader:
        def epoch(self) -> None: ...

    own = {"Loader": Loader, "run": run}
    for typed in ("Loader().epoch(5)", "'a' + 5", "run.loader([1, 2], batch_size=2, collate_fn=lambda: 0).__iter__(5)"):

        def train(_: phalanx.Run, typed: str = typed) -> None:
            exec(typed, own)

        with pytest.raises(TypeError):
            wrong_calls.call(train, run)


def test_a_class_of_another_module_may_have_the_name_of_one_of_phalanx() -> None:
    module: dict[str, Any] = {}
    exec("class Loader:\n    def set_epoch(self): ...", module)

    def train(loader: Any) -> None:
        loader.set_epoch(5)

    with pytest.raises(TypeError, match=r"Loader.set_epoch\(\) takes 1 positional argument but 2 were given"):
        wrong_calls.call(train, module["Loader"]())


def test_decorators_may_change_the_arguments() -> None:
    def train(run: phalanx.Run, config: str) -> None: ...

    @functools.wraps(train)
    def with_config(run: phalanx.Run) -> None:
        train(run, "config")

    @functools.wraps(train)
    def without_run() -> None: ...

    wrong_calls.check_train(with_config)
    wrong_calls.check_train(functools.partial(train, config=""))
    with pytest.raises(UsageError, match="takes no argument"):
        wrong_calls.check_train(without_run)


def test_functions_that_would_not_run_are_refused() -> None:
    async def awaited(run: phalanx.Run) -> None: ...

    def generator(run: phalanx.Run) -> Iterator[int]:
        yield 1

    async def both(run: phalanx.Run) -> AsyncIterator[int]:
        yield 1

    with pytest.raises(UsageError, match=r"awaited is an async function, and main\(\) does not await it"):
        wrong_calls.check_train(functools.partial(awaited))
    for function in (generator, both):
        with pytest.raises(UsageError, match=f"{function.__name__} contains yield"):
            wrong_calls.check_train(function)


def test_main_takes_a_function_of_a_run() -> None:
    def train(rank: int, world_size: int) -> None: ...

    with pytest.raises(UsageError, match=r"main\(\) calls train\(run\), which takes rank, world_size"):
        wrong_calls.check_train(train)
    with pytest.raises(UsageError, match="takes no argument"):
        wrong_calls.check_train(lambda: None)
    wrong_calls.check_train(lambda run, lr=0.1: None)
    with pytest.raises(UsageError, match="the launcher decides") as raised:
        wrong_calls.check_options({"nproc": 4}, phalanx.init)
    assert raised.value.fix.startswith("phalanx run -g 4 ")
    with pytest.raises(UsageError, match="has no argument sed") as raised:
        wrong_calls.check_options({"sed": 4}, phalanx.init)
    assert raised.value.fix == "seed=…"
    wrong_calls.check_options({"seed": 4, "hyperparameters": {}}, phalanx.init)


def test_a_variable_of_a_loop_that_has_no_batch_left_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))

    def train(run: phalanx.Run, last: str = "") -> None:
        model = nn.Linear(1, 1)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        data = run.loader(TensorDataset(torch.zeros(4, 1)), batch_size=2)
        run.checkpoints(tmp_path)
        run.keep(model, opt, data)
        for epoch in run.epochs(2):
            for (x,) in run.batches(data):
                if epoch and last == "another":
                    float(unset)  # noqa: F821
                loss = model(x).mean()
                run.backward(loss)
                run.step(opt)
            if not last:
                run.save()
                return
            run.evaluate(run.loader(DATA, batch_size=2, train=False), lambda x: {"mean": x.mean()})
            if last == "loss":
                float(loss)
        unset = 0  # noqa: F841

    for last, raised in (("", None), ("loss", UsageError), ("another", UnboundLocalError)):
        with phalanx.Run(phalanx.init(device="cpu")) as run:
            expected = pytest.raises(raised) if raised is not None else contextlib.nullcontext()
            with expected as found:
                wrong_calls.call(functools.partial(train, last=last), run)
            if last == "loss":
                assert str(found.value).startswith("loss is not set: training has resumed at the end of an epoch")
                assert found.traceback[-1].name == "train"
