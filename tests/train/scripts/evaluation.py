"""A training with an evaluation of 301 samples after each epoch. Rank 0 prints what was measured as JSON.

phalanx run -g 3 evaluation.py [RANK]

RANK is killed in the middle of the first evaluation, once.
"""

import json
import os
import signal
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import phalanx

torch.set_num_threads(1)
torch.manual_seed(0)
TRUTH = torch.randn(20, 3)
X = torch.randn(96, 20)
TRAINING = TensorDataset(X, (X @ TRUTH).argmax(1))
T = torch.randn(301, 20)
TEST = TensorDataset(T, (T @ TRUTH).argmax(1))
VICTIM = int(sys.argv[1]) if len(sys.argv) > 1 else -1


def train(run: phalanx.Run) -> None:
    model = nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 3)).double()
    model[2].p = 0.0  # the model is the same at any number of ranks, to float tolerance
    model[1].eval()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    data = run.loader(TRAINING, global_batch=24, shuffle=True)
    test = run.loader(TEST, batch_size=50, train=False)
    run.keep(model=model, opt=opt, data=data)
    net = run.wrap(model)
    batches = 0

    def measure(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        nonlocal batches
        batches += 1
        if run.rank == VICTIM and run.group.generation == 0 and batches == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        assert not torch.is_grad_enabled()
        assert not any(part.training for part in (net, *model.modules()))
        output = net(x.double())
        return {"loss": cross_entropy(output, y), "accuracy": output.argmax(1) == y}

    for _ in run.epochs(2):
        for x, y in run.batches(data):
            run.backward(cross_entropy(net(x.double()), y))
            run.step(opt)
        metrics = run.evaluate(test, measure)
        assert net.training
        assert [part.training for part in model] == [True, False, True, True, True]
        with torch.no_grad():  # as in a plain script
            counted = run.group.sum({"n": sum(len(y) for _, y in run.batches(test))})
        run.print(json.dumps({**metrics, "counted": counted["n"], "generation": run.group.generation}))


phalanx.main(train)
