// Panels beside the cells: one worker, and the router's last decisions with their reasons.

import {$, add, count, decimal, el, grouped, ms, percent, seconds, setText, short} from "./format.js";

const SHOWN_REQUESTS = 40;
const TIERS = {device: "device", g2: "host (G2)", g3: "disk (G3)", g4: "object store (G4)"};

/** Show a worker that the server has described; `null` explains how to choose one. */
export function showWorker(worker, fleet) {
  const box = $("worker");
  if (!worker) {
    box.replaceChildren(add(el("div", "head"), el("h2", "", "A worker")),
      el("p", "hint", "Choose a cell to see the requests and the cache of a worker."));
    return;
  }
  const i = worker.worker, w = fleet.workers, state = w.state[i];
  const head = add(el("div", "head"), add(el("h2", "", "Worker " + i + " "), el("span", "state s-" + state, state)),
    el("small", "", `port ${worker.port} · ${worker.model}`));
  const facts = el("p", "facts");
  for (const [name, value] of [["running", w.running[i]], ["waiting", w.waiting[i]], ["tokens/s", short(w.rate[i])],
    ["cached prompt tokens", percent(w.hit[i])], [worker.preemptions === 1 ? "preemption" : "preemptions", worker.preemptions],
    [worker.restarts === 1 ? "restart" : "restarts", worker.restarts], ["lateness", ms(w.late_ms[i])]]) {
    facts.append(add(el("span"), add(el("b", "", value)), " " + name));
  }
  const parts = [head, facts, ...worker.cache.map(cacheBar)];
  const scrolled = box.querySelector(".scroll")?.scrollTop ?? 0;
  parts.push(requestTable(worker.requests));
  box.replaceChildren(...parts);
  const table = box.querySelector(".scroll");
  if (table) table.scrollTop = scrolled;
}

function cacheBar(tier) {
  const total = tier.held + tier.cached + tier.free || 1, box = el("div", "tier"), bar = el("div", "bar");
  for (const part of ["held", "cached"]) {
    const piece = el("i", part);
    piece.style.width = (100 * tier[part] / total).toFixed(2) + "%";
    bar.append(piece);
  }
  const words = `${short(tier.held)} blocks held by requests, ${short(tier.cached)} cached, ${short(tier.free)} free`;
  return add(box, el("b", "", TIERS[tier.tier] ?? tier.tier), " " + words, bar);
}

function requestTable(requests) {
  if (!requests.length) return el("p", "hint", "No request.");
  const table = el("table"), top = el("tr");
  for (const [name, cls] of [["request", ""], ["state", ""], ["prompt", "n"], ["cached", "n"], ["age", "n"]]) top.append(el("th", cls, name));
  table.append(top);
  for (const r of requests.slice(0, SHOWN_REQUESTS)) {
    const state = r.state === "waiting" ? "waiting" : r.done ? `decode ${r.done}/${r.of}` : "prefill";
    const row = el("tr");
    row.append(el("td", "name", r.id.length > 13 ? "…" + r.id.slice(-12) : r.id), el("td", "tight", state),
      el("td", "n", grouped(r.prompt)), el("td", "n", grouped(r.cached)), el("td", "n", seconds(r.age_ms / 1000)));
    table.append(row);
  }
  const box = add(el("div", "scroll"), table);
  if (requests.length > SHOWN_REQUESTS) box.append(el("p", "hint", `and ${count(requests.length - SHOWN_REQUESTS, "more request")}`));
  return box;
}

/** The reason of a decision, in one sentence. */
export function reason(d) {
  const waited = d.waited_ms > 0 ? [`waited ${ms(d.waited_ms)} for a worker`] : [], stage = d.stage === "whole" ? "" : d.stage + ": ";
  if (d.why !== "kv") {
    const own = [d.score == null ? "" : "score " + decimal(d.score), d.reason || ""].filter(Boolean);
    return [stage + "by " + d.why.replaceAll("_", " "), ...own, ...waited].join("; ");
  }
  const cost = decimal(d.cost) + " blocks";
  const parts = [stage + (d.ties > 1 ? `drawn among ${d.ties} workers at the lowest cost, ${cost}` : `lowest cost, ${cost}`)];
  if (d.lower) parts.push(`${d.lower} more blocks on slower tiers`);
  if (d.best > d.overlap) parts.push(`another worker has ${d.best} blocks, and more load`);
  return [...parts, ...waited].join("; ");
}

const rows = [];
let isKept = false;

/** Show the last decisions, newest first; rows are reused. A table whose rows are all new is kept once, to be read. */
export function showDecisions(fleet) {
  const decisions = fleet.decisions.toReversed(), shown = rows[0]?.n ?? Infinity;
  isKept = !isKept && decisions.at(-1)?.n > shown;
  if (isKept) return;
  $("no-routes").hidden = decisions.length > 0;
  $("routed").parentNode.hidden = decisions.length === 0;
  setText($("policy"), "routing: " + fleet.routing.replaceAll("_", " "));
  while (rows.length < decisions.length) {
    const row = {node: el("tr"), worker: el("td", "n"), tokens: el("td", "n"), load: el("td", "n"), blocks: el("span"), why: el("td", "why"),
      bar: el("div", "bar"), share: el("i", "cached"), age: el("td", "n")};
    const cached = add(el("td"), add(row.bar, row.share), row.blocks);
    $("routed").append(add(row.node, row.worker, row.tokens, row.load, cached, row.why, row.age));
    rows.push(row);
  }
  rows.forEach((row, i) => {
    const d = decisions[i];
    row.node.hidden = !d;
    if (d) setText(row.age, seconds(Math.max(0, fleet.time - d.at)));
    if (!d || row.n === d.n) return;
    row.n = d.n;
    setText(row.worker, d.worker);
    setText(row.tokens, short(d.tokens));
    setText(row.load, d.load);
    row.bar.hidden = !d.blocks || d.overlap === null;
    if (d.blocks) row.share.style.width = (100 * d.overlap / d.blocks).toFixed(0) + "%";
    setText(row.blocks, !d.blocks ? "not asked" : d.overlap === null ? "unknown" : `${d.overlap} of ${count(d.blocks, "block")}`);
    setText(row.why, reason(d));
  });
}
