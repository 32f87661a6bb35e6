"""Style sheets and scripts of the pages, inline."""

from __future__ import annotations

# The palette is Okabe and Ito's, safe for colour-blind readers; lightened for the dark theme.
_LIGHT = """
  --bg: #f6f6f4; --card: #ffffff; --ink: #1d2129; --soft: #5b6472; --faint: #8a93a1; --line: #e3e4e1; --grid: #ececea;
  --s1: #0072b2; --s2: #d55e00; --s3: #7fb8dd; --s4: #009e73; --base: #8d8d94; --good: #00734f; --bad: #b34700;
  --s5: #b8589a; color-scheme: light;
"""
_DARK = """
  --bg: #14161a; --card: #1c1f25; --ink: #e8eaed; --soft: #a5adba; --faint: #7d8695; --line: #2c313a; --grid: #282c34;
  --s1: #56a8e0; --s2: #f08a3c; --s3: #2f5f85; --s4: #2fc294; --base: #90949c; --good: #43cf9f; --bad: #f5a15f;
  --s5: #dd8cc0; color-scheme: dark;
"""

STYLE = (
    f"""
:root {{ {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {_DARK} }} }}
:root[data-theme="dark"] {{ {_DARK} }}
"""
    + """
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--bg); color: var(--ink);
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 1344px; margin: 0 auto; padding: 28px 24px 40px; }
header { display: flex; gap: 24px; align-items: flex-start; margin-bottom: 20px; }
header > div { flex: 1; min-width: 0; }
h1 { font-size: 22px; line-height: 1.25; font-weight: 650; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 15px; font-weight: 650; margin: 0; }
.facts { display: flex; flex-wrap: wrap; gap: 2px 20px; color: var(--soft); }
.facts b { color: var(--ink); font-weight: 550; }
.facts code, td code { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
code.flag { font: .93em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: nowrap; }
button {
  flex: none; font: inherit; color: var(--soft); background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: 5px 12px; cursor: pointer;
}
button:hover { color: var(--ink); }
.verdicts { list-style: none; margin: 0 0 12px; padding: 10px 16px; background: var(--card); border-radius: 8px;
  border-left: 4px solid var(--bad); }
.verdicts.none { border-left-color: var(--good); }
.verdicts li { margin: 4px 0; } .verdicts .note { color: var(--soft); }
.notes { margin: 0 0 12px; padding: 0 16px; color: var(--soft); font-size: 13px; }
.notes ul { margin: 4px 0; padding-left: 18px; }
.source { color: var(--faint); font-size: 12px; margin-top: 4px; overflow-wrap: anywhere; }
.goal { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 20px; margin: 0 0 12px; padding: 12px 16px;
  border-radius: 8px; border: 1px solid var(--c); background: color-mix(in srgb, var(--c) 12%, var(--card)); }
.goal.met { --c: var(--good); } .goal.missed { --c: var(--bad); }
.goal .said { font-size: 20px; color: var(--c); }
.goal .limit b { font-weight: 600; } .goal .ok b { color: var(--good); } .goal .late b { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); gap: 12px; margin-bottom: 12px; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; min-width: 0; }
.tile { padding: 12px 16px 13px; }
.tile .what { color: var(--soft); }
.tile .value { font-size: 25px; line-height: 1.3; font-weight: 600; letter-spacing: -.01em; }
.tile .value small { font-size: 14px; font-weight: 500; color: var(--soft); letter-spacing: 0; }
.tile .more { color: var(--soft); font-size: 13px; }
.delta { font-size: 13px; font-weight: 550; color: var(--soft); margin-left: 8px; letter-spacing: 0;
  white-space: nowrap; }
.delta.good { color: var(--good); } .delta.bad { color: var(--bad); }
.cards { display: grid; grid-template-columns: repeat(6, minmax(0, 1fr)); gap: 12px; }
.card { padding: 14px 16px 10px; }
.third { grid-column: span 2; } .half { grid-column: span 3; } .full { grid-column: 1 / -1; }
.card .head { display: flex; flex-wrap: wrap; align-items: baseline; gap: 0 12px; margin-bottom: 6px; }
.card .sub { color: var(--soft); font-size: 13px; }
.legend { margin-left: auto; display: flex; flex-wrap: wrap; justify-content: flex-end; gap: 2px 14px;
  font-size: 13px; color: var(--soft); }
.legend span { white-space: nowrap; }
i.key { display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 6px; vertical-align: middle;
  background: var(--c); }
i.key.solid, i.key[class*="heat"] { height: 10px; width: 10px; } i.key.thin { height: 1.5px; }
.s1 { --c: var(--s1); } .s2 { --c: var(--s2); } .s3 { --c: var(--s3); } .s4 { --c: var(--s4); } .s5 { --c: var(--s5); }
.base { --c: var(--base); } .base.ink { --c: var(--ink); }
.plot { position: relative; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg :is(path, circle) { vector-effect: non-scaling-stroke; }
svg text { font-size: 11.5px; fill: var(--faint); }
svg .tick.name { fill: var(--ink); font-size: 12.5px; }
svg .note { fill: var(--soft); } svg .note.strong { fill: var(--ink); font-weight: 550; }
svg .note.s4, svg .note.base { fill: var(--c); font-weight: 550; }
svg .note { paint-order: stroke; stroke: var(--card); stroke-width: 3px; stroke-linejoin: round; }
svg .grid { stroke: var(--grid); fill: none; }
svg .axis, svg .tickmark { stroke: var(--faint); fill: none; opacity: .7; }
svg .line { stroke: var(--c); fill: none; stroke-width: 1.8; stroke-linejoin: round; }
svg .line.thin { stroke-width: 1; opacity: .8; } svg .line.base { stroke-dasharray: 5 4; stroke-width: 1.5; }
svg .area { fill: var(--c); opacity: .16; } svg .area.solid { opacity: .9; }
"""
    + "\n".join(
        f":is(svg .area, i.key).heat{level} {{ opacity: {0.08 + 0.09 * level:.2f}; }}"
        for level in range(1, 11)
    )
    + """
svg .dots { stroke: var(--c); fill: none; stroke-width: 4; stroke-linecap: round; opacity: .45; }
svg .dots.few { stroke-width: 7; opacity: .7; }
svg .rule { stroke: var(--c); fill: none; stroke-dasharray: 2 3; } svg .marker { fill: var(--c); stroke: var(--card); }
svg .cross { stroke: var(--faint); fill: none; pointer-events: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 550; font-size: 13px; }
tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th:last-child, td:last-child { padding-right: 0; }
td.text, th.text { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 110px; }
.unit { color: var(--faint); font-size: 13px; }
[data-tip] { cursor: help; text-decoration: underline dotted var(--faint); text-underline-offset: 3px; }
.columns { columns: 3 340px; column-gap: 32px; }
.columns div { display: flex; justify-content: space-between; gap: 16px; padding: 4px 0;
  border-bottom: 1px solid var(--line);  break-inside: avoid; }
.columns div > :last-child { overflow-wrap: anywhere; text-align: right; }
details summary { cursor: pointer; } details summary h2 { display: inline; }
details[open] summary { margin-bottom: 8px; }
footer { color: var(--faint); font-size: 13px; margin-top: 18px; }
#tip {
  position: fixed; z-index: 9; left: 0; top: 0; pointer-events: none; visibility: hidden; max-width: 340px;
  background: var(--card); color: var(--ink); border: 1px solid var(--line); border-radius: 8px; padding: 7px 10px;
  font-size: 13px; line-height: 1.4; box-shadow: 0 4px 16px rgb(0 0 0 / .18);
}
#tip .row { display: flex; align-items: center; gap: 14px; justify-content: space-between; }
#tip .row b { font-weight: 600; }
@media (max-width: 1080px) {
  .third, .half { grid-column: 1 / -1; }
}
@media (max-width: 700px) {
  main { padding: 16px 12px 28px; } th, td { padding: 5px 6px; }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 8px; }
  .scroll td:first-child, .scroll th:first-child { position: sticky; left: 0; background: var(--card);
    white-space: normal; min-width: 108px; }
}
@media print {
  body { background: #fff; } button { display: none; } .card, .tile { break-inside: avoid; } main { padding: 0; }
}
"""
)

# Runs before the page is drawn, so that a chosen theme does not flash.
THEME_SCRIPT = """
(() => {
  let theme = new URLSearchParams(location.search).get("theme");
  try { theme = theme || localStorage.getItem("understudy-theme"); } catch (error) { /* use the system's theme */ }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
"""

SCRIPT = """
(() => {
  const root = document.documentElement;
  document.getElementById("theme").addEventListener("click", () => {
    const system = matchMedia("(prefers-color-scheme: dark)").matches;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : system;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("understudy-theme", root.dataset.theme); } catch (error) { /* storage is disabled */ }
  });

  const tip = document.getElementById("tip");
  const node = (tag, style, text) => {
    const made = document.createElement(tag);
    made.className = style;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const show = (nodes, x, y) => {
    tip.replaceChildren(...nodes);
    const box = tip.getBoundingClientRect();
    const left = x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, Math.min(y + 14, innerHeight - box.height - 4)) + "px";
    tip.style.visibility = "visible";
  };
  const hide = () => { tip.style.visibility = "hidden"; };

  // Draw a plot as wide as its card, but with text, marks and height of their own size.
  const fit = (plot) => {
    const svg = plot.querySelector("svg"), view = svg.viewBox.baseVal;
    const fixed = svg.querySelectorAll("text, circle"), ticks = svg.querySelectorAll("text.tick:not([dy])");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.style.height = view.height + "px";
    plot.style.padding = "";
    const outer = plot.getBoundingClientRect();
    for (let left = 0, right = 0, tries = 0; tries < 3 && outer.width; tries++) {
      plot.style.padding = `0 ${right}px 0 ${left}px`;
      const scale = view.width / Math.max(svg.getBoundingClientRect().width, 1);
      for (const one of fixed) {
        const x = one.getAttribute("x") || one.getAttribute("cx");
        one.setAttribute("transform", `translate(${x}) scale(${scale} 1) translate(${-x})`);
      }
      const boxes = [...fixed].map((one) => one.getBoundingClientRect());  // labels at the edges need room
      left += Math.max(0, ...boxes.map((box) => outer.left - box.left));
      right += Math.max(0, ...boxes.map((box) => box.right - outer.right));
    }
    let end = -Infinity;
    for (const tick of ticks) {
      const box = tick.getBoundingClientRect();
      tick.style.visibility = box.left < end + 6 ? "hidden" : "";
      if (!tick.style.visibility) end = box.right;
    }
  };
  const scaleWhole = (plot) => {  // paper has another width
    const svg = plot.querySelector("svg");
    svg.removeAttribute("preserveAspectRatio");
    svg.style.height = plot.style.padding = "";
    for (const one of svg.querySelectorAll("text, circle")) {
      one.removeAttribute("transform");
      one.style.visibility = "";
    }
  };
  const plots = [...document.querySelectorAll(".plot")];
  const sizes = new ResizeObserver((seen) => seen.forEach((one) => fit(one.target)));
  const fitAll = () => plots.forEach((plot) => sizes.observe(plot, { box: "border-box" }));
  addEventListener("beforeprint", () => { sizes.disconnect(); plots.forEach(scaleWhole); });
  addEventListener("afterprint", fitAll);
  fitAll();

  for (const plot of plots) {
    const source = plot.querySelector("script");
    if (!source) continue;
    const data = JSON.parse(source.textContent);
    const svg = plot.querySelector("svg");
    const cross = svg.querySelector(".cross");
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const view = svg.viewBox.baseVal, across = view.width / box.width, down = view.height / box.height;
      const x = (event.clientX - box.left) * across, y = (event.clientY - box.top) * down;
      let best = -1, least = Infinity;
      data.px.forEach((px, index) => {
        const far = data.py ? Math.hypot((px - x) / across, (data.py[index] - y) / down) : Math.abs(px - x);
        if (far < least) { least = far; best = index; }
      });
      if (best < 0 || (data.py && least > 30)) { cross.setAttribute("d", ""); hide(); return; }
      const px = data.px[best];
      cross.setAttribute("d", data.py
        ? `M${px - 5 * across} ${data.py[best]}a${5 * across} 5 0 1 0 ${10 * across} 0`
          + `a${5 * across} 5 0 1 0 ${-10 * across} 0`
        : `M${px} ${svg.dataset.top}V${svg.dataset.bottom}`);
      const rows = data.series.filter((series) => series.text[best]).map((series) => {
        const row = node("div", "row"), name = node("span", "");
        name.append(node("i", "key " + series.style), series.name);
        row.append(name, node("b", "", series.text[best]));
        return row;
      });
      show([node("div", "", data.label[best]), ...rows], event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", () => { cross.setAttribute("d", ""); hide(); });
  }
  for (const word of document.querySelectorAll("[data-tip]")) {
    const showTip = () => {
      const box = word.getBoundingClientRect();
      show([node("div", "", word.dataset.tip)], box.left, box.bottom - 8);
    };
    word.addEventListener("pointerenter", showTip);
    word.addEventListener("focus", showTip);
    word.addEventListener("pointerleave", hide);
    word.addEventListener("blur", hide);
  }
})();
"""
