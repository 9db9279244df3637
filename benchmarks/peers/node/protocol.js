// What the harness expects of a peer's program; see ../__init__.py.
import readline from "node:readline";

export const TEXT = "x".repeat(170);
export const payload = (number) => ({ number, text: TEXT });

const lines = readline.createInterface({ input: process.stdin });
const waiting = [];
lines.on("line", () => waiting.shift()?.());

export function ready() {
  return new Promise((resolve) => {
    waiting.push(resolve);
    process.stdout.write("ready\n");
  });
}

export class Clock {
  constructor() {
    this.cpu = process.cpuUsage();
    this.began = process.hrtime.bigint();
  }

  done(more = {}) {
    const seconds = Number(process.hrtime.bigint() - this.began) / 1e9;
    const { user, system } = process.cpuUsage(this.cpu);
    process.stdout.write(JSON.stringify({ seconds, client_seconds: (user + system) / 1e6, ...more }) + "\n");
  }
}

export async function until(condition, milliseconds = 4) {
  while (!(await condition())) await new Promise((resolve) => setTimeout(resolve, milliseconds));
}

// Sends at a steady rate; `send(number)` resolves when committed. Returns the latencies' figures.
export async function latencies({ rate, seconds, send, started }) {
  const committed = new Map();
  const begin = performance.now();
  const count = rate * seconds;
  for (let number = 0; number < count; number++) {
    const wait = begin + (number * 1000) / rate - performance.now();
    if (wait > 0) await new Promise((resolve) => setTimeout(resolve, wait));
    await send(number);
    committed.set(number, performance.now());
  }
  await until(() => started.size >= count);
  const all = [...committed].slice(rate).map(([number, at]) => Math.max(0, started.get(number) - at));
  all.sort((a, b) => a - b);
  const at = (share) => all[Math.min(all.length - 1, Math.floor(all.length * share))];
  return { p50_ms: at(0.5), p99_ms: at(0.99), jobs: count };
}
