"""The end of a soak: every key is looked at once more, when nobody writes any more."""

from __future__ import annotations

from benchmarks.soak.content import Damaged, Stamp, size_of
from benchmarks.soak.ledger import CLAIMS, COUNTERS, Claim, PoolAccounting
from benchmarks.soak.losses import Losses
from benchmarks.soak.shared import claim_faults, claim_key, counter_key, read_counter
from benchmarks.soak.slot import listed, stamped
from tiercheck.errors import NotFound
from tiercheck.tiers.driver import TierDriver

__all__ = ["settle_accounts"]


async def settle_accounts(
    driver: TierDriver, ledger: PoolAccounting, losses: Losses, *, large_bytes: int, debris: bool = True
) -> None:
    """Report whatever is not as the ledger says, then delete everything: that must work, too.

    ``debris``: whether the tier must hold no bytes but those of its objects.
    Errors: those of the driver; a tier that cannot be read at the end is a failure of the soak.
    """
    sizes = await check_keys(driver, ledger, losses, large_bytes)
    sizes |= await check_counters(driver, ledger, losses)
    sizes |= await check_claims(driver, ledger, losses)
    infos = await listed(driver, "")
    expected = sorted(sizes, key=str.encode)
    if [info.key for info in infos] != expected:
        text = f"listed {[info.key for info in infos]}, readable are {expected}"
        losses.report("the last listing is wrong", None, text)
    for info in infos:
        if info.nbytes != sizes.get(info.key):
            losses.report("an object has another size", info.key, f"{info}, but {sizes.get(info.key)} bytes were read")
    used, held = (await driver.usage()).used_bytes, sum(info.nbytes for info in infos)
    if used != held and debris:
        losses.report("the tier holds what is no object", None, f"{used} bytes used, {held} in objects")
    await driver.delete([info.key for info in infos])
    left = await listed(driver, "")
    if left:
        losses.report("a deleted object is back", left[0].key, f"{len(left)} objects are left of {len(infos)}")


async def check_keys(driver: TierDriver, ledger: PoolAccounting, losses: Losses, large_bytes: int) -> dict[str, int]:
    sizes = {}
    for own in ledger.keys:
        allowed = {ledger.acknowledged(own), ledger.begun(own)}
        try:
            found = await stamped(driver, own.key)
        except NotFound:
            if all(state.present for state in allowed):
                losses.report("an object is gone", own.key, f"it should be one of {allowed}")
            continue
        sizes[own.key] = found.nbytes
        whole = [
            Stamp(own.key, own.slot, state.sequence, size_of(own.key, state.sequence, large_bytes))
            for state in allowed
            if state.present
        ]
        if found.writer < 0:
            losses.report("an object is damaged", own.key, found.key)
        elif found not in whole:
            losses.report("an acknowledged put is not what is read", own.key, f"{found}, not one of {whole}")
    return sizes


async def check_counters(driver: TierDriver, ledger: PoolAccounting, losses: Losses) -> dict[str, int]:
    sizes = {}
    for counter in range(COUNTERS):
        try:
            etag, values = await read_counter(driver, counter, ledger.slots)
        except Damaged as damage:
            losses.report("an object is damaged", counter_key(counter), str(damage))
            continue
        if etag is not None:
            sizes[counter_key(counter)] = (ledger.slots + 1) * 8
        for slot, value in enumerate(values):
            low, high = ledger.increments_acknowledged(counter, slot), ledger.increments_begun(counter, slot)
            if not low <= value <= high:
                text = f"slot {slot} counted {value}, which should be between {low} and {high}"
                losses.report("an increment is lost", counter_key(counter), text)
    return sizes


async def check_claims(driver: TierDriver, ledger: PoolAccounting, losses: Losses) -> dict[str, int]:
    sizes = {}
    for number in range(CLAIMS):
        states = [ledger.claim(number, slot) for slot in range(ledger.slots)]
        if all(state is Claim.UNTRIED for state in states):
            continue
        try:
            found = await stamped(driver, claim_key(number))
        except NotFound:
            if Claim.WON in states:
                losses.report("a claim is gone", claim_key(number), f"slot {states.index(Claim.WON)} won it")
            continue
        sizes[claim_key(number)] = found.nbytes
        for text in claim_faults(ledger, number, found):
            losses.report("a claim is not its winner's", claim_key(number), text)
    return sizes
