// Workers as cells: the fill is KV in use, the colour is the state. Sizes follow from their number and the width.

import {onScheme} from "./canvas.js";
import {Fills} from "./fills.js";
import {$, add, count, el, grouped, ms, percent, setText, short} from "./format.js";

export const STATES = {
  ready: "ready", paused: "paused", slow: "slow", dead: "dead", starting: "starting", draining: "draining",
  stopped: "stopped",
};
const ROLES = {prefill: "Prefill, pool", decode: "Decode, pool"};
const SIGNS = {paused: "‖", slow: "~", dead: "×", starting: "…", draining: "↓", stopped: "○"};
const RESTART_S = 10;
// Sizes of cells, largest first: least width, height, gap, what fits into one, and px that all may take before they get smaller.
const SIZES = [
  [172, 92, 8, "big", 480], [112, 66, 6, "", 480], [82, 54, 5, "", 480], [44, 34, 4, "small", 480], [20, 20, 3, "tiny", 800],
  [14, 14, 2, "tiny", Infinity],
];

export class Cells {
  constructor(onChoose) {
    this.cells = [];
    this.fills = [];
    this.chosen = -1;
    this.restarted = new Set();
    this.onChoose = onChoose;
    const box = $("pools");
    box.onclick = event => this.choose(cellNumber(event.target));
    box.onkeydown = event => this.move(event);
    box.addEventListener("focusin", event => this.label(cellNumber(event.target)));
    box.onpointerover = event => this.showTip(cellNumber(event.target), event.target);
    box.onpointerleave = () => { $("tip").hidden = true; };
    new ResizeObserver(([entry]) => {
      const width = Math.round(entry.contentRect.width);
      if (width !== this.width) { this.width = width; if (this.fleet) this.build(); }
    }).observe(box);
    onScheme(() => { if (this.fleet && this.width) this.build(); });
    const legend = Object.keys(STATES).map(state => add(el("li"), el("i", "swatch s-" + state), STATES[state]));
    legend.push(add(el("li"), el("i", "swatch waits"), "requests wait"), add(el("li"), el("i", "swatch faulty"), "fault"));
    $("legend").replaceChildren(el("li", "", "fill: KV in use"), ...legend);
  }

  /** Draw the cells of these workers; all cells of a fleet that is new. */
  show(fleet, workers) {
    const fresh = this.fleet !== fleet;
    this.fleet = fleet;
    if (!this.width) return;
    if (fresh) this.build();
    else for (const worker of workers) this.update(worker);
    workers.clear();
    this.markRestarts();
    this.countTransfers();
  }

  build() {
    const {fleet, width} = this;
    this.cells.length = this.fills.length = 0;
    this.counters = [];
    const {tall, gap, cls, labels, columns} = layout(fleet.pools, width);
    let first = 0;
    const pools = fleet.pools.map((pool, number) => {
      const box = el("div", "pool"), grid = el("div", "cells " + cls), fills = new Fills(cls === "tiny");
      grid.append(fills.node);
      if (fleet.pools.length > 1) box.append(this.poolHead(pool, number, first));
      grid.style.gridTemplateColumns = (labels ? labels + "px " : "") + `repeat(${columns}, minmax(0, 1fr))`;
      grid.style.setProperty("--tall", tall + "px");
      grid.style.setProperty("--gap", gap + "px");
      if (cls === "tiny") grid.style.setProperty("--round", "3px");
      for (let i = 0; i < pool.workers; i++) {
        if (labels && i % columns === 0) grid.append(el("span", "row", first + i));
        grid.append(this.cell(first + i, cls, fills));
      }
      this.fills.push({fills, first, last: first + pool.workers});
      first += pool.workers;
      return add(box, grid);
    });
    this.tiny = cls === "tiny" || cls === "small";
    this.isTiny = cls === "tiny";
    $("pools").replaceChildren(...pools);
    for (const {fills, first, last} of this.fills) fills.place(this.cells.slice(first, last), first);
    this.countTransfers();
    this.mark();
  }

  poolHead(pool, number, first) {
    const last = first + pool.workers - 1, transfers = el("small", "transfers");
    const about = `${count(pool.workers, "worker")} (${first}–${last}) · ${pool.model} · ${grouped(pool.blocks)} blocks of ` +
      `${pool.block_size} tokens` + (pool.max_num_seqs ? ` · at most ${pool.max_num_seqs} requests in a batch` : "");
    if (pool.role in ROLES) this.counters.push({node: transfers, first, last});
    return add(el("h3", "", (ROLES[pool.role] ?? "Pool") + " " + number), el("small", "", about), transfers);
  }

  /** Show the KV transfers in flight of each pool, if the server counts them. */
  countTransfers() {
    const {transfers} = this.fleet.workers;
    if (!transfers) return;
    for (const {node, first, last} of this.counters) {
      setText(node, count(transfers.slice(first, last + 1).reduce((a, b) => a + b, 0), "transfer") + " in flight");
    }
  }

  cell(worker, cls, fills) {
    const node = el("button", "w"), run = el("span", "run");
    node.type = "button";
    node.dataset.worker = worker;
    node.tabIndex = -1;
    const cell = {node, run, fills, say: null};
    if (cls !== "tiny") node.append(el("b", "", worker));
    node.append(run);
    if (cls === "big" || cls === "") { cell.say = el("span", "say"); node.append(cell.say); }
    this.cells.push(cell);
    return node;
  }

  update(worker) {
    const {cells, fleet} = this, cell = cells[worker], w = fleet.workers, state = w.state[worker];
    const waits = w.waiting[worker], running = w.running[worker];
    let cls = "w s-" + state;
    if (w.faults[worker].length && state === "ready") cls += " faulty";
    if (this.restarted.has(worker) && state !== "dead") cls += " restarted";
    if (worker === this.chosen) cls += " on";
    if (cell.cls !== cls) {
      cell.node.className = cell.cls = cls;
      this.label(worker);
    }
    cell.fills.draw(worker, w);
    const busy = state !== "dead" && (running || waits);
    const rest = w.transfers?.[worker] ? "sends KV" : "idle";  // a prefill worker keeps blocks until they are read
    const sign = SIGNS[state] ?? "", more = waits && cell.say ? " +" + waits : "";
    const text = this.isTiny ? sign : this.tiny ? busy && running || sign : busy ? running : state === "ready" ? rest : state;
    if (cell.text !== text + more) {
      cell.text = text + more;
      cell.run.className = busy ? "run" : "run word";
      cell.run.replaceChildren(String(text), ...more ? [el("em", "", more)] : []);
    }
    if (cell.say) setText(cell.say, busy ? percent(w.usage[worker]) : "");
  }

  /** Name a worker for readers of the screen; its loads as of the last change of state or focus. */
  label(worker) {
    const w = this.fleet.workers;
    this.cells[worker].node.ariaLabel =
      `worker ${worker}: ${w.state[worker]}, ${w.running[worker]} running, ${w.waiting[worker]} waiting`;
  }

  /** Mark workers that were killed and came back at once, for ten seconds. */
  markRestarts() {
    const {fleet} = this, recent = new Set();
    fleet.workers.restarted.forEach((at, worker) => { if (at && fleet.time - at < RESTART_S) recent.add(worker); });
    const changed = [...recent.symmetricDifference(this.restarted)];
    this.restarted = recent;
    changed.forEach(worker => this.update(worker));
  }

  choose(worker) {
    if (worker === null) return;
    this.chosen = worker === this.chosen ? -1 : worker;
    this.mark();
    this.onChoose(this.chosen);
  }

  mark() {
    for (const [worker, cell] of this.cells.entries()) {
      const stop = worker === Math.max(this.chosen, 0) ? 0 : -1;
      if (cell.node.tabIndex !== stop) cell.node.tabIndex = stop;
      this.update(worker);
    }
  }

  /** Arrow keys move between cells. */
  move(event) {
    const from = cellNumber(event.target);
    if (from === null) return;
    const across = Math.max(1, this.cells.filter(cell => cell.node.offsetTop === this.cells[from].node.offsetTop).length);
    const step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across}[event.key];
    const to = this.cells[from + step];
    if (!to) return;
    event.preventDefault();
    to.node.focus();
  }

  showTip(worker, target) {
    const tip = $("tip");
    tip.hidden = worker === null;
    if (worker === null) return;
    const w = this.fleet.workers, lines = [`Worker ${worker}: ${STATES[w.state[worker]]}`];
    if (w.state[worker] !== "dead") {
      lines.push(`${w.running[worker]} running, ${w.waiting[worker]} waiting`, `KV in use ${percent(w.usage[worker])}` +
        (w.host[worker] ? `, host ${percent(w.host[worker])}` : ""), `${short(w.rate[worker])} tokens/s, cached ${percent(w.hit[worker])}`);
      if (w.transfers?.[worker]) lines.push(count(w.transfers[worker], "KV transfer") + " in flight");
      if (w.late_ms[worker] > 1) lines.push(`tokens up to ${ms(w.late_ms[worker])} late`);
    }
    if (w.faults[worker].length) lines.push("fault: " + w.faults[worker].join(", ").replaceAll("_", " "));
    if (this.restarted.has(worker)) lines.push("was killed and restarted");
    setText(tip, lines.join("\n"));
    const box = target.closest(".w").getBoundingClientRect();
    const left = Math.min(box.left, innerWidth - tip.offsetWidth - 8);
    const above = box.top - tip.offsetHeight - 6;
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = (above > 4 ? above : box.bottom + 6) + "px";
  }
}

/** The largest cells that fit; rows of many begin with round numbers. */
function layout(pools, width) {
  const most = Math.max(...pools.map(pool => pool.workers)), digits = String(pools.reduce((a, pool) => a + pool.workers, 0)).length;
  for (const [least, tall, gap, cls, highest] of SIZES) {
    const labels = cls === "tiny" || cls === "small" ? 8 * digits + 4 : 0;
    let columns = Math.max(1, Math.floor((width - labels + gap) / (least + gap)));
    if (columns > 10) columns -= columns % (columns > 20 ? 10 : 5);
    columns = Math.min(columns, most);
    const rows = pools.reduce((a, pool) => a + Math.ceil(pool.workers / columns), 0);
    if (rows * (tall + gap) <= highest) return {tall, gap, cls, labels, columns};
  }
}

function cellNumber(node) {
  const cell = node.closest?.(".w");
  return cell ? +cell.dataset.worker : null;
}
