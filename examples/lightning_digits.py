"""phalanx run -g 2 examples/lightning_digits.py: a script of Lightning, unchanged"""

import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.demo import idx


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("right", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        devices=ranks,
        num_nodes=int(os.environ.get("WORLD_SIZE", "1")) // ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits()
    trainer.fit(model, DataLoader(TensorDataset(*idx.load()), batch_size=64 // trainer.world_size, shuffle=True))
    found = trainer.validate(model, DataLoader(TensorDataset(*idx.load(test=True)), batch_size=90), verbose=False)[0]
    who = f"rank {trainer.global_rank} of {trainer.world_size}"
    length = sum(p.double().square().sum().item() for p in model.parameters()) ** 0.5
    print(f"{who}: {found['right']:.1%} of new digits are correct, the parameters have length {length:.6f}")


if __name__ == "__main__":
    main()
