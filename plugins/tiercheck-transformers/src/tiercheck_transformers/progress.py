"""Where a Trainer is in its data, and what it has counted: saved with each version, and put back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, Trainer
from transformers.trainer_callback import ExportableState

__all__ = ["Progress"]

COUNTED = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""Of ``TrainerState``, what training changes beside its log. The rest follows from the arguments of the start."""


class Progress:
    """Of one Trainer.

    ``epoch`` and ``updates``: the epoch that it trains, and the optimizer's steps that it has made in it. Both are
    counted here, since an epoch may end early. The losses since the last log are kept as well, so that the next one
    logs the number that it would have logged.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.epoch = 0
        self.updates = 0
        self.began_from: str | None = None
        """The checkpoint of the Trainer's own that the job began from: it holds the random states of its first step."""
        self.told: dict[str, Any] | None = None
        """The random generators before callbacks were told of the epoch, if any of those have used them."""
        self.begun: dict[str, Any] | None = None
        """The random generators as the epoch began, if its order of samples was drawn from them."""
        self.samples = self.samples_now
        """Of an update, on all ranks. As restored: those of the start before."""
        self.order = self.order_now
        """What the order of an epoch's samples follows from. As restored: that of the start before."""
        self.updates_of_epoch = 0
        """As restored: those of the start before."""
        self.ahead = 0
        """So many steps more were made than there are updates behind this place in the data, since an update was
        shorter before. Negative: fewer."""
        self._log = ""
        """The Trainer's log as text, an entry a line. Each version holds all of it, and packs one string in no time."""
        self._entries = 0
        """So many of them are in it."""

    def state_dict(self) -> dict[str, Any]:
        trainer, state = self._trainer, self._trainer.state
        return {
            "epoch": self.epoch,
            "updates": self.updates,
            "samples": self.samples_now,
            "ahead": self.ahead,
            "updates_of_epoch": self.updates_of_epoch,
            "order": self.order_now,
            "began_from": self.began_from,
            "counted": {name: getattr(state, name) for name in COUNTED},
            "log": self._logged(),
            "callbacks": {name: dict(each.state().get("attributes", {})) for name, each in self._callbacks()},
            "loss": float(trainer._tr_loss),
            "logged": trainer._globalstep_last_logged,
            "flos": trainer.current_flos,
            **({} if self.told is None else {"told": self.told}),
            **({} if self.begun is None else {"begun": self.begun}),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        trainer, state = self._trainer, self._trainer.state
        if "samples" in saved or saved["epoch"] or saved["updates"]:
            self.epoch, self.updates = saved["epoch"], saved["updates"]
        # else it is a version 0 of an older release, which did not know where the Trainer began: as this one does
        self.samples, self.ahead = saved.get("samples", self.samples), saved.get("ahead", 0)
        self.updates_of_epoch = saved.get("updates_of_epoch", self.updates_of_epoch)
        self.order = saved.get("order", self.order)
        self.began_from, self.told, self.begun = (saved.get(name) for name in ("began_from", "told", "begun"))
        for name, value in saved["counted"].items():
            setattr(state, name, value)
        self._log = saved["log"]
        state.log_history = [json.loads(line) for line in self._log.splitlines()]
        self._entries = len(state.log_history)
        if state.best_model_checkpoint is not None and not Path(state.best_model_checkpoint).is_dir():
            state.best_model_checkpoint = None
        for name, callback in self._callbacks():
            for attribute, value in saved["callbacks"].get(name, {}).items():
                setattr(callback, attribute, value)
        trainer._tr_loss = torch.tensor(saved["loss"], device=trainer.args.device)
        trainer._globalstep_last_logged = saved["logged"]
        trainer.current_flos = saved["flos"]
        # What train() returns is of its own steps alone, as when a Trainer resumes from a checkpoint of its own.
        trainer._total_loss_scalar = -saved["loss"]
        trainer._initial_global_step = state.global_step
        trainer._initial_num_input_tokens_seen = state.num_input_tokens_seen

    @property
    def samples_now(self) -> int:
        return int(self._trainer.get_total_train_batch_size(self._trainer.args))

    @property
    def order_now(self) -> dict[str, Any]:
        args, data = self._trainer.args, self._trainer.train_dataset
        return {
            "seed": args.seed,
            "data_seed": args.data_seed,
            "train_sampling_strategy": str(args.train_sampling_strategy),
            "samples of the data": len(data) if isinstance(data, Sized) else None,
        }

    @property
    def has_stopped_early(self) -> bool:
        """Whether an ``EarlyStoppingCallback`` has ended the training. What else may do so (a signal, a time limit) is
        of one start, and the next one goes on."""
        return any(
            each.early_stopping_patience_counter >= each.early_stopping_patience
            for each in self._trainer.callback_handler.callbacks
            if isinstance(each, EarlyStoppingCallback)
        )

    def _logged(self) -> str:
        for entry in self._trainer.state.log_history[self._entries :]:
            self._log += json.dumps(entry, default=as_plain) + "\n"
            self._entries += 1
        return self._log

    def _callbacks(self) -> Iterator[tuple[str, ExportableState]]:
        """Those that have a state, by name. Of several of one class, each has a number."""
        seen: dict[str, int] = {}
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                kind = type(callback).__name__
                seen[kind] = seen.get(kind, 0) + 1
                yield f"{kind} {seen[kind]}", callback


def as_plain(value: Any) -> Any:
    """What a callback has logged that is no number of Python's, such as NumPy's or a tensor."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
