"""phalanx run -g 2 examples/gpt_ddp.py: a small GPT on Shakespeare, on many ranks; `diff` it with gpt_plain.py"""

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PLAY = Path(__file__).parent / "data" / "asyoulikeit.txt"
LENGTH, WIDTH, HEADS, LAYERS = 64, 64, 4, 2


class Block(nn.Module):
    """Every letter looks at those before it, then thinks for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.look(self.norms[0](x)).chunk(3, dim=-1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        return x + self.think(self.norms[1](x))


class Gpt(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.guess = nn.Linear(WIDTH, letters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        place = torch.arange(text.shape[1], device=text.device)
        return self.guess(self.blocks(self.letter(text) + self.place(place)))


def write(model: nn.Module, start: torch.Tensor, letters: int) -> torch.Tensor:
    """Go on from `start`, one letter after the other."""
    chance = torch.Generator().manual_seed(0)
    for _ in range(letters):
        next_one = model(start[None, -LENGTH:])[0, -1].softmax(0)
        start = torch.cat([start, torch.multinomial(next_one, 1, generator=chance)])
    return start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", metavar="FILE", default=PLAY, help="a text; without it two acts of As You Like It")
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    text = Path(options.text).read_text(encoding="utf-8")
    letters = sorted(set(text))
    windows = torch.tensor([letters.index(letter) for letter in text]).unfold(0, LENGTH + 1, LENGTH)
    data, test = TensorDataset(windows[:-32]), windows[-31:]  # no letter of the test is learnt from
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32 // world, sampler=sampler)
    model = DistributedDataParallel(Gpt(len(letters)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for (window,) in loader:
            loss = nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}  loss {loss.item():.3f}")

    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(test[:, :-1]).flatten(0, 1), test[:, 1:].flatten())
        if rank == 0:
            print("".join(letters[n] for n in write(model.module, test[0, :20], 100)))
    blind = math.log(len(letters))
    print(f"rank {rank} of {world}: loss {loss.item():.3f} on text it has never seen; a blind guess has {blind:.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
