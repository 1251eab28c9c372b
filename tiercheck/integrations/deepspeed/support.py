"""Which DeepSpeed set-ups can be saved whole. Every other one is refused before training starts.

The rule: a feature that keeps state between iterations which nobody saves is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.linear.optimized_linear import LoRAOptimizedLinear
from deepspeed.linear.quantization import QuantizedParameter
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import TiedLayerSpec

from tiercheck.errors import UnsupportedSetup
from tiercheck.integrations.deepspeed.layouts import MasterLayout

__all__ = ["refuse_odd_masters", "refuse_ranks_that_share_parameters", "refuse_unsupported"]

SUPPORTED = "ZeRO 0-3 in fp32, bf16 or fp16, on the training device or offloaded to the CPU"

_OPTIMIZERS_WITH_HIDDEN_STATE = ("onebit", "muon", "zenflow")


def refuse_unsupported(engine: Any) -> None:
    """Raise ``UnsupportedSetup`` naming everything about the engine that could not be saved or replayed."""
    if not isinstance(engine, DeepSpeedEngine):
        raise UnsupportedSetup(
            f"engine= must be the engine that deepspeed.initialize returns first, not {type(engine).__name__} (for a "
            "model without one, use tiercheck.integrations.torch)"
        )
    if engine.optimizer is None:
        raise UnsupportedSetup(f"the engine has no optimizer; supported: {SUPPORTED}")
    if engine._force_grad_boundary if isinstance(engine, PipelineEngine) else engine._running_engine_step:
        raise UnsupportedSetup(
            "a step of this engine was broken off by what was raised in it, and DeepSpeed does not tell how far it had "
            "come: start the process anew, which goes on from the newest version, or build a new engine"
        )
    found = [what for what, present in _conditions(engine) if present()]
    if found:
        raise UnsupportedSetup(
            f"this DeepSpeed set-up cannot be saved whole: {'; '.join(found)}. Supported: {SUPPORTED}"
        )


def refuse_ranks_that_share_parameters(engine: Any) -> None:
    """Raise ``UnsupportedSetup`` if ranks hold the same parameter in partitions that differ otherwise: each would
    compress its gradient in its own way, and the copies of the parameter would drift apart."""
    pipeline = isinstance(engine, PipelineEngine)
    if pipeline:
        sliced = engine.grid.get_slice_parallel_world_size() > 1
    else:
        sliced = engine.autotp_size() > 1 or engine.mp_world_size > 1
    tied = pipeline and any(isinstance(spec, TiedLayerSpec) for spec in engine.module._layer_specs)
    found = [what for what, there in (("tensor parallelism", sliced), ("tied layers of a pipeline", tied)) if there]
    if found:
        raise UnsupportedSetup(
            f"train_on_compressed does not go with {' and '.join(found)}: ranks hold the same parameter, and would "
            "train it with different gradients. Supported: ZeRO 0-3, and pipelines without tied layers"
        )


def _conditions(engine: Any) -> Iterator[tuple[str, Callable[[], bool]]]:
    yield from _precision(engine)
    yield from _placement(engine)
    yield from _optimizer(engine)
    yield from _module(engine)
    yield from _data(engine)


def _precision(engine: Any) -> Iterator[tuple[str, Callable[[], bool]]]:
    yield (
        "torch_autocast in fp16 (its gradient scaler); use bf16",
        lambda: engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16,
    )
    yield (
        "low-precision master weights or optimizer states",
        lambda: (
            engine.bf16_master_weights_and_gradients()
            or engine.fp16_master_weights_and_gradients()
            or engine.bf16_optimizer_states()
        ),
    )
    yield (
        "a loss scale of the script's own (override_loss_scale)",
        lambda: bool(getattr(engine.optimizer, "custom_loss_scaler", False)),
    )
    yield "quantized weights (zero_quantized_weights)", engine.zero_quantized_weights
    yield (
        "quantized frozen weights (zero_quantized_nontrainable_weights)",
        engine.zero_quantized_nontrainable_weights,
    )


def _placement(engine: Any) -> Iterator[tuple[str, Callable[[], bool]]]:
    optimizer, parameters = engine.zero_offload_optimizer(), engine.zero_offload_param()
    yield (
        "NVMe for what is offloaded (offload_optimizer, offload_param)",
        lambda: "nvme" in (_device(optimizer), _device(parameters)),
    )
    yield (
        "a part of the optimizer offloaded (ratio in offload_optimizer)",
        lambda: _device(optimizer) != "none" and optimizer.ratio != 1.0,
    )
    yield "SuperOffload", lambda: bool(getattr(optimizer, "super_offload", False))
    yield "ZenFlow", lambda: bool(engine.zenflow)
    yield "hierarchical partitioning (zero_hpz_partition_size > 1)", lambda: engine.zero_hpz_partition_size() > 1
    yield "mixture of experts", lambda: bool(engine.has_moe_layers)
    yield "DeepCompile", engine.is_deepcompile_enabled
    yield "the hybrid engine", lambda: isinstance(engine, DeepSpeedHybridEngine)


def _device(config: Any) -> str:
    return "none" if config is None else str(getattr(config.device, "value", config.device))


def _optimizer(engine: Any) -> Iterator[tuple[str, Callable[[], bool]]]:
    wrapper = engine.optimizer
    inner = getattr(wrapper, "optimizer", wrapper)
    path = f"{type(inner).__module__}.{type(inner).__qualname__}"
    yield (
        f"the optimizer {path} (it keeps state of its own outside torch's)",
        lambda: any(word in path.lower() for word in _OPTIMIZERS_WITH_HIDDEN_STATE),
    )
    yield (
        "legacy optimizer fusion (its step bypasses the gradients of the masters)",
        lambda: bool(getattr(wrapper, "fused_adam_legacy", False) or getattr(wrapper, "fused_lamb_legacy", False)),
    )
    scheduler = engine.lr_scheduler
    yield (
        f"the learning-rate scheduler {type(scheduler).__name__} (it has no state_dict, or steps by a metric)",
        lambda: (
            scheduler is not None
            and (
                not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict"))
                or isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            )
        ),
    )


def _module(engine: Any) -> Iterator[tuple[str, Callable[[], bool]]]:
    modules = list(engine.module.modules())
    yield (
        "LoRA linear layers (their sharded base weights)",
        lambda: any(isinstance(each, LoRAOptimizedLinear) for each in modules),
    )
    yield (
        "quantized parameters",
        lambda: any(isinstance(each, QuantizedParameter) for each in engine.module.parameters()),
    )


def _data(engine: Any) -> Iterator[tuple[str, Callable[[], bool]]]:
    yield "random layer-token dropping (random_ltd)", engine.random_ltd_enabled
    yield "the curriculum data sampler (data_efficiency)", engine.curriculum_learning_enabled
    yield (
        "a pipeline engine that owns its data loader (training_data); pass data_iter to train_batch instead",
        lambda: isinstance(engine, PipelineEngine) and engine.training_dataloader is not None,
    )


def refuse_odd_masters(layout: MasterLayout) -> None:
    """Raise ``UnsupportedSetup`` for masters that cannot be told apart, or be saved."""
    masters = layout.masters()
    if not masters:
        raise UnsupportedSetup("the optimizer updates no tensor on this rank, so there is nothing to save")
    if len({master.name for master in masters}) != len(masters):
        raise UnsupportedSetup("two parameters of the optimizer have one name; give each parameter one place in it")
    for master in masters:
        if master.tensor.dtype is not torch.float32:
            raise UnsupportedSetup(f"the master {master.name} is {master.tensor.dtype}; supported is torch.float32")
        if master.tensor.device.type == "meta":
            raise UnsupportedSetup(f"the master {master.name} is on the meta device; materialise the model first")
