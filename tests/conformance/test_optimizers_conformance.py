"""The built-in replayable optimizers pass the kit, as anybody's must."""

from __future__ import annotations

from tiercheck.testing.optimizers import OptimizerTests


class TestAdam(OptimizerTests):
    kind = "torch.optim.adam.Adam"


class TestAdamW(OptimizerTests):
    kind = "torch.optim.adamw.AdamW"


class TestSgd(OptimizerTests):
    kind = "torch.optim.sgd.SGD"
    implementations_of_every_step = frozenset({"fused"})
