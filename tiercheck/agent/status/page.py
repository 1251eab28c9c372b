"""The status page: one HTML document that needs nothing else, made from a snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from tiercheck.agent.jobs.states import State
from tiercheck.agent.status.page_style import SCRIPT, STYLE
from tiercheck.agent.status.snapshot import AgentSnapshot, PeerSnapshot, RankSnapshot, TierSnapshot, Versions
from tiercheck.types import bytes_text

__all__ = ["render"]

RECENT_VERSIONS = 60
OLDER_BASES = 6
_COLOURS = {
    State.MOVING: "good",
    State.RESTING: "good",
    State.OPENING: "warn",
    State.PAUSED: "warn",
    State.SUPERSEDED: "bad",
    State.GONE: "warn",
}


def render(snapshot: AgentSnapshot) -> str:
    """The whole page. Every text in it that comes from outside is escaped."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>TierCheck agent {escape(snapshot.node)}</title><style>{STYLE}</style>"
        '<noscript><meta http-equiv="refresh" content="5"></noscript></head><body>'
        f"{_main(snapshot)}<script>{SCRIPT}</script></body></html>\n"
    )


def _main(snapshot: AgentSnapshot) -> str:
    ranks = "".join(_rank(rank) for rank in snapshot.ranks)
    if not ranks:
        ranks = '<section class="card faint">No rank has registered anything to this agent yet.</section>'
    return (
        f"<main>{_header(snapshot)}{_unreadable(snapshot.unreadable)}{ranks}{_peer(snapshot.peer)}"
        '<footer>Fresh every two seconds. Also as <a href="/metrics">metrics</a> and as '
        '<a href="/status.json">JSON</a>.</footer></main>'
    )


def _header(snapshot: AgentSnapshot) -> str:
    troubled = any(rank.mover.errors or rank.conflict for rank in snapshot.ranks) or bool(snapshot.unreadable)
    busy = any(not rank.mover.idle for rank in snapshot.ranks)
    if snapshot.ending:
        pill = ("warn", "ending")
    elif troubled:
        pill = ("bad", "in trouble")
    else:
        pill = ("good", "moving" if busy else "all in place")
    dropped = f" · {snapshot.dropped_messages} messages dropped" if snapshot.dropped_messages else ""
    return (
        f'<header><h1>Node agent <span class="mono">{escape(snapshot.node)}</span></h1>{_pill(*pill)}'
        '<span id="lost" class="pill bad">the agent does not answer</span>'
        f'<span class="faint">TierCheck {escape(snapshot.version)} · process {snapshot.pid} · '
        f"up {_duration(snapshot.uptime_s)} · {bytes_text(snapshot.resident_bytes)} of memory"
        f"{' · started by a trainer' if snapshot.detached else ''}{dropped}</span></header>"
    )


def _unreadable(unreadable: dict[str, str]) -> str:
    if not unreadable:
        return ""
    items = "".join(f"<li><b>{escape(place)}</b>: {escape(reason)}</li>" for place, reason in unreadable.items())
    return f'<section class="card"><h2>Could not be taken up</h2><ul class="errors">{items}</ul></section>'


def _rank(rank: RankSnapshot) -> str:
    mover = rank.mover
    facts = _facts(
        ("Watermark", "none" if mover.watermark is None else f"base {mover.watermark}"),
        ("Undrained bases", str(mover.undrained_bases)),
        *((f"{tier} lags", f"{versions} versions") for tier, versions in mover.lag_versions.items()),
        *((("Folded bases", str(mover.folded_bases)),) if mover.folded_bases else ()),
        *((("Not folded", mover.not_folded),) if mover.not_folded else ()),
        ("Copied", f"{bytes_text(mover.copied_bytes)}"),
        ("Objects", f"{mover.copied_objects} in, {mover.deleted_objects} out"),
        ("Trainer heard", _ago(rank.silent_s)),
        ("Throughput", f"{bytes_text(int(rank.bytes_per_s))}/s{_sparkline(rank.history)}"),
        *((("Decisions refused", str(mover.refused_decisions)),) if mover.refused_decisions else ()),
        *((f"{tier} last listed", _ago(age_s)) for tier, age_s in mover.slow_views_s.items()),
    )
    errors = [(tier, text) for tier, text in mover.errors.items()]
    if rank.conflict:
        errors.append(("superseded", rank.conflict))
    items = "".join(f"<li><b>{escape(tier)}</b>: {escape(text)}</li>" for tier, text in errors)
    return (
        f'<section class="card" data-rank="{rank.rank}"><div class="head"><h2>Rank {rank.rank}</h2>'
        f"{_pill(_COLOURS[rank.state], rank.state.value)}"
        f'<span class="faint">of {rank.world_size} · generation {rank.generation}</span>'
        f'<span class="mono faint">{escape(rank.namespace)}</span></div>{facts}{_matrix(rank.tiers)}'
        + (f'<ul class="errors">{items}</ul>' if items else "")
        + "</section>"
    )


@dataclass(frozen=True)
class _Held:
    """One tier's versions, made ready for looking up."""

    bases: frozenset[int]
    committed: frozenset[int]
    records: dict[int, tuple[int, int]]

    @classmethod
    def of(cls, versions: Versions) -> _Held:
        records = {v: (first, last) for first, last in versions.batches for v in range(first, last + 1)}
        return cls(frozenset(versions.bases), frozenset(versions.committed), records)


def _matrix(tiers: tuple[TierSnapshot, ...]) -> str:
    """Tiers by versions: what is where."""
    held = [None if tier.holds is None else _Held.of(tier.holds) for tier in tiers]
    looked_at = [each for each in held if each is not None]
    if not looked_at:
        return '<p class="faint">Its tiers are not open.</p>'
    columns = _columns(looked_at)
    if not columns:
        return '<p class="faint">Its tiers hold no version yet.</p>'
    bases = {version for each in looked_at for version in each.bases}
    heads = "".join(_head(version, columns, at, bases) for at, version in enumerate(columns))
    rows = "".join(_row(tier, each, columns) for tier, each in zip(tiers, held, strict=True))
    return (
        '<div class="scroll"><table class="matrix"><thead><tr><th class="corner"><h3>Versions</h3></th>'
        f"{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
        '<div class="legend"><span><i class="committed"></i>base, committed by every rank</span>'
        '<span><i></i>base</span><span><i class="record"></i>differentials, a bar an object</span></div>'
    )


def _columns(held: list[_Held]) -> list[int | None]:
    """The versions to show, oldest first; ``None`` if some are left out."""
    present = {version for each in held for version in (*each.bases, *each.records)}
    if not present:
        return []
    newest = max(present)
    first = max(min(present), newest - RECENT_VERSIONS + 1)
    older = sorted({version for each in held for version in each.bases if version < first})[-OLDER_BASES:]
    gap: list[int | None] = [None] if min(present) < first else []
    return [*older, *gap, *range(first, newest + 1)]


def _head(version: int | None, columns: list[int | None], at: int, bases: set[int]) -> str:
    """A number over every tenth version, and over bases if there is room."""
    if version is None:
        return "<th></th>"
    room = len(str(version)) // 2 + 1
    crowded = any(other is not None and other % 10 == 0 for other in columns[at + 1 : at + 1 + room])
    named = version % 10 == 0 or (version in bases and not crowded)
    return f"<th>{version}</th>" if named else "<th></th>"


def _row(tier: TierSnapshot, held: _Held | None, columns: Iterable[int | None]) -> str:
    about = f"survives {tier.survives}" if tier.survives else "not open"
    if tier.holds is not None:
        about += f" · {bytes_text(tier.holds.nbytes)} in {tier.holds.objects}"
    cells = "".join(_cell(tier.name, held, version) for version in columns)
    return (
        f'<tr data-tier="{escape(tier.name)}"><th title="{escape(tier.url)}">{escape(tier.name)}'
        f"<small>{escape(about)}</small></th>{cells}</tr>"
    )


def _cell(tier: str, held: _Held | None, version: int | None) -> str:
    if version is None:
        return '<td class="gap">…</td>'
    if held is None:
        return "<td></td>"
    classes, says = [], []
    if record := held.records.get(version):
        first, last = record
        classes += ["record", *(["opens"] if version == first else []), *(["ends"] if version == last else [])]
        says.append(f"differential {version}" if first == last else f"differentials {first} to {last}")
    if version in held.bases:
        committed = version in held.committed
        classes += ["base", *(["committed"] if committed else [])]
        says.append(f"base {version}{', committed' if committed else ''}")
    dot = "<b></b>" if version in held.bases else ""
    what = "; ".join(says) or f"nothing of version {version}"
    return f'<td class="{" ".join(classes)}" title="{escape(tier)}: {what}"><i></i>{dot}</td>'


def _peer(peer: PeerSnapshot | None) -> str:
    if peer is None:
        return ""
    facts = _facts(
        *((name.replace("_", " ").capitalize(), _count(name, value)) for name, value in peer.counts.items()),
        *((f"Dropped: {reason}", str(count)) for reason, count in peer.dropped.items()),
    )
    pill = _pill("good", "encrypted") if peer.encrypted else _pill("good", "this user, on this machine")
    if peer.lost_port is not None:
        pill += _pill("bad", f"ranks that know port {peer.lost_port} are cut off until they attach again")
    return (
        f'<section class="card" id="peer"><div class="head"><h2>Memory for neighbours</h2>{pill}'
        f'<span class="mono faint">{escape(peer.endpoint)}</span></div>{facts}</section>'
    )


def _facts(*facts: tuple[str, str]) -> str:
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{items}</dl>'


def _count(name: str, value: int) -> str:
    return bytes_text(value) if "bytes" in name else str(value)


def _pill(colour: str, text: str) -> str:
    return f'<span class="pill {colour}">{escape(text)}</span>'


def _sparkline(history: tuple[float, ...]) -> str:
    """The last two minutes as a line."""
    if len(history) < 2 or max(history) <= 0:
        return ""
    top = max(history)
    step = 100 / (len(history) - 1)
    points = " ".join(f"{at * step:.1f},{29 - 27 * rate / top:.1f}" for at, rate in enumerate(history))
    return f'<svg viewBox="0 0 100 30" preserveAspectRatio="none" aria-hidden="true"><path d="M{points}"/></svg>'


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"


def _ago(seconds: float) -> str:
    return "just now" if seconds < 3 else f"{_duration(seconds)} ago"
