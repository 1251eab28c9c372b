"""DeepSpeed's compiled Adam on the CPU, in Python: it takes minutes to compile. With ``TESTS_COMPILED_CPU_ADAM`` in the
environment the tests use the real one, which agrees."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["PlainCPUAdam"]


class PlainCPUAdam:
    """The module that DeepSpeed compiles for its ``DeepSpeedCPUAdam``, which takes minutes: the same calls, and powers
    of the betas that are multiplied on in fp32."""

    def __init__(self) -> None:
        self._made: dict[int, dict[str, Any]] = {}

    def load(self) -> PlainCPUAdam:
        return self

    def create_adam(self, number: int, lr: float, b1: float, b2: float, *rest: Any) -> None:
        self._made[number] = {"step": 0, "betas": np.float32([b1, b2]), "powers": np.ones(2, np.float32)}

    def destroy_adam(self, number: int) -> None:
        self._made.pop(number, None)

    def adam_update(
        self,
        number: int,
        step: int,
        lr: float,
        b1: float,
        b2: float,
        eps: float,
        decay: float,
        corrects: bool,
        *tensors: Any,
    ) -> None:
        made, betas = self._made[number], np.float32([b1, b2])
        if (betas == made["betas"]).all() and step == made["step"] + 1:
            made["powers"] = made["powers"] * betas
        elif not (betas == made["betas"]).all() or step != made["step"]:
            made["powers"] = np.power(betas.astype(np.float64), step).astype(np.float32)
        made |= {"step": step, "betas": betas}
        one, other = map(float, 1 - made["powers"])
        parameter, gradient, average, square = tensors
        average.lerp_(gradient, 1 - b1)
        square.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        parameter.mul_(1 - lr * decay)
        if one and other:
            parameter.addcdiv_(average, (square / other).sqrt_().add_(eps), value=-lr / one)
