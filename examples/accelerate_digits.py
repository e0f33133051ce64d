"""phalanx run -g 2 examples/accelerate_digits.py: a script of Hugging Face Accelerate, unchanged"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.demo import idx


def main() -> None:
    # Without a GPU, Accelerate looks for other ranks only on request: here, or by ACCELERATE_USE_CPU=true.
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*idx.load()), batch_size=64 // accelerator.num_processes, shuffle=True)
    tests = DataLoader(TensorDataset(*idx.load(test=True)), batch_size=100)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader, tests = accelerator.prepare(model, optimizer, loader, tests)
    for _ in range(6):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()

    right = []
    with torch.no_grad():
        for x, y in tests:
            right.append(accelerator.gather_for_metrics((model(x).argmax(1) == y).float()))
    score = torch.cat(right)
    length = sum(p.double().square().sum().item() for p in model.parameters()) ** 0.5
    who = f"rank {accelerator.process_index} of {accelerator.num_processes}"
    print(f"{who}: {score.mean():.1%} of {len(score)} new digits are correct; parameters have length {length:.6f}")
    # Delete the wrapped model before the group: torch may deadlock when the model is the last to hold the group.
    model, optimizer, loader, tests = accelerator.free_memory(model, optimizer, loader, tests)
    accelerator.end_training()


if __name__ == "__main__":
    main()
