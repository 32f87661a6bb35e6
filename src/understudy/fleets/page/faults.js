// Faults: the active ones with a button that ends them, and a form that sets one.

import {$, add, el, ms, ranges, readWorkers, seconds} from "./format.js";

const number = (name, label, value) => ({name, label, value});
const KINDS = {
  kill: {about: "The engine dies: its requests fail and its cache is lost. It restarts after the given seconds.", fields: []},
  slow: {about: "All that is sent to clients arrives later.", fields: [number("delay_ms", "delay, ms", 500)]},
  delay: {about: "Requests are held before they reach the engine.", fields: [number("delay_ms", "delay, ms", 1000)]},
  reject: {about: "A share of the requests gets an error.", fields: [number("status", "status", 503), number("rate", "share, 0–1", 1)]},
  drop: {about: "Connections are cut.", fields: [number("after_ms", "after, ms", 50), number("rate", "share, 0–1", 1)]},
  stop_events: {about: "No KV events are published.", fields: []},
  lose_events: {about: "KV event batches are numbered and not sent.", fields: [number("count", "batches", 10)], instant: true},
  fail_reads: {about: "The next reads of a prefill worker's blocks fail; for decode workers.", fields: [number("count", "reads", 1)], instant: true},
  slow_link: {about: "Links to the host tier get slower; needs tiers.", fields: [number("factor", "times slower", 10)]},
};
const DURATIONS = {kill: 30};

export class Faults {
  constructor(ask) {
    this.ask = ask;
    const kind = $("f-kind");
    kind.replaceChildren(...Object.keys(KINDS).map(name => {
      const option = el("option", "", name.replace("_", " "));
      option.value = name;
      return option;
    }));
    kind.onchange = () => this.choose(kind.value);
    $("fault").onsubmit = event => { event.preventDefault(); this.set(); };
    this.choose("kill");
  }

  choose(kind) {
    const {about, fields, instant} = KINDS[kind];
    $("f-about").textContent = about;
    $("f-duration").closest("label").hidden = !!instant;
    $("f-duration").value = DURATIONS[kind] ?? "";
    $("f-workers").placeholder = kind === "kill" ? "3, 17-20" : "all";
    $("f-more").replaceChildren(...fields.map(field => {
      const input = el("input");
      Object.assign(input, {type: "number", min: 0, step: "any", value: field.value, required: true, name: field.name});
      return add(el("label", "field", field.label + " "), input);
    }));
    $("f-more").hidden = !fields.length;
  }

  /** Put the chosen worker into the form, unless its user wrote something else. */
  suggest(worker) {
    const input = $("f-workers"), text = worker < 0 ? "" : String(worker);
    if (input.value === (this.suggested ?? "")) input.value = text;
    this.suggested = text;
  }

  async set() {
    const kind = $("f-kind").value, order = {kind};
    try {
      const workers = readWorkers($("f-workers").value);
      if (workers) order.workers = workers;
    } catch (error) { $("f-why").textContent = error.message; return; }
    for (const input of $("f-more").querySelectorAll("input")) order[input.name] = +input.value;
    const duration = $("f-duration");
    if (duration.value !== "" && !KINDS[kind].instant) order.duration_s = +duration.value;
    await this.send(order);
  }

  async send(order) {
    $("f-set").disabled = true;
    try {
      await this.ask("/admin/fault", order);
      $("f-why").textContent = "";
    } catch (error) {
      $("f-why").textContent = error.message;
    } finally {
      $("f-set").disabled = false;
    }
  }

  /** List the active faults. The list is rebuilt when it changes; the seconds left count down. */
  show(fleet) {
    if (fleet.faults !== this.faults) {
      this.faults = fleet.faults;
      this.clocks = [];
      $("faults").replaceChildren(...fleet.faults.map(fault => this.row(fault, fleet)));
    }
    for (const {node, until} of this.clocks) node.textContent = seconds(Math.max(0, until - fleet.time)) + " left";
  }

  row(fault, fleet) {
    const all = fault.workers.length === fleet.size && fleet.size > 1;
    const who = all ? "all workers" : (fault.workers.length > 1 ? "workers " : "worker ") + ranges(fault.workers);
    const left = el("small"), button = el("button", "", "End");
    button.type = "button";
    button.onclick = () => { button.disabled = true; this.send({kind: "none", only: fault.kind, workers: fault.workers}); };
    if (fault.until) this.clocks.push({node: left, until: fault.until});
    return add(el("li"), add(el("span"), el("b", "", describe(fault)), " " + who), left, fault.planned ? el("small", "", "planned") : button);
  }
}

function describe(fault) {
  const kind = fault.kind.replace("_", " "), of = fault.planned ? "" : " of requests";
  const share = fault.rate < 1 ? ` (${Math.round(fault.rate * 100)} %${of})` : "";
  if ("delay_ms" in fault) return `${kind} by ${ms(fault.delay_ms)}${share}`;
  if ("after_ms" in fault) return `${kind} after ${ms(fault.after_ms)}${share}`;
  if ("status" in fault) return `${kind} with ${fault.status}${share}`;
  if ("factor" in fault) return `${fault.tier ? fault.tier + " links" : "steps"} ${fault.factor}× slower`;
  if ("rate" in fault) return `${kind}${fault.tier ? " from " + fault.tier : ""}${share}`;
  return "count" in fault ? `${kind} (${fault.count})` : kind;
}
