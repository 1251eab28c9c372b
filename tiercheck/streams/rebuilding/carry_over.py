"""The host state of a version that was saved under another layout, as a provider puts it back.

What concerns the job (the options of the parameter groups, schedulers, counters, averages) is carried over if both have
it. What each rank has of its own (random generators, the place in its data) goes to the rank of the same number. Ranks
beyond those that saved keep what their script has made. If the number of ranks has changed, the user's function may say
where in the data each rank goes on (:data:`~tiercheck.streams.loading.CarryOver`). Notes tell which was done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tiercheck.errors import ConfigurationError, Mismatch
from tiercheck.streams.loading import CarryOver
from tiercheck.streams.tensors.beside import is_users
from tiercheck.streams.tensors.provider import StateProvider
from tiercheck.streams.tensors.storable import from_storable, to_storable
from tiercheck.types import shown

__all__ = ["carried_over", "given_by", "options_at_end"]

OPTIONS = ("options", "hyperparameters")
"""Where integrations keep the options of the parameter groups."""
OF_EACH_RANK = ("random", "next", "stateful", "model_parallel_random")
AFTER_STEP = "after_step"
SCHEDULER = "scheduler"


def options_at_end(options: list[dict[str, Any]], host_state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per parameter group, its options at the end of the version: a scheduler may have moved them since the last step.
    ``options``: as of that."""
    for name in OPTIONS:
        held = host_state.get(name)
        if isinstance(held, list) and len(held) == len(options) and all(isinstance(each, dict) for each in held):
            return held
    return options


def given_by(
    function: CarryOver,
    saved: Sequence[Mapping[str, Any] | None],
    rank: int,
    world_size: int,
    attached: Mapping[str, Any],
) -> dict[str, Any]:
    """What the user's function makes of ``saved`` for this rank, as a host state holds it. ``attached``: what batches
    are drawn from here, by name. Errors: ``ConfigurationError``."""
    try:
        given = function([None if each is None else from_storable(dict(each)) for each in saved], rank, world_size)
    except Exception as error:
        raise ConfigurationError(f"carry_over raised {type(error).__name__}: {error}") from error
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"carry_over must return states by name, not {shown(given)}")
    if unknown := [name for name in given if name not in attached]:
        raise ConfigurationError(
            f"carry_over returned a state of {unknown[0]!r}; what batches are drawn from in stateful= is "
            f"{', '.join(sorted(attached)) or 'nothing'}"
        )
    return {name: to_storable(each, name) for name, each in given.items()}


def carried_over(
    provider: StateProvider,
    saved: Mapping[str, Any],
    *,
    options: Sequence[Mapping[str, Any]],
    version: int,
    own: bool,
    gone: range = range(0),
    given: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]:
    """What the provider puts back; what of the job's state begins anew, since it was not saved; and what else there is
    to tell. ``options``: of its parameter groups. ``gone``: ranks that saved, and of whose number none is here.
    ``given``: what :func:`given_by` returned, if it was asked.

    Errors: ``Mismatch`` for an object of the user's whose state was saved, and which is not attached here.
    """
    live = provider.host_state()
    found = provider.translated_host_state(saved, version)
    state: dict[str, Any] = {}
    lost: list[str] = []
    notes: list[str] = []
    for key, here in live.items():
        if key in OPTIONS:
            state[key] = [dict(each) for each in options]
        elif key in OF_EACH_RANK:
            state[key] = found.get(key, here) if own else here
        elif key == AFTER_STEP:
            state[key], more = after_step(here, found.get(key, {}))
            lost += more
        elif key in found:
            state[key] = found[key]
        else:
            state[key] = here
            if here:
                said = f"{key} was not saved in a form that this job reads, and begins as it is"
                (lost if key == SCHEDULER else notes).append(said)
    groups = next((len(saved[name]) for name in OPTIONS if isinstance(saved.get(name), list)), len(options))
    if groups != len(options):
        lost += fit_schedules(state, live, groups, len(options))
    if not own:
        notes.append(
            "nothing is there that a rank of this number saved of its own: random generators and what batches are "
            f"drawn from begin as the script made them{', but for what carry_over gave' if given else ''}"
        )
    left = sorted(name for name in live.get("stateful", {}) if is_users(name) and name not in (given or {}))
    if gone and left:
        ranks = f"ranks {gone[0]} to {gone[-1]}" if len(gone) > 1 else f"rank {gone[0]}"
        notes.append(
            f"what {ranks} had in stateful= ({', '.join(left)}) is nobody's now: say who goes on with it by "
            "Loading(carry_over=...)"
        )
    if given:
        notes.append(f"as carry_over gave it, of what all ranks had that saved: {', '.join(sorted(given))}")
    if isinstance(here := live.get("stateful"), dict):
        refuse_lost(found.get("stateful", {}), live)  # on each rank, whose ever it is
        if own:
            state["stateful"] = {name: found.get("stateful", {}).get(name, each) for name, each in here.items()}
        state["stateful"] = {**state["stateful"], **(given or {})}
    told = {key: each for key, each in found.items() if key not in saved}
    return {**told, **state}, tuple(lost), tuple(notes)


def after_step(here: Mapping[str, Any], saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Of what a loop changes after its step: each as it was saved, or as it is."""
    new = [name for name in here if name not in saved and is_users(name)]
    notes = [f"the state of {name} was not saved, and it begins as it is" for name in new]
    refuse_lost(saved, {AFTER_STEP: here})
    return {name: saved.get(name, each) for name, each in here.items()}, notes


def fit_schedules(state: dict[str, Any], live: Mapping[str, Any], before: int, now: int) -> list[str]:
    """Schedulers hold lists with an element for each parameter group. If their number has changed, those lists stay as
    the script made them. Returns what there is to tell."""
    kept: dict[str, None] = {}

    def fitted(saved: Any, here: Any) -> Any:
        if not isinstance(saved, Mapping) or not isinstance(here, Mapping):
            return saved
        lists = {name for name, each in saved.items() if isinstance(each, list) and len(each) == before}
        lists = {name for name in lists if isinstance(here.get(name), list) and len(here[name]) == now}
        kept.update(dict.fromkeys(sorted(lists)))
        return {name: here[name] if name in lists else each for name, each in saved.items()}

    if SCHEDULER in state.get(AFTER_STEP, {}):
        loops = fitted(state[AFTER_STEP][SCHEDULER], live[AFTER_STEP][SCHEDULER])
        state[AFTER_STEP] = {**state[AFTER_STEP], SCHEDULER: loops}
    if isinstance(engines := state.get(SCHEDULER), Mapping) and isinstance(here := live.get(SCHEDULER), Mapping):
        state[SCHEDULER] = {**engines, "state": fitted(engines.get("state"), here.get("state"))}
    if not kept:
        return []
    return [
        f"there were {before} parameter groups, and are {now}, so that of the scheduler's state "
        f"{', '.join(kept)} are as the script made them"
    ]


def refuse_lost(saved: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    here = {name for part in (AFTER_STEP, "stateful") for name in live.get(part, {})}
    if missing := sorted(name for name in saved if name not in here and is_users(name)):
        raise Mismatch(
            f"the checkpoint holds the state of {', '.join(missing)}, which this job does not attach, so that it would "
            f"be lost (attached: {', '.join(sorted(here)) or 'none'}): pass it under the same name, as scheduler=, "
            "scaler=, or in after_step= or stateful="
        )
