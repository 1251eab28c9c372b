"""Plain PyTorch: any ``torch.optim.Optimizer``, on one process, under DDP or FSDP2, through public step hooks."""

from tiercheck.integrations.torch.all_reduce import Compression, compressed_all_reduce
from tiercheck.integrations.torch.attaching import attach

__all__ = ["Compression", "attach", "compressed_all_reduce"]
