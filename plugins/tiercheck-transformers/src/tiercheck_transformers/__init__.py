"""TierCheck for Hugging Face's ``Trainer``: ``attach(trainer, hierarchy)`` before ``trainer.train()``."""

from tiercheck_transformers.attaching import Attached, attach

__all__ = ["Attached", "attach"]
