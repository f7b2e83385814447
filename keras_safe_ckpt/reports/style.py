"""How the page looks: light and dark, wide and narrow, on paper."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfd;--card:#fff;--fg:#1b1f27;--soft:#59616e;--line:#dfe3ea;
--counted:#2f9e75;--lost:#c2a21a;--blocked:#d9480f;--starting:#4c7fd9;--stopping:#8d8f98;
--down:#c9ced8;--background:#8b6ad0;--bad:#c92a2a;--warn:#995900;--good:#1d7a57}
@media screen and (prefers-color-scheme:dark){:root{--bg:#14161b;--card:#1c1f26;--fg:#e9ecf1;
--soft:#a6adba;--line:#333945;--counted:#37b385;--lost:#d9b92c;--blocked:#ff7a45;--starting:#6d9cf0;
--stopping:#9296a2;--down:#3d4350;--background:#a78bea;--bad:#ff8080;--warn:#f0b14a;
--good:#5bd6a6}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:1.6rem;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:38px 0 4px}
p{margin:4px 0}small,.soft,.more{color:var(--soft);font-size:.86rem}
section>p.soft{margin-bottom:12px}
.cards{display:grid;grid-template-columns:1.25fr repeat(4,minmax(0,1fr));gap:10px;
margin:22px 0 10px}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.card b{display:block;font-size:1.45rem;line-height:1.25;font-variant-numeric:tabular-nums;
overflow-wrap:anywhere}
.card span{color:var(--soft);font-size:.86rem;display:block}
.card.main b{font-size:2.3rem;line-height:1.1;color:var(--good)}
.card.main{grid-row:span 2;display:flex;flex-direction:column;justify-content:center}
.card.bad b{color:var(--bad)}.card.warn b{color:var(--warn)}
.shares{display:flex;height:26px;border-radius:7px;overflow:hidden;border:1px solid var(--line)}
.shares i{display:block;min-width:0}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:8px 0 0;padding:0;list-style:none;
font-size:.9rem}
.legend li{display:flex;align-items:center;gap:6px}
.legend i{flex:none;width:12px;height:12px;border-radius:3px}
.legend svg{flex:none;width:16px;height:16px}
.panel{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 18px}
figure{margin:0}figcaption{overflow-wrap:anywhere}
.lane{margin-bottom:12px}
svg{display:block;overflow:visible}
svg text{fill:var(--soft);font-size:12px}
.axis line,.grid{stroke:var(--line)}
rect{stroke-width:1;shape-rendering:crispEdges}
i.counted,i.s-counted{background:var(--counted)}i.lost{background:var(--lost)}
i.blocked{background:var(--blocked)}i.starting{background:var(--starting)}
i.stopping{background:var(--stopping)}i.down{background:var(--down)}
i.background{background:var(--background)}i.mixed{background:var(--counted)}
rect.counted{fill:var(--counted);stroke:var(--counted)}
rect.mixed{fill:url(#hatched);stroke:var(--counted)}
rect.lost{fill:var(--lost);stroke:var(--lost)}
rect.blocked{fill:var(--blocked);stroke:var(--blocked)}
rect.true{stroke:none;shape-rendering:auto}
rect.starting{fill:var(--starting);stroke:var(--starting)}
rect.stopping{fill:var(--stopping);stroke:var(--stopping)}
rect.down{fill:url(#dotted);stroke:var(--line)}
rect.background{fill:var(--background);stroke:var(--background)}
rect:hover,.stem:hover circle,.mark:hover use{stroke:var(--fg);stroke-width:2}
.notice{fill:var(--warn);stroke:var(--card)}.error,.vanished{fill:var(--bad);stroke:var(--card)}
.pass_over{fill:var(--bad);stroke:var(--card)}.agreement{fill:var(--soft);stroke:var(--card)}
.resume,.restore{fill:var(--starting);stroke:var(--card)}
.preempted{fill:var(--fg);stroke:var(--card)}.finished{fill:var(--good);stroke:var(--card)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));gap:12px}
.charts .panel{padding:12px 16px}
.plot{display:flex;gap:6px;margin-top:6px;padding-right:6px}
.plot>div{flex:1;min-width:0}.labels{flex:none}.labels text{text-anchor:end}
.stem line{stroke:currentColor;stroke-width:1.5}.stem circle{fill:currentColor}
.stem.size{color:var(--starting)}.stem.background{color:var(--background)}
.stem.blocked{color:var(--blocked)}
.table{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:10px}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:6px 10px;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:600;white-space:nowrap}
tr:last-child td{border-bottom:0}td.n,th.n{text-align:right;white-space:nowrap}
td.file,td.words{overflow-wrap:anywhere;min-width:7.5em}td.t{white-space:nowrap}
.more{padding:6px 2px}
.notes li{margin:4px 0}
footer{margin-top:36px;color:var(--soft);font-size:.86rem;overflow-wrap:anywhere}
@media (max-width:860px){.cards{grid-template-columns:repeat(4,minmax(0,1fr))}
.card.main{grid-column:span 4;grid-row:auto}}
@media (max-width:520px){main{padding:18px 12px 40px}.panel{padding:12px}
.card b{font-size:1.2rem}.card.main b{font-size:2rem}
.cards{grid-template-columns:repeat(2,minmax(0,1fr))}.card.main{grid-column:span 2}
th,td{padding:6px 8px}.lane text{display:none}}
@media print{:root{--bg:#fff;--fg:#000;--soft:#444}main{max-width:none;padding:0}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
.card,.panel,figure,tr{break-inside:avoid}.table{overflow:visible}}
"""

#: Patterns, and the form of each mark, drawn around its place.
SYMBOLS = """
<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>
<pattern id="dotted" width="6" height="6" patternUnits="userSpaceOnUse">
<circle cx="2" cy="2" r="1.1" fill="var(--down)"/></pattern>
<pattern id="hatched" width="6" height="6" patternUnits="userSpaceOnUse">
<path d="M0 6L6 0" stroke="var(--counted)" stroke-width="2"/></pattern>
<path id="notice" d="M0 9L-6 -3H6Z"/>
<path id="agreement" d="M-4 0L0 -4L4 0L0 4Z"/>
<path id="error" d="M-5 -7L0 -2L5 -7L7 -5L2 0L7 5L5 7L0 2L-5 7L-7 5L-2 0L-7 -5Z"/>
<path id="pass_over" d="M-6 -6H6V6H-6ZM-3 -1V1H3V-1Z" fill-rule="evenodd"/>
<path id="resume" d="M-4 -6L7 0L-4 6Z"/>
<path id="restore" d="M-5 -5L5 0L-5 5L-2 0Z"/>
<path id="preempted" d="M-5 -5H5V5H-5Z"/>
<circle id="finished" r="5.5"/>
<path id="vanished" d="M-6 -2H6V2H-6Z"/>
</defs></svg>
"""
