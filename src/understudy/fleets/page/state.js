// The fleet as the server last described it: a full state first, then what changes each second.

const ROWS = 300, MARKS = 60, DECISIONS = 14, SERVING = new Set(["ready", "slow"]);

export class Fleet {
  constructor(full) {
    this.workers = full.workers;
    this.ports = full.ports;
    this.pools = full.pools;
    this.columns = full.history.columns;
    this.rows = full.history.rows;
    this.marks = full.marks;
    this.faults = full.faults;
    this.decisions = full.decisions.slice(-DECISIONS);
    this.touched = new Set();
    this.urgent = new Set();
    this.now(full);
  }

  now(state) {
    this.time = state.time;
    this.routing = state.routing;
    this.queued = state.queued;
    this.late = state.late_ms;
    this.summary = state.summary;
  }

  /**
   * Apply the changes of a second. `touched` collects the workers that changed since the page emptied it, `urgent` those
   * of them that began or ceased to be dead, paused, starting, draining or faulty.
   */
  apply(changes) {
    this.now(changes);
    for (const [name, [where, values]] of Object.entries(changes.changed)) {
      const column = this.workers[name] ??= Array(this.size).fill(0), isUrgent = name === "faults" || name === "restarted";
      where.forEach((worker, i) => {
        this.touched.add(worker);
        if (isUrgent || name === "state" && !(SERVING.has(column[worker]) && SERVING.has(values[i]))) this.urgent.add(worker);
        column[worker] = values[i];
      });
    }
    this.rows.push(changes.row);
    if (this.rows.length > ROWS) this.rows.shift();
    if (changes.marks) this.marks = [...this.marks, ...changes.marks].slice(-MARKS);
    if (changes.faults) this.faults = changes.faults;
    const seen = this.decisions.at(-1)?.n ?? 0;
    const fresh = (changes.decisions ?? []).filter(one => one.n > seen);
    if (fresh.length) this.decisions = [...this.decisions, ...fresh].slice(-DECISIONS);
  }

  get size() { return this.ports.length; }

  sum(name) { return this.workers[name].reduce((a, b) => a + b, 0); }

  /** Workers by state, for states other than ready. */
  byState() {
    const found = new Map();
    this.workers.state.forEach((state, worker) => {
      if (state !== "ready") found.set(state, [...(found.get(state) ?? []), worker]);
    });
    return found;
  }
}
