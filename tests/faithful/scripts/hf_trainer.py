"""The Trainer of transformers with a tiny model made from a configuration."""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

config = BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2
)
arguments = TrainingArguments(
    "out",
    max_steps=4,
    per_device_train_batch_size=2,
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    use_cpu=True,
    seed=11,
    disable_tqdm=True,
)
torch.manual_seed(0)
data = [{"input_ids": torch.randint(50, (6,)), "labels": index % 2} for index in range(32)]
trainer = Trainer(model=BertForSequenceClassification(config), args=arguments, train_dataset=data)
result = trainer.train()
print(result.global_step, repr(result.training_loss))
print([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
trainer.save_model("model")
