"""The style sheet of every HTML page and of the charts in it.

Colours are variables with a light and a dark value. A meaning is never only a colour: states are words, thresholds have
dashes, events have numbers. Series colours differ in lightness as well, for readers who do not see red and green apart.
"""

from typing import Final

_LIGHT: Final = """--page:#f7f7f5;--card:#ffffff;--ink:#1c1c1a;--soft:#5c5c57;--rule:#deded9;--grid:#e9e9e4;
--focus:#0b57d0;
--good:#1a7a3c;--warn:#8f5a00;--bad:#b3261e;--warn-back:#fff4dc;--bad-back:#fdeceb;--good-back:#e9f5ec;
--s0:#2a6fdb;--s1:#12908a;--s2:#d98c00;--s3:#7a4cc4;--s4:#5d8f16;--s5:#d0558f;--s6:#8a5a3c;--s7:#3f5f86;--s8:#a3a39c;
--hard:#c5221f;--softline:#c47f00;"""
_DARK: Final = """--page:#141413;--card:#1d1d1b;--ink:#ececea;--soft:#a9a9a3;--rule:#3a3a37;--grid:#2a2a28;
--focus:#8ab4f8;
--good:#6fcf8f;--warn:#f0b44c;--bad:#ff8a80;--warn-back:#33270f;--bad-back:#3a1c1a;--good-back:#16291c;
--s0:#6ea2f5;--s1:#4cc4bb;--s2:#f0b44c;--s3:#b494f0;--s4:#9ccc52;--s5:#ef8fbb;--s6:#c49a7c;--s7:#8fb0d8;--s8:#7c7c76;
--hard:#ff6e64;--softline:#f0b44c;"""

CSS: Final = (
    ":root{color-scheme:light dark;"
    + _LIGHT
    + "}@media (prefers-color-scheme:dark){:root{"
    + _DARK
    + "}}"
    + """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;padding:1.25rem;max-width:72rem;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.35rem;line-height:1.3;margin:.25rem 0 1rem}
h2{font-size:1rem;line-height:1.35;margin:0 0 .6rem}
h3{font-size:.9rem;margin:1rem 0 .4rem}
p{margin:.5rem 0}
main:focus{outline:none}
a{color:var(--focus)}
:focus-visible{outline:3px solid var(--focus);outline-offset:2px;border-radius:3px}
.skip{position:absolute;left:-100rem}
.skip:focus{position:static;display:inline-block;padding:.3rem .6rem}
section,figure.chart,.verdict,dl.facts{margin:0 0 1rem;padding:1rem;background:var(--card);border:1px solid var(--rule);
border-radius:8px}
section section,section figure.chart{padding:0;border:0;margin:1rem 0 0}
.verdict{font-size:1.05rem;font-weight:600;border-left-width:5px}
.verdict.good{border-left-color:var(--good);background:var(--good-back)}
.verdict.warn{border-left-color:var(--warn);background:var(--warn-back)}
.verdict.bad{border-left-color:var(--bad);background:var(--bad-back)}
dl.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(13rem,1fr));gap:.6rem 1.2rem}
dl.facts div{min-width:0}
dt{font-size:.78rem;color:var(--soft)}
dd{margin:0}
table{width:100%;border-collapse:collapse;font-size:.86rem;font-variant-numeric:tabular-nums}
th{text-align:left;font-size:.72rem;font-weight:600;color:var(--soft);vertical-align:bottom;
padding:.25rem .75rem .35rem 0;
border-bottom:1px solid var(--rule);overflow-wrap:normal}
td{vertical-align:top;padding:.35rem .75rem .35rem 0;border-bottom:1px solid var(--grid);min-width:2.5rem;
overflow-wrap:break-word}
td .long,th .long{overflow-wrap:anywhere}
.scroll{overflow-x:auto}
tbody tr:last-child td{border-bottom:0}
th:last-child,td:last-child{padding-right:0}
.num{text-align:right}
td.num{white-space:nowrap}
.good{color:var(--good)}.warn{color:var(--warn)}.bad{color:var(--bad);font-weight:600}
.dim{color:var(--soft)}.strong{font-weight:600}
svg.bar{display:inline-block;width:3.5rem;height:.6rem;margin-right:.5rem;border-radius:2px;background:var(--grid)}
svg.bar .good{fill:var(--good)}svg.bar .warn{fill:var(--warn)}svg.bar .bad{fill:var(--bad)}
details{margin:.6rem 0 0}
main>details{margin:0 0 1rem}
summary{cursor:pointer;color:var(--soft);font-size:.86rem;padding:.15rem 0}
details[open]>summary{margin-bottom:.4rem}
pre{margin:.5rem 0;padding:.75rem;background:var(--page);border:1px solid var(--rule);border-radius:6px;
font:.82rem/1.45 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre-wrap}
figcaption{font-weight:600;font-size:.95rem;margin-bottom:.15rem}
figcaption small{display:block;font-weight:400;font-size:.82rem;color:var(--soft)}
svg.plot{display:block;width:calc(100% - 46px);overflow:visible;margin:.5rem 0 0 46px}
svg.plot text{font-size:11px;fill:var(--soft);font-family:inherit}
svg.plot .halo{paint-order:stroke;stroke:var(--card);stroke-width:3px;stroke-linejoin:round}
svg.plot line,svg.plot polyline,svg.plot path{vector-effect:non-scaling-stroke}
.grid{stroke:var(--grid);stroke-width:1}
.axis{stroke:var(--rule);stroke-width:1}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.hard{fill:none;stroke:var(--hard);stroke-width:1.5;stroke-dasharray:7 3}
.soft{fill:none;stroke:var(--softline);stroke-width:1.5;stroke-dasharray:2 3}
.area{stroke:var(--card);stroke-width:1}
.below{fill:var(--hard);opacity:.1;stroke:none}
.band{opacity:.09;stroke:none}
.lane{opacity:.75;stroke:none}
.track{fill:var(--grid);stroke:none}
.event{stroke:var(--bad);stroke-width:1.5}
.event.other{stroke:var(--soft)}
.flag{fill:var(--bad);stroke:none}
.flag.other{fill:var(--soft)}
svg.plot text.number{fill:var(--card);font-size:10px;font-weight:700;text-anchor:middle}
.hit{fill:transparent;stroke:none}
.hit:hover{fill:var(--ink);fill-opacity:.08}
.middle{text-anchor:middle}.end{text-anchor:end}
ul.legend,ol.events{list-style:none;margin:.5rem 0 0;padding:0;font-size:.84rem}
ul.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem}
ul.legend li{min-width:0}
ul.legend svg{width:1rem;height:.75rem;margin-right:.35rem;vertical-align:-.05rem}
ol.events li{padding:.12rem 0}
ol.events b{display:inline-block;min-width:1.35rem;padding:0 .3rem;margin-right:.45rem;text-align:center;
border-radius:9px;font-size:.75rem;line-height:1.2rem;background:var(--bad);color:var(--card)}
ol.events b.other{background:var(--soft)}
ul.levels{list-style:none;margin:.5rem 0 0;padding:0;font-size:.86rem}
ul.levels li{margin:.35rem 0 .6rem}
svg.level,svg.shares{display:block;width:100%;overflow:visible}
svg.shares{margin-top:.5rem}
svg .fill{fill:var(--s0)}svg .fill.good{fill:var(--good)}svg .fill.warn{fill:var(--warn)}svg .fill.bad{fill:var(--bad)}
svg .tick{stroke-width:2;stroke-dasharray:none}
time{color:var(--soft);font-variant-numeric:tabular-nums;margin-right:.5rem}
.empty{color:var(--soft);padding:1.2rem 0}
"""
    + "".join(
        f".l{number}{{stroke:var(--s{number})}}.a{number}{{fill:var(--s{number})}}.c{number}{{stop-color:var(--s{number})}}"
        for number in range(9)
    )
    + """
@media (max-width:44rem){
body{padding:.75rem}
section,figure.chart,.verdict,dl.facts{padding:.75rem}
.sparse{display:none}
thead{position:absolute;left:-100rem}
table,tbody,tr,td{display:block;width:100%}
tr{padding:.4rem 0;border-bottom:1px solid var(--rule)}
td,td.num{display:flex;gap:.75rem;text-align:left;padding:.08rem 0;border:0;white-space:normal}
td:empty{display:none}
td::before{content:attr(data-title);flex:0 0 6.5rem;color:var(--soft);font-size:.75rem;font-weight:400;
overflow-wrap:anywhere}
td bdi{min-width:0;overflow-wrap:anywhere}
}
@media (prefers-contrast:more){:root{--soft:var(--ink);--rule:var(--ink)}}
@media print{
:root{"""
    + _LIGHT
    + """--page:#fff}
body{max-width:none;padding:0;font-size:10pt}
.skip,summary{display:none}
details::details-content{content-visibility:visible;block-size:auto}
section,figure.chart,.verdict,dl.facts{border-color:#bbb;break-inside:avoid}
section:has(table){break-inside:auto}
tr{break-inside:avoid}
thead{display:table-header-group}
svg,.verdict{print-color-adjust:exact;-webkit-print-color-adjust:exact}
}
"""
)
