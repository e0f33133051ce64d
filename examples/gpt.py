"""python examples/gpt.py, or phalanx run -g 2 examples/gpt.py, torchrun, srun, mpirun: the same script

What gpt_plain.py does, on as many ranks as there are; `diff` shows the few lines that make it so.
`--how fsdp` shards the model instead of copying it; `--precision bf16 --compile` is what suits a GPU.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx

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


def train(run: phalanx.Run) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", metavar="FILE", default=PLAY, help="a text; without it two acts of As You Like It")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--how", choices=("ddp", "fsdp"), default="ddp", help="a copy on every rank, or a part")
    parser.add_argument("--precision", choices=("bf16", "fp16"), help="what it computes in; the parameters stay fp32")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    options = parser.parse_args()

    text = Path(options.text).read_text(encoding="utf-8")
    letters = sorted(set(text))
    blind = math.log(len(letters))  # the loss of a model that knows nothing
    windows = torch.tensor([letters.index(letter) for letter in text]).unfold(0, LENGTH + 1, LENGTH)
    data, test = TensorDataset(windows[:-33]), windows[-32:].to(run.device)  # no letter of the test is learnt from
    loader = run.loader(data, global_batch=32, shuffle=True)
    model = Gpt(len(letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.keep(model, optimizer, loader)
    ddp = run.wrap(model, options.how, precision=options.precision, compile=options.compile)
    for epoch in run.epochs(options.epochs):
        for (window,) in run.batches(loader):
            loss = surprise(ddp, window)
            run.backward(loss)
            run.step(optimizer, loss=loss)
        with torch.no_grad():
            loss = surprise(ddp, test)
        run.print(f"epoch {epoch + 1}: loss {loss:.3f} on new text, {blind:.3f} by blind guess")
    with torch.no_grad():
        run.print("".join(letters[n] for n in write(ddp, test[0], 100)))


if __name__ == "__main__":
    phalanx.main(train)
