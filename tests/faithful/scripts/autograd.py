"""Custom autograd functions, hooks, double backward, anomaly detection, a second thread."""

import threading

import torch


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


torch.manual_seed(0)
x = torch.randn(6, requires_grad=True)
x.register_hook(lambda grad: grad * 2)
with torch.autograd.detect_anomaly():
    Clip.apply(x).square().sum().backward()
print(x.grad.tolist(), torch.autograd.gradcheck(Clip.apply, torch.zeros(3, dtype=torch.double, requires_grad=True)))
y = torch.tensor(2.0, requires_grad=True)
(first,) = torch.autograd.grad(y**4, y, create_graph=True)
print(torch.autograd.grad(first, y)[0].item())


def elsewhere():
    z = torch.ones(3, requires_grad=True)
    (z * 3).sum().backward()
    print(z.grad.tolist(), torch.is_grad_enabled())


thread = threading.Thread(target=elsewhere)
thread.start()
thread.join()
print(torch.func.vmap(torch.func.grad(torch.sin))(torch.arange(3.0)).tolist())
