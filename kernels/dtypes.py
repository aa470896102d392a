"""Torch dtypes by the names that safetensors and GGUF files give them."""

import torch

FILE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
