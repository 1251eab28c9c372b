"""DeepSpeed: ZeRO 0 to 3 in fp32, bf16 and fp16, pipelines included, by one line after ``deepspeed.initialize``."""

from tiercheck.integrations.deepspeed.attaching import attach, read_block

__all__ = ["attach", "read_block"]
