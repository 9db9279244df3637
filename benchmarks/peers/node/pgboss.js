// pg-boss. Settings and reasons: ../README.md
import pg from "pg";
import { PgBoss } from "pg-boss";

import { Clock, TEXT, latencies, payload, ready, until } from "./protocol.js";

const [command, dsn, first, second] = process.argv.slice(2);
const QUEUE = "noop";

async function boss(options = {}) {
  const made = new PgBoss({ connectionString: dsn, max: 10, supervise: false, schedule: false, ...options });
  made.on("error", (error) => console.error(error));
  await made.start();
  return made;
}

async function drain(jobs, options) {
  const made = await boss();
  const pool = new pg.Pool({ connectionString: dsn, max: 1 });
  await pool.query("SELECT 1");
  let handled = 0;
  await ready();
  const clock = new Clock();
  await made.work(QUEUE, { pollingIntervalSeconds: 0.5, burstWhenBatchFull: true, ...options }, async (batch) => {
    handled += batch.length;
  });
  await until(() => handled >= jobs);
  await until(async () => {
    const { rows } = await pool.query(
      "SELECT NOT EXISTS (SELECT FROM pgboss.job WHERE name = $1 AND state < 'completed') AS empty",
      [QUEUE],
    );
    return rows[0].empty;
  });
  clock.done();
  await pool.end();
}

// work() would wait for its polling interval after each job: of a key it fetches one, which fills no batch.
async function oneByOne(jobs) {
  const made = await boss();
  await ready();
  const clock = new Clock();
  for (let handled = 0; handled < jobs; handled++) {
    const [job] = await made.fetch(QUEUE);
    await made.complete(QUEUE, job.id);
  }
  clock.done();
}

switch (command) {
  case "install": {
    const made = await boss();
    await made.stop({ graceful: false });
    break;
  }
  case "seed": {
    const groups = Number(second);
    const made = await boss();
    await made.createQueue(QUEUE, { policy: groups ? "key_strict_fifo" : "standard" });
    for (let start = 0; start < Number(first); start += 1000) {
      const jobs = [];
      for (let n = start; n < Math.min(start + 1000, Number(first)); n++) {
        jobs.push(groups ? { data: payload(n), singletonKey: `g${n % groups}` } : { data: payload(n) });
      }
      await made.insert(QUEUE, jobs);
    }
    await made.stop({ graceful: false });
    break;
  }
  case "drain":
    await drain(Number(first), { batchSize: 1000, localConcurrency: 4 });
    break;
  case "groups":
    await drain(Number(first), { batchSize: 500, localConcurrency: 2 });
    break;
  case "hot":
    await oneByOne(Number(first));
    break;
  case "enqueue":
  case "bulk": {
    const made = await boss({ max: 1 });
    await made.createQueue(QUEUE);
    await ready();
    const clock = new Clock();
    if (command === "enqueue") {
      for (let n = 0; n < Number(first); n++) await made.send(QUEUE, payload(n));
    } else {
      for (let start = 0; start < Number(first); start += 1000) {
        await made.insert(QUEUE, Array.from({ length: 1000 }, (_, n) => ({ data: payload(start + n) })));
      }
    }
    clock.done();
    break;
  }
  case "latency": {
    const made = await boss({ useListenNotify: true });
    await made.createQueue(QUEUE, { notify: true });
    const started = new Map();
    await made.work(QUEUE, { batchSize: 10, pollingIntervalSeconds: 0.5 }, async (batch) => {
      for (const job of batch) started.set(job.data.number, performance.now());
    });
    await ready();
    const clock = new Clock();
    const send = (number) => made.send(QUEUE, { number, text: TEXT });
    clock.done(await latencies({ rate: Number(first), seconds: Number(second), started, send }));
    break;
  }
  default:
    throw new Error(`unknown command ${command}`);
}
process.exit(0);
