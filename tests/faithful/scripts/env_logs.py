"""TORCH_LOGS and other variables that torch reads at import."""

import os

os.environ["TORCH_LOGS"] = "+distributed,dynamo"
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
os.environ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"

import logging

import torch

print(logging.getLogger("torch.distributed").level, logging.getLogger("torch._dynamo").level)
print(torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision())
