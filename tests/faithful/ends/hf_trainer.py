import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
model = BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=2, **sizes))
data = [{"input_ids": torch.randint(50, (6,)), "labels": index % 2} for index in range(16)]
arguments = TrainingArguments("out", max_steps=3, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True)
Trainer(model=model, args=arguments, train_dataset=data).train()
