"""Torch dtypes by the names that safetensors and GGUF files give them."""

import torch

FILE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# FILE_DTYPES, and the dtypes that only quantised checkpoints use.
RAW_DTYPES = FILE_DTYPES | {
    "I32": torch.int32, "I64": torch.int64, "I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn
}  # fmt: skip
