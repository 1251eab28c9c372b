"""How the status page looks, and how it keeps itself fresh. No file of it lies anywhere else."""

__all__ = ["SCRIPT", "STYLE"]

STYLE = """
:root { color-scheme: light dark; --ground: #f6f7f9; --card: #fff; --line: #dfe3e8; --text: #17202a; --faint: #66717e;
  --base: #1f6feb; --committed: #1a7f4b; --record: #9dc1f7; --good: #1a7f4b; --warn: #9a6700; --bad: #c0362c;
  --good-bg: #dcf5e6; --warn-bg: #fdf0cf; --bad-bg: #fde3e0; --cell: #eef1f4; }
@media (prefers-color-scheme: dark) { :root { --ground: #0e1217; --card: #171c23; --line: #2a313a; --text: #e4e9ef;
  --faint: #93a0ae; --base: #58a0ff; --committed: #3fc380; --record: #2c5590; --good: #56d392; --warn: #e6b84a;
  --bad: #ff8177; --good-bg: #12321f; --warn-bg: #372a08; --bad-bg: #421a17; --cell: #212830; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 24px 48px; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 6px 14px; margin-bottom: 20px; }
h1 { font-size: 24px; margin: 0; letter-spacing: -.01em; }
h1 .mono { font-size: .82em; }
h2 { font-size: 17px; margin: 0; }
h3 { font-size: 12px; margin: 0 0 6px; color: var(--faint); font-weight: 600; letter-spacing: .05em;
  text-transform: uppercase; }
.faint { color: var(--faint); } .mono, code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
.mono { font-size: 13px; overflow-wrap: anywhere; }
.pill { display: inline-block; border-radius: 99px; padding: 1px 11px; font-size: 13px; font-weight: 600; }
.good { background: var(--good-bg); color: var(--good); } .warn { background: var(--warn-bg); color: var(--warn); }
.bad { background: var(--bad-bg); color: var(--bad); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 18px 20px;
  margin-bottom: 18px; }
.head { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 12px; margin-bottom: 14px; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(132px, 1fr)); gap: 12px 20px; margin: 0; }
.facts dt { color: var(--faint); font-size: 13px; }
.facts dd { margin: 0; font-size: 20px; font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; }
.facts svg { display: block; width: 100%; height: 30px; }
.facts path { fill: none; stroke: var(--base); stroke-width: 1.6; vector-effect: non-scaling-stroke; }
.scroll { overflow-x: auto; margin-top: 18px; }
table.matrix { border-collapse: separate; border-spacing: 0 6px; }
.matrix thead th { font: 11px/1 ui-monospace, "DejaVu Sans Mono", monospace; color: var(--faint); font-weight: 400;
  width: 15px; min-width: 15px; max-width: 15px; height: 14px; padding: 0; overflow: visible; white-space: nowrap;
  text-align: left; }
.matrix thead th.corner, .matrix tbody th { width: auto; max-width: none; text-align: left; padding: 0 18px 0 0;
  white-space: nowrap; font-weight: 600; position: sticky; left: 0; background: var(--card); z-index: 1; }
.matrix tbody th small { display: block; font-weight: 400; color: var(--faint); font-size: 12px; line-height: 1.25; }
.matrix td { padding: 0; width: 15px; min-width: 15px; height: 26px; position: relative; }
.matrix td i { position: absolute; inset: calc(50% - 4px) 0; background: var(--cell); }
.matrix td.record i { background: var(--record); inset: calc(50% - 9px) 0; }
.matrix td.opens i { border-radius: 4px 0 0 4px; left: 1px; }
.matrix td.ends i { border-radius: 0 4px 4px 0; right: 1px; }
.matrix td.opens.ends i { border-radius: 4px; }
.matrix td b { position: absolute; width: 13px; height: 13px; left: 1px; top: calc(50% - 6.5px);
  border-radius: 50%;
  background: var(--card); border: 3px solid var(--base); }
.matrix td.committed b { background: var(--committed); border-color: var(--committed); }
.matrix td.gap { color: var(--faint); text-align: center; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; margin-top: 8px; font-size: 13px; color: var(--faint); }
.legend span { display: inline-flex; align-items: center; gap: 7px; }
.legend i { width: 13px; height: 13px; border-radius: 50%; border: 3px solid var(--base); }
.legend i.committed { background: var(--committed); border-color: var(--committed); }
.legend i.record { width: 26px; border-radius: 4px; border: 0; background: var(--record); }
.errors { margin: 14px 0 0; padding: 0; list-style: none; display: grid; gap: 6px; }
.errors li { background: var(--bad-bg); color: var(--bad); border-radius: 8px; padding: 7px 12px; font-size: 14px;
  overflow-wrap: anywhere; }
#lost { display: none; } .lost #lost { display: inline-block; }
footer { color: var(--faint); font-size: 13px; }
a { color: var(--base); }
"""

SCRIPT = """
async function refresh() {
  if (document.hidden) return;
  try {
    const answer = await fetch(location.pathname, {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.status);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const places = [...document.querySelectorAll(".scroll")].map(each => each.scrollLeft);
    document.querySelector("main").replaceWith(fresh.querySelector("main"));
    document.querySelectorAll(".scroll").forEach((each, at) => { each.scrollLeft = places[at] ?? 1e9; });
    document.body.classList.remove("lost");
  } catch (error) {
    document.body.classList.add("lost");
  }
}
document.querySelectorAll(".scroll").forEach(each => { each.scrollLeft = 1e9; });
setInterval(refresh, 2000);
"""
