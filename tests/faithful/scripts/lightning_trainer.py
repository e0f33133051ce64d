"""Lightning's Trainer with two steps per epoch."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, index):
        loss = self.layer(batch[0]).square().mean()
        print("step", index, loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    lightning.seed_everything(5)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4))
    print(trainer.global_step, module.layer.weight.sum().item())
