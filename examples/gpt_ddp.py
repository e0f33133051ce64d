"""phalanx run -g 2 examples/gpt_ddp.py: a small GPT learns Shakespeare, on many ranks; `diff` it with gpt_plain.py"""

import argparse
import math
import os
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


def surprise(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """How little it expected each letter after those before it: the loss."""
    return nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def write(model: nn.Module, text: torch.Tensor, letters: int) -> torch.Tensor:
    """Continue `text`, one letter at a time."""
    chance = torch.Generator(text.device).manual_seed(0)
    for _ in range(letters):
        chances = model(text[None, -LENGTH:])[0, -1].softmax(0)
        text = torch.cat([text, torch.multinomial(chances, 1, generator=chance)])
    return text[-letters:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", metavar="FILE", default=PLAY, help="a text; without it two acts of As You Like It")
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()

    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    text = Path(options.text).read_text(encoding="utf-8")
    letters = sorted(set(text))
    blind = math.log(len(letters))  # the loss of a model that knows nothing
    windows = torch.tensor([letters.index(letter) for letter in text]).unfold(0, LENGTH + 1, LENGTH)
    data, test = TensorDataset(windows[:-33]), windows[-32:].to(device)  # no letter of the test is learnt from
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32 // world, sampler=sampler)
    model = DistributedDataParallel(Gpt(len(letters)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for (window,) in loader:
            loss = surprise(model, window.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            loss = surprise(model, test)
        print(f"rank {rank} of {world}, epoch {epoch + 1}: loss {loss:.3f} on new text, {blind:.3f} by blind guess")
    if rank == 0:
        with torch.no_grad():
            print("".join(letters[n] for n in write(model.module, test[0], 100)))


if __name__ == "__main__":
    dist.init_process_group()  # nccl between GPUs, gloo between CPUs
    main()
    dist.destroy_process_group()
