// The style sheet of a report's page. Colours are those of Okabe and Ito, which colour-blind
// readers tell apart; each comes with a sign or a word beside it. No font, picture or rule comes
// from the network.
#pragma once

#include <string_view>

namespace lockstep::cache_sim {

inline constexpr std::string_view kReportStyle = R"css(
:root { color-scheme: light dark;
  --page: #ffffff; --ink: #1b2127; --dim: #58626d; --rule: #d3dae1; --panel: #f5f7f9;
  --blue: #0063a5; --blue-soft: #d9eaf7; --good: #00684c; --good-soft: #e0f3ec;
  --bad: #b23400; --bad-soft: #fde8de; --wrong: #d55e00; --wrong-soft: #fff0d9;
  --orange: #f3c777; --grey: #b9c1ca; }
@media (prefers-color-scheme: dark) { :root {
  --page: #10151a; --ink: #e4e9ee; --dim: #9ba6b1; --rule: #313a43; --panel: #181f26;
  --blue: #72b8f0; --blue-soft: #16374f; --good: #62d0ae; --good-soft: #10352a;
  --bad: #ff9d70; --bad-soft: #43200f; --wrong: #ff8f3f; --wrong-soft: #40290b;
  --orange: #8a641d; --grey: #5a6570; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 0 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; margin: 40px 0 12px; }
h2 { font-size: 22px; line-height: 1.3; margin: 56px 0 12px; padding-top: 12px;
  border-top: 1px solid var(--rule); }
h3 { font-size: 16px; margin: 24px 0 8px; }
p { margin: 8px 0; max-width: 78ch; }
a { color: var(--blue); }
code, .trace, .mono { font-family: ui-monospace, "SFMono-Regular", Menlo, Consolas,
  "DejaVu Sans Mono", monospace; }
code { font-size: 0.86em; overflow-wrap: anywhere; }
nav { margin: 16px 0; display: flex; flex-wrap: wrap; gap: 6px 18px; }
.dim, dt, th, figcaption, .where { color: var(--dim); }
.scroll { overflow-x: auto; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 20px 0; padding: 0; list-style: none; }
.tiles li { flex: 1 1 130px; border: 1px solid var(--rule); border-radius: 8px;
  padding: 10px 14px; background: var(--panel); }
.tiles li > data { display: block; font-size: 26px; line-height: 1.25;
  font-variant-numeric: tabular-nums; }
.tiles span { color: var(--dim); font-size: 14px; }
.tiles .bad { border-color: var(--bad); background: var(--bad-soft); }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; font-weight: 600; }
th, td { padding: 6px 12px 6px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
.events strong { white-space: nowrap; }
.summary { table-layout: fixed; min-width: 1000px; }
.summary th:nth-child(1) { width: 26%; } .summary th:nth-child(2) { width: 11%; }
  .summary th:nth-child(3) { width: 14%; }
.summary th:nth-child(4) { width: 22.5%; } .summary th:nth-child(5) { width: 17%; }
  .summary th:nth-child(6) { width: 5.5%; }
.summary th.number { white-space: normal; } .summary th { vertical-align: bottom; }
.summary td:last-child, .summary th:last-child { padding-right: 0; } .summary a {
  text-decoration: none; }
.summary a:hover { text-decoration: underline; }
.summary td > code, .summary td > div > code { display: block; color: var(--dim);
  overflow-wrap: anywhere; }
.chip { display: inline-block; border-radius: 4px; padding: 1px 8px; font-size: 13px;
  line-height: 1.5; }
.chip.pass { background: var(--good-soft); color: var(--good); }
.chip.found { background: var(--blue-soft); color: var(--blue); }
.chip.bad { background: var(--bad-soft); color: var(--bad); font-weight: 600; }
.chip { white-space: nowrap; } .chip code { font-size: 12px; }
.chip.public { border: 1px solid var(--rule); color: var(--dim); }
.report .chip.public { border: 0; padding: 0; }
.banner { border-left: 4px solid var(--bad); background: var(--bad-soft); padding: 8px 16px;
  margin: 16px 0; }
.banner.all { border-color: var(--good); background: var(--good-soft); }
.legend { display: flex; flex-wrap: wrap; gap: 12px 28px; margin: 16px 0; padding: 0;
  list-style: none; }
.legend li { display: flex; align-items: center; gap: 10px; flex: 1 1 300px; font-size: 14px; }
.legend svg { flex: none; }
dl.words { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; font-size: 15px; }
dl.words dt { font-weight: 600; color: var(--ink); }
dl.words dd { margin: 0; max-width: 80ch; }
.trace { counter-reset: line; list-style: none; margin: 14px 0; padding: 8px 0;
  border: 1px solid var(--rule);
  border-radius: 8px; background: var(--panel); font-size: 13px; line-height: 1.6; }
.trace li { counter-increment: line; display: flex; padding: 0 12px 0 0; min-height: 1.6em; }
.trace li::before { content: counter(line); flex: none; width: 3.6em; padding-right: 1.2em;
  text-align: right;
  color: var(--dim); user-select: none; }
.trace code { font-size: inherit; white-space: pre-wrap; }
.trace .comment > code, .trace .rule > code { color: var(--dim); }
.trace .answer > code { color: var(--good); }
.trace .answer > code::before { content: "expected answer: "; font-family: system-ui, sans-serif;
  font-size: 12px; opacity: 0.85; }
.trace .wrong { background: var(--wrong-soft); box-shadow: inset 4px 0 0 var(--wrong); }
.here { color: var(--bad); margin-left: 1.5em; flex: none; max-width: 50%; text-decoration: none; }
.run { border: 1px solid var(--rule); border-radius: 8px; margin: 18px 0; padding: 14px 18px; }
.run > header { display: flex; flex-wrap: wrap; gap: 6px 14px; align-items: baseline;
  justify-content: space-between; }
.run h3 { margin: 0; } .run h3 code { font-size: 0.92em; } .command { font-size: 14px;
  max-width: none; color: var(--dim); }
.up { float: right; font-size: 14px; font-weight: 400; text-decoration: none; }
.run.bad { border-color: var(--bad); border-width: 2px; }
.finding { border-left: 4px solid var(--wrong); background: var(--wrong-soft); padding: 8px 16px;
  margin: 12px 0; }
.finding p.sentence { font-size: 17px; font-weight: 600; overflow-wrap: anywhere; }
.finding dl { display: flex; flex-wrap: wrap; gap: 4px 36px; margin: 6px 0; }
.finding dl div { display: flex; gap: 10px; }
.finding dd { margin: 0; }
.where { font-size: 14px; }
details { margin: 10px 0; }
summary { cursor: pointer; color: var(--blue); font-size: 14px; }
.events td { padding: 2px 14px 2px 0; font-size: 13px; }
.events tr.wrong td { background: var(--wrong-soft); border-bottom: 2px solid var(--wrong); }
.events tr.wrong td:first-child { box-shadow: inset 4px 0 0 var(--wrong); padding-left: 10px; }
.events td.operation { min-width: 320px; }
.pictures { display: flex; flex-wrap: wrap; gap: 20px 36px; margin: 14px 0 4px; }
figure { margin: 0; max-width: 100%; } table + figure, .scroll + figure { margin-top: 18px; }
.chart svg { max-width: 100%; height: auto; }
.workload th.number { white-space: normal; } .workload code { white-space: nowrap; }
figcaption { font-size: 14px; margin-bottom: 6px; max-width: 490px; }
.wide figcaption { max-width: none; }
.keys { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; color: var(--dim);
  margin: 2px 0 0; padding: 0; list-style: none; }
.keys i { display: inline-block; width: 18px; height: 11px; margin-right: 6px;
  border-radius: 2px; vertical-align: -1px; }
i.queued { background: var(--grey); height: 5px; vertical-align: 3px; } i.prefill {
  background: var(--blue); }
i.decode { background: var(--orange); }
i.retracted { background: none; border: 6px solid transparent; border-top: 9px solid var(--bad);
  border-bottom: 0; width: 0; height: 0; border-radius: 0; }
.requests { width: auto; } .requests td, .requests th { padding-right: 28px; }
svg { display: block; font-family: system-ui, -apple-system, "Segoe UI", Arial, sans-serif;
  font-size: 13px; fill: var(--ink); }
svg .small { font-size: 11px; } svg .label { font-size: 13px; } svg .strong { font-weight: 600; }
svg .mono { font-family: ui-monospace, "SFMono-Regular", Menlo, Consolas, "DejaVu Sans Mono",
  monospace; font-size: 11px; }
svg .middle { text-anchor: middle; } svg .end { text-anchor: end; } svg .dim { fill: var(--dim); }
svg .node, svg .idea { stroke: var(--dim); fill: var(--page); }
svg .node.state { fill: var(--blue-soft); stroke: var(--blue); stroke-width: 1.5; }
svg .node.tombstone { fill: none; stroke: var(--dim); stroke-dasharray: 4 3; }
svg .node.kv, svg .node.root { fill: var(--panel); }
svg .lock { fill: var(--wrong); } svg .shackle { fill: none; stroke: var(--wrong);
  stroke-width: 1.6; }
svg .edge { fill: none; stroke: var(--grey); stroke-width: 1.5; }
svg .axis, svg .faint { stroke: var(--rule); } svg .limit { stroke: var(--dim);
  stroke-dasharray: 5 4; }
svg .area { fill: var(--blue-soft); } svg .step { fill: none; stroke: var(--blue);
  stroke-width: 1.6; }
svg .wrong { stroke: var(--wrong); stroke-width: 1.6; stroke-dasharray: 2 3; } svg .wrongtext {
  fill: var(--bad); }
svg .queued { fill: var(--grey); } svg .prefill { fill: var(--blue-soft); stroke: var(--blue); }
svg .decode { fill: var(--orange); } svg .other { fill: var(--panel); stroke: var(--dim); }
  svg .retracted { fill: var(--bad); }
i.prefill { background: var(--blue-soft); border: 1px solid var(--blue); }
svg .bar { fill: var(--blue); } svg .barroom { fill: var(--panel); stroke: var(--rule); }
svg .curve { fill: none; stroke: var(--dim); stroke-width: 1.8; }
svg .point { fill: var(--page); }
svg .c0 { stroke-dasharray: 7 4; } svg .c1 { stroke: var(--blue); stroke-dasharray: 7 4; }
svg .c2 { stroke: var(--blue); stroke-dasharray: 2 3; } svg .c3 { stroke-dasharray: 2 3; }
svg .c4 { stroke-dasharray: 1 0; } svg .c5 { stroke: var(--orange); }
svg .c6 { stroke: var(--blue); }
svg .c7 { stroke: var(--bad); } svg .c8 { stroke: var(--good); }
svg .c9 { stroke: var(--wrong); } svg .c10 { stroke: var(--wrong); stroke-dasharray: 2 3; }
svg .c11 { stroke: var(--good); stroke-dasharray: 7 4; } svg .point { stroke-dasharray: none; }
.conclusions li { margin: 4px 0; }
svg .idea { fill: var(--panel); } svg .idea.checker { fill: var(--blue-soft);
  stroke: var(--blue); }
svg .optional { stroke-dasharray: 5 4; }
svg .flow { fill: none; stroke: var(--dim); stroke-width: 1.4; } svg .flow.head {
  fill: var(--dim); stroke-dasharray: none; }
pre { background: var(--panel); border: 1px solid var(--rule); border-radius: 8px;
  padding: 12px 16px; overflow-x: auto; font-size: 13px; }
pre code { font-size: inherit; }
@media (max-width: 640px) {
  main { padding: 0 14px 40px; } body { font-size: 15px; } h1 { font-size: 25px; } h2 {
  font-size: 19px; }
  .run { padding: 12px; } .requests td, .requests th { padding-right: 14px; } .up { float: none;
  display: block; } dl.words { display: block; } dl.words dd { margin-bottom: 8px; }
  .trace { font-size: 12px; } .trace li { flex-wrap: wrap; } .trace li::before { width: 2.6em;
  padding-right: 0.8em; }
  .trace code { flex: 1 1 0; min-width: 60%; } .here { margin-left: 2.6em; max-width: none; } }
@media print { .run, .trace, figure { break-inside: avoid-page; } .events { break-inside: auto; }
  nav { display: none; }
  body { font-size: 11pt; } a { color: inherit; } }
)css";

}  // namespace lockstep::cache_sim
