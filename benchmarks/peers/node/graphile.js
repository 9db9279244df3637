// Graphile Worker. Settings and reasons: ../README.md
import { Logger, makeWorkerUtils, run, runMigrations } from "graphile-worker";
import pg from "pg";

import { Clock, latencies, payload, ready, until } from "./protocol.js";

const [command, dsn, first, second] = process.argv.slice(2);
const logger = new Logger(() => () => {});

const preset = (concurrentJobs, refetchDelay, pollInterval) => ({
  worker: {
    connectionString: dsn,
    concurrentJobs,
    maxPoolSize: 10,
    pollInterval,
    preparedStatements: true,
    localQueue: { size: 500, refetchDelay: { durationMs: refetchDelay } },
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
    logger,
  },
});

// One connection (the other one listens), so that a job's end is sent before the next job is asked for: it is not waited
// for, and on a connection of its own it comes later; the queue is locked then, and is polled for.
function oneByOne({ worker: { localQueue, completeJobBatchDelay, failJobBatchDelay, ...worker } }) {
  return { worker: { ...worker, maxPoolSize: 2 } };
}

async function drain(jobs, chosen) {
  const pool = new pg.Pool({ connectionString: dsn, max: 1 });
  await pool.query("SELECT 1");
  let handled = 0;
  await ready();
  const clock = new Clock();
  const runner = await run({
    preset: chosen,
    noHandleSignals: true,
    taskList: {
      noop: () => {
        handled++;
      },
    },
  });
  await until(() => handled >= jobs);
  await until(async () => {
    const { rows } = await pool.query("SELECT NOT EXISTS (SELECT FROM graphile_worker._private_jobs) AS empty");
    return rows[0].empty;
  });
  clock.done();
  await runner.stop();
  await pool.end();
}

switch (command) {
  case "install":
    await runMigrations({ connectionString: dsn });
    break;
  case "seed": {
    const groups = Number(second);
    const utils = await makeWorkerUtils({ connectionString: dsn });
    for (let start = 0; start < Number(first); start += 1000) {
      const jobs = [];
      for (let n = start; n < Math.min(start + 1000, Number(first)); n++) {
        jobs.push({ identifier: "noop", payload: payload(n), queueName: groups ? `g${n % groups}` : undefined });
      }
      await utils.addJobs(jobs);
    }
    await utils.release();
    break;
  }
  case "drain":
    await drain(Number(first), preset(24, 10, 2000));
    break;
  case "groups":
    await drain(Number(first), preset(100, 0, 50));
    break;
  case "hot":
    await drain(Number(first), oneByOne(preset(1, 0, 50)));
    break;
  case "enqueue": {
    const pool = new pg.Pool({ connectionString: dsn, max: 1 });
    const utils = await makeWorkerUtils({ pgPool: pool });
    await ready();
    const clock = new Clock();
    for (let number = 0; number < Number(first); number++) {
      await utils.addJob("noop", payload(number));
    }
    clock.done();
    await utils.release();
    break;
  }
  case "bulk": {
    const pool = new pg.Pool({ connectionString: dsn, max: 1 });
    const utils = await makeWorkerUtils({ pgPool: pool });
    await ready();
    const clock = new Clock();
    for (let start = 0; start < Number(first); start += 1000) {
      const jobs = [];
      for (let n = start; n < start + 1000; n++) jobs.push({ identifier: "noop", payload: payload(n) });
      await utils.addJobs(jobs);
    }
    clock.done();
    await utils.release();
    break;
  }
  case "latency": {
    const utils = await makeWorkerUtils({ connectionString: dsn });
    const started = new Map();
    // No local queue: it showed no difference here, and a job goes straight to an idle worker.
    const { localQueue, ...worker } = preset(24, 10, 2000).worker;
    const runner = await run({
      preset: { worker },
      noHandleSignals: true,
      taskList: {
        noop: ({ number }) => {
          started.set(number, performance.now());
        },
      },
    });
    await ready();
    const clock = new Clock();
    const found = await latencies({
      rate: Number(first),
      seconds: Number(second),
      started,
      send: (number) => utils.addJob("noop", payload(number)),
    });
    clock.done(found);
    await runner.stop();
    await utils.release();
    break;
  }
  default:
    throw new Error(`unknown command ${command}`);
}
process.exit(0);
