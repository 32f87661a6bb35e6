// Connects the page to the fleet: asks for a key if one is needed, follows the stream of changes, and draws them.

import {Cells} from "./cells.js";
import {Charts} from "./charts.js";
import {Faults} from "./faults.js";
import {$, el, grouped, ms, percent, ranges, setText, short} from "./format.js";
import {showDecisions, showWorker} from "./panels.js";
import {Fleet} from "./state.js";

const KEY = "understudy-api-key";  // kept until the tab closes
const RETRY_MS = 2000;
const MANY = 100;  // workers
const dueEvery = () => fleet.size > MANY ? 4 : 3;  // events; states and faults are drawn with each
let fleet = null, events = 0;

const charts = new Charts($("charts"));
const faults = new Faults(ask);
const cells = new Cells(worker => {
  history.replaceState(null, "", worker < 0 ? location.pathname : "#" + worker);
  faults.suggest(worker);
  inspect().catch(() => {});
});

function showAccess(asks, why) {
  $("fleet").hidden = true;
  $("access").hidden = false;
  $("access").querySelector("form").hidden = !asks;
  setText($("why"), why);
}

/** Ask the server, with the key if there is one; `order` is posted as JSON. An Error has the server's message. */
async function ask(path, order) {
  const key = sessionStorage.getItem(KEY), headers = key ? {Authorization: "Bearer " + key} : {};
  const options = order ? {method: "POST", body: JSON.stringify(order), headers: {...headers, "Content-Type": "application/json"}} : {headers};
  const reply = await fetch(path, options);
  if (reply.ok) return reply;
  const said = await reply.json().catch(() => ({})), message = said.error?.message ?? `${path}: ${reply.status}`;
  if (reply.status === 401) {
    sessionStorage.removeItem(KEY);
    showAccess(true, key ? "The server does not accept this key." : "");
  } else if (reply.status === 403) showAccess(false, message);
  throw new Error(message);
}

/** Draw the fleet: all of it if that is due, else only what cannot wait. */
function draw(isDue) {
  document.documentElement.dataset.time = fleet.time;  // of the state that is drawn
  if (isDue || fleet.urgent.size) showStates();
  cells.show(fleet, isDue ? fleet.touched : fleet.urgent);
  faults.show(fleet);
  if (!isDue) return;
  fleet.urgent.clear();
  showTiles();
  charts.draw(fleet);
  showDecisions(fleet);
}

function showStates() {
  const size = fleet.size, byState = fleet.byState();
  const ready = size - [...byState.values()].reduce((a, list) => a + list.length, 0);
  setText($("k-workers"), size > 1 ? `${grouped(ready)} / ${grouped(size)}` : ready ? "1" : "0 / 1");
  const others = [...byState].sort(([a], [b]) => (b === "dead") - (a === "dead")).slice(0, 2);
  setText($("k-workers-more"), [size > 1 ? "workers ready" : "worker ready", ...others.map(([state, list]) => `${list.length} ${state}`)].join(" · "));
  showAttention(byState);
}

function showTiles() {
  const w = fleet.workers;
  setText($("k-requests"), short(fleet.sum("running")));
  const waiting = fleet.sum("waiting");
  setText($("k-requests-more"), `running · ${short(waiting)} waiting` + (fleet.queued ? ` · ${short(fleet.queued)} at the router` : ""));
  setText($("k-kv"), percent(w.usage.reduce((a, b) => a + b, 0) / fleet.size));
  setText($("k-cached"), fleet.summary.cached === null ? "–" : percent(fleet.summary.cached));
  const late = fleet.late.token_p99;
  setText($("k-late"), ms(late));
  $("k-late").classList.toggle("bad", late > 50);
  setText($("k-late-more"), late > 50 ? "late p99: this machine is the limit" : "lateness p99");
  setText($("routing"), "routing: " + fleet.routing.replaceAll("_", " "));
}

/** Name the workers that are not ready, so that they are found among a thousand. */
function showAttention(byState) {
  const box = $("attention"), text = JSON.stringify([...byState]);
  if (box.dataset.shown === text) return;
  box.dataset.shown = text;
  box.hidden = !byState.size;
  box.replaceChildren(...[...byState].map(([state, workers]) => {
    const chip = el("button", "chip s-" + state, `${state}: ${ranges(workers, 8)}`);
    chip.type = "button";
    chip.onclick = () => cells.choose(workers[0]);
    return chip;
  }));
}

async function inspect() {
  const chosen = cells.chosen;
  if (chosen < 0) { showWorker(null); return; }
  const worker = await (await ask("/fleet/workers/" + chosen)).json();
  if (chosen === cells.chosen) showWorker(worker, fleet);
}

function receive(state) {
  if (state.changed) fleet.apply(state);
  else {
    fleet = new Fleet(state);
    $("access").hidden = true;
    $("fleet").hidden = false;
    const wanted = /^#(\d{1,6})$/.exec(location.hash);
    if (wanted && cells.chosen < 0 && +wanted[1] < fleet.size) { cells.chosen = +wanted[1]; faults.suggest(cells.chosen); }
    inspect().catch(() => {});
  }
  if (document.hidden) return;  // nothing is drawn that no one sees
  draw(!state.changed || state.marks || events++ % dueEvery() === 0);
  if (state.changed && cells.chosen >= 0) inspect().catch(() => {});
}

async function follow() {  // fetch, because an EventSource cannot send the key
  const reader = (await ask("/fleet/events")).body.pipeThrough(new TextDecoderStream()).getReader();
  $("live").classList.add("on");
  setText($("live"), "live");
  for (let text = "";;) {
    const {done, value} = await reader.read();
    if (done) return;
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) receive(JSON.parse(event.slice("data: ".length)));
  }
}

async function watch() {
  await follow().catch(() => {});
  $("live").classList.remove("on");
  setText($("live"), "disconnected, retrying");
  if ($("access").hidden) setTimeout(watch, RETRY_MS);
}

$("access").querySelector("form").onsubmit = event => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("access").hidden = true;
  watch();
};
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && fleet) draw(true);
});
watch();
