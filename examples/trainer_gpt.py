"""phalanx run -g 2 examples/trainer_gpt.py: a script of Hugging Face Trainer with a tiny GPT-2, unchanged"""

import math
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

PLAY = Path(__file__).parent / "data" / "asyoulikeit.txt"
LENGTH = 64


def main() -> None:
    text = PLAY.read_text(encoding="utf-8")
    letters = sorted(set(text))
    windows = torch.tensor([letters.index(letter) for letter in text]).unfold(0, LENGTH, LENGTH)
    data = [{"input_ids": window, "labels": window} for window in windows]
    config = GPT2Config(
        vocab_size=len(letters), n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            use_cpu=not torch.cuda.is_available(),
            per_device_train_batch_size=16,
            max_steps=40,
            learning_rate=3e-3,
            ddp_find_unused_parameters=False,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(GPT2LMHeadModel(config), options, train_dataset=data[:-50], eval_dataset=data[-50:])
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    who = f"rank {options.process_index} of {options.world_size}"
    length = sum(p.double().square().sum().item() for p in trainer.model.parameters()) ** 0.5
    blind = math.log(len(letters))
    print(f"{who}: loss {loss:.3f} on new text, {blind:.3f} by blind guess; the parameters have length {length:.6f}")


if __name__ == "__main__":
    main()
