"""A job of a Trainer that is killed ends with the bits, and the logs, of one that is not."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from job import KILLED, Job, Stream
from tiercheck_transformers import attach
from transformers import EarlyStoppingCallback, TrainerCallback

from tiercheck import Hierarchy
from tiercheck.errors import ConfigurationError, NotFound, UnsupportedSetup
from tiercheck.tiers.shm.driver import remove_namespace

DEATHS = [
    ("on_step_begin", 1),  # behind the first version
    ("on_step_end", 5),
    ("on_epoch_begin", 6),  # between two epochs
    ("on_evaluate", 8),
    ("on_epoch_end", 12),  # before the epoch is evaluated
    ("on_step_begin", 17),
]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    folder = tmp_path / f"trainer-{tmp_path.parent.name}-{tmp_path.name}"
    folder.mkdir()
    yield Job(folder)
    with contextlib.suppress(NotFound):
        remove_namespace(folder.name)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A process that is forked has none of the threads that torch has started here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(job: Job, *deaths: tuple[str, int]) -> None:
    """Kill it at each of these, one after the other, and compare its end."""
    assert job.live("bare", attached=False) == [0] * job.ranks
    for death in deaths:
        assert KILLED in job.live("killed", death), death
    assert job.live("killed") == [0] * job.ranks
    for killed, bare in zip(job.end("killed"), job.end("bare"), strict=True):
        version, fidelity = killed.pop("recovered")
        assert fidelity == "exact"
        assert version in (deaths[-1][1], deaths[-1][1] - 1)
        assert killed == bare


def test_killed_anywhere(job: Job) -> None:
    check(job, *DEATHS)


@pytest.mark.parametrize(
    "arguments",
    [
        {
            "eval_strategy": "epoch",
            "dataloader_num_workers": 1,
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 0},
        },
        {"max_steps": 14, "bf16": True, "optim": "adafactor"},
        {"train_sampling_strategy": "group_by_length"},
        {"accelerator_config": {"use_seedable_sampler": False}},
        {
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
            "save_steps": 4,
            "save_strategy": "steps",
            "save_total_limit": 1,
        },
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_with_other_arguments(job: Job, arguments: dict[str, Any]) -> None:
    check(replace(job, arguments=arguments), ("on_epoch_begin", 6), ("on_step_end", 9))


def test_two_ranks(job: Job) -> None:
    check(replace(job, ranks=2), ("on_step_begin", 1), ("on_epoch_begin", 3), ("on_step_end", 5))


def test_fsdp2(job: Job) -> None:
    arguments = {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2, "reshard_after_forward": True}}
    check(replace(job, ranks=2, arguments=arguments), ("on_epoch_begin", 3), ("on_step_end", 5))


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_whose_json_names_the_tiers(job: Job, stage: int) -> None:
    config = {
        "gradient_accumulation_steps": "auto",
        "tiercheck": {"tiers": list(job.tiers), "base_every": 4, "batch": 2},
        "train_micro_batch_size_per_gpu": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
    }
    check(
        replace(job, ranks=2, arguments={"deepspeed": config}, hierarchy=False),
        ("on_epoch_begin", 3),
        ("on_step_begin", 5),
    )


def test_a_job_that_began_from_a_checkpoint_of_the_trainer_s_own(job: Job) -> None:
    saving = replace(job, arguments={"save_steps": 4, "save_strategy": "steps", "max_steps": 4})
    assert saving.live("before", attached=False) == [0]
    began = replace(job, begins=job.folder / "before" / "checkpoint-4")
    assert began.live("bare", attached=False) == [0]
    for death in (("on_step_begin", 5), ("on_epoch_begin", 6), ("on_step_end", 9)):
        assert KILLED in began.live("killed", death), death
    assert began.live("killed") == [0]
    (killed,), (bare,) = began.end("killed"), began.end("bare")
    assert killed.pop("recovered") == [4, "exact"], "of version 0, at step 4"
    assert killed == bare


def test_a_checkpoint_of_the_trainer_s_own_that_is_newer_than_the_newest_version(job: Job) -> None:
    """Killed while it saves one at an epoch's end, before the version is published; the script resumes from that."""
    saving = replace(job, arguments={"save_strategy": "epoch"})
    assert saving.live("bare", attached=False) == [0]
    assert KILLED in saving.live("killed", ("on_save", 6))
    assert replace(saving, begins=job.folder / "killed" / "checkpoint-6").live("killed") == [0]
    (killed,), (bare,) = saving.end("killed"), saving.end("bare")
    assert killed.pop("recovered") == [5, "exact"]
    assert killed == bare


@pytest.mark.parametrize(("lines", "accumulated"), [(16, 1), (16, 2), (20, 1)])
def test_data_that_ends_before_the_steps_do(job: Job, accumulated: int, lines: int) -> None:
    """The Trainer asks for more batches than there are in an epoch."""
    arguments = {"max_steps": 14, "gradient_accumulation_steps": accumulated}
    updates = lines // 4 // accumulated
    check(
        replace(job, data=Stream, lines=lines, arguments=arguments),
        ("on_step_begin", updates),
        ("on_epoch_begin", 2 * updates),
    )


class Chooses(TrainerCallback):
    """Draws for each epoch, and what it has drawn counts."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.chosen = float(torch.rand(()))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for each in kwargs["model"].parameters():
            each.grad.mul_(self.chosen)


def test_callbacks_that_draw_for_each_epoch(job: Job) -> None:
    chooses = replace(job, callbacks=[Chooses], arguments={"eval_strategy": "no"})
    check(chooses, ("on_step_begin", 1), ("on_step_begin", 6), ("on_step_end", 9), ("on_epoch_begin", 12))


@pytest.mark.parametrize("dies", [("on_step_begin", 0), ("on_save", 1)], ids=["before a step", "while saving"])
def test_a_version_zero_begins_where_it_was_saved(job: Job, dies: tuple[str, int]) -> None:
    """It is not where a checkpoint of the Trainer's own that is newer goes on."""
    saving = replace(job, arguments={"save_strategy": "steps", "save_steps": 1})
    assert saving.live("bare", attached=False) == [0]
    assert KILLED in saving.live("killed", dies)
    if dies[1] == 0:  # goes on for a while without TierCheck
        assert KILLED in saving.live("killed", ("on_step_end", 9), attached=False)
    newest = max((job.folder / "killed").glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    assert replace(saving, begins=newest).live("killed") == [0]
    (killed,), (bare,) = saving.end("killed"), saving.end("bare")
    assert killed.pop("recovered") == [0, "exact"]
    assert killed == bare


def test_a_version_zero_of_a_job_that_began_from_a_checkpoint_goes_on_there(job: Job) -> None:
    """Also if the next start names no checkpoint."""
    saving = replace(job, arguments={"save_steps": 4, "save_strategy": "steps", "max_steps": 4})
    assert saving.live("before", attached=False) == [0]
    began = replace(job, begins=job.folder / "before" / "checkpoint-4")
    assert began.live("bare", attached=False) == [0]
    assert KILLED in began.live("killed", ("on_step_begin", 4))
    assert replace(began, begins=None).live("killed") == [0]
    (killed,), (bare,) = began.end("killed"), began.end("bare")
    assert killed.pop("recovered") == [0, "exact"]
    assert killed == bare


@pytest.mark.parametrize("accumulated", [(2, 1), (1, 2)])
def test_so_many_steps_are_made_whatever_an_update_takes(job: Job, accumulated: tuple[int, int]) -> None:
    arguments = [{"max_steps": 20, "gradient_accumulation_steps": each} for each in accumulated]
    before, after = (replace(job, lines=48, arguments=each) for each in arguments)
    assert KILLED in before.live("killed", ("on_step_begin", 12))
    for step in (13, 15):
        assert KILLED in after.live("killed", ("on_step_begin", step))
    assert after.live("killed") == [0]
    assert after.end("killed")[0]["step"] == 20


class TakesNote(TrainerCallback):
    """Of the samples that were trained in each epoch, in a file that each start continues."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, rank = kwargs["model"], os.environ.get("RANK", "0")
        model.register_forward_pre_hook(partial(self.note, rank, state), with_kwargs=True)

    def note(self, rank: str, state: Any, model: Any, args: Any, kwargs: Any) -> None:
        with (self.folder / f"trained-{rank}").open("a") as file:
            for line in kwargs["input_ids"].tolist():
                file.write(json.dumps([state.global_step, line]) + "\n")


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_other_ranks_train_each_sample_of_an_epoch_once(job: Job, ranks: tuple[int, int]) -> None:
    """With two updates of 16 samples, or four of 8, behind it."""
    arguments = {"eval_strategy": "no", "num_train_epochs": 2}
    noting = replace(job, lines=48, arguments=arguments, callbacks=[lambda: TakesNote(job.folder)], ranks=ranks[0])
    updates = 4 // ranks[0]
    assert KILLED in noting.live("killed", ("on_step_begin", updates))
    before = trained(job.folder, range(updates))
    assert len(before) == 32
    others = replace(noting, ranks=ranks[1])
    assert KILLED in others.live("killed", ("on_step_begin", updates + 2))
    after = trained(job.folder, range(updates, updates + 2))
    assert others.live("killed") == [0] * ranks[1]
    after += trained(job.folder, range(updates + 2, 100))
    assert len(set(before + after[:16])) == 48, "the first epoch's"
    assert len(set(after[16:])) == len(after[16:]) == 48, "the second one's"


def trained(folder: Path, steps: range) -> list[str]:
    """The samples of these steps, in order. Forgets what it was told so far."""
    noted: list[tuple[int, list[int]]] = []
    for path in folder.glob("trained-*"):
        noted += [json.loads(line) for line in path.read_text().splitlines()]
        path.unlink()
    return [str(tokens) for step, tokens in sorted(noted, key=lambda each: each[0]) if step in steps]


@pytest.mark.parametrize(("ranks", "kind"), [((2, 1), "linear"), ((1, 2), "cosine")])
def test_a_schedule_ends_where_a_job_on_other_ranks_does(job: Job, ranks: tuple[int, int], kind: str) -> None:
    arguments = {"eval_strategy": "no", "num_train_epochs": 4, "lr_scheduler_type": kind, "logging_steps": 1}
    before, after = (replace(job, lines=48, arguments=arguments, ranks=each) for each in ranks)
    assert KILLED in before.live("killed", ("on_step_begin", 14 // ranks[0]))
    assert KILLED in after.live("killed", ("on_step_begin", 14 // ranks[0] + 2))
    assert after.live("killed") == [0] * ranks[1]
    end = after.end("killed")[0]
    rates = [each["learning_rate"] for each in end["logged"] if "learning_rate" in each][14 // ranks[0] :]
    assert rates == sorted(rates, reverse=True), "it falls, and never rises"
    assert end["rate"] == pytest.approx(0, abs=1e-6), "for the step that is not made"
    assert rates[-2] > 1e-4
    assert end["epoch"] == 4


def test_another_order_of_an_epoch_that_was_begun_is_told(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    assert KILLED in replace(job, arguments={"seed": 1}).live("killed", ("on_step_begin", 2))
    trainer = replace(job, arguments={"seed": 2, "eval_strategy": "no", "max_steps": 4}).trainer("killed")
    attach(trainer, Hierarchy.of(*job.tiers))
    trainer.train()
    assert "seed is 2, and was 1: epoch 0 goes on in another order" in caplog.text


class Stops(TrainerCallback):
    """As a time limit does, or a signal: at this step of the first start."""

    def __init__(self, folder: Path) -> None:
        self.once = folder / "stopped"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 8 and not self.once.exists():
            self.once.touch()
            control.should_training_stop = True


def test_a_job_that_a_time_limit_has_stopped_goes_on(job: Job) -> None:
    assert job.live("bare", attached=False) == [0]
    stopping = replace(job, callbacks=[lambda: Stops(job.folder)])
    assert stopping.live("killed") == [0]
    assert stopping.end("killed")[0]["step"] == 8
    assert stopping.live("killed") == [0]
    (killed,), (bare,) = job.end("killed"), job.end("bare")
    assert killed.pop("recovered") == [8, "exact"]
    assert killed == bare


class LogsWhatIsNoNumber(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step < 5:
            state.log_history[-1] |= {"share": torch.tensor([0.5]), "device": torch.device("cpu")}


def test_a_log_may_hold_what_json_does_not(job: Job) -> None:
    logging = replace(job, callbacks=[LogsWhatIsNoNumber])
    assert KILLED in logging.live("killed", ("on_step_end", 5))
    assert logging.live("killed") == [0]
    (end,) = logging.end("killed")
    assert end["recovered"] == [4, "exact"]
    assert next((each["share"], each["device"]) for each in end["logged"] if "share" in each) == ([0.5], "cpu")


def test_a_job_that_has_stopped_early_has_nothing_left_to_do(job: Job) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    saved = {"save_steps": 4, "save_strategy": "steps", "num_train_epochs": 8}
    stopping = replace(job, arguments=best | saved, callbacks=[lambda: EarlyStoppingCallback(1)])
    assert stopping.live("bare", attached=False) == [0]
    (bare,) = stopping.end("bare")
    assert bare["step"] < 48
    for _ in range(3):
        assert stopping.live("again") == [0]
        (again,) = stopping.end("again")
        again.pop("recovered", None)
        assert again["logged"] == bare["logged"]
        assert again["parameters"] == bare["parameters"]


class Fails(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise RuntimeError("a step failed")


def test_an_error_ends_the_saving_and_a_second_train_is_the_trainer_s_own(job: Job) -> None:
    trainer = job.trainer("one")
    attached = attach(trainer, Hierarchy.of(*job.tiers))
    failing = Fails()
    trainer.add_callback(failing)
    with pytest.raises(RuntimeError, match="a step failed"):
        trainer.train()
    assert attached.checkpointer is not None
    assert attached.checkpointer.version == 1
    trainer.remove_callback(failing)
    trainer.args.max_steps = 2
    trainer.train()
    assert trainer.state.global_step == 2
    assert attached.checkpointer.version == 1


@pytest.mark.parametrize("argument", ["auto_find_batch_size", "dataloader_persistent_workers", "ignore_data_skip"])
def test_what_cannot_be_resumed_is_refused_by_name(job: Job, argument: str) -> None:
    trainer = job.trainer("refused")
    setattr(trainer.args, argument, True)
    with pytest.raises(UnsupportedSetup, match=f"{argument}=True"):
        attach(trainer, Hierarchy.of(*job.tiers))


def test_a_hierarchy_is_needed(job: Job) -> None:
    with pytest.raises(ConfigurationError, match="needs a hierarchy"):
        attach(job.trainer("none"))


def test_the_lines_of_the_readme(job: Job) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    memory, durable = job.tiers
    lines = lines.replace("shm://my-run?size=4GiB", memory).replace("nvme:///shared/my-run?survives=rack", durable)
    trainer = job.trainer("readme")
    exec(lines, {"trainer": trainer})
    assert trainer.state.global_step == 18
    again = job.trainer("again")
    exec(lines, {"trainer": again})
    assert again.state.log_history[:-1] == trainer.state.log_history[:-1]
