// The Node libraries in the comparison; the commands and marks of python_peers.py and marks.py.
//
//     node node_peers.mjs PEER setup | fill COUNT | trickle COUNT INTERVAL_MS | work TASKS
//
// COMPARE_MODULES is the directory that holds node_modules.
import { writeSync } from "node:fs";
import { createRequire } from "node:module";
import { setTimeout as pause } from "node:timers/promises";

const load = createRequire(`${process.env.COMPARE_MODULES}/package.json`);
const connectionString = process.env.DATABASE_URL;
const QUEUE = "compared";
const CHUNK = 5000;
const now = () => process.hrtime.bigint();

// graphile-worker. With its local queue it claims ahead and completes in batches.
function graphile(local) {
  const { run, makeWorkerUtils, Logger } = load("graphile-worker");
  const logger = new Logger(() => () => {});
  const utils = () => makeWorkerUtils({ connectionString, logger });
  return {
    setup: async () => (await utils()).migrate(),
    fill: async (numbers) => (await utils()).addJobs(numbers.map((n) => ({ identifier: QUEUE, payload: { n } }))),
    putting: async () => {
      const made = await utils();
      return (n) => made.addJob(QUEUE, { n });
    },
    work: async (tasks, handle) => {
      const batches = local ? { localQueue: { size: tasks * 10 }, completeJobBatchDelay: 0, failJobBatchDelay: 0 } : {};
      await run({
        logger,
        noHandleSignals: true,
        taskList: { [QUEUE]: async (payload) => handle(payload.n) },
        preset: { worker: { connectionString, concurrentJobs: tasks, maxPoolSize: tasks + 2, ...batches } },
      });
    },
  };
}

// pg-boss. Its work() takes one batch an interval of half a second or more, so that the rates are those of its public fetch and
// complete in a loop: `batch` jobs at a time (as many as tasks, if not said), run by as many tasks, completed by one call.
function pgboss(batch) {
  const loaded = load("pg-boss");
  const PgBoss = loaded.PgBoss ?? loaded.default ?? loaded;
  const started = async () => {
    const boss = new PgBoss({ connectionString, supervise: false, schedule: false });
    boss.on("error", (error) => console.error(error));
    await boss.start();
    return boss;
  };
  return {
    setup: async () => (await started()).createQueue(QUEUE),
    fill: async (numbers) => {
      const jobs = numbers.map((n) => ({ name: QUEUE, data: { n } }));
      const boss = await started();
      // Up to version 10 the queue's name is part of each job, later an argument.
      await (boss.insert.length > 1 ? boss.insert(QUEUE, jobs) : boss.insert(jobs));
    },
    putting: async () => {
      const boss = await started();
      return (n) => boss.send(QUEUE, { n });
    },
    work: async (tasks, handle) => {
      const boss = await started();
      if (process.env.COMPARE_WORKLOAD === "latency") {
        await boss.work(QUEUE, { batchSize: tasks, pollingIntervalSeconds: 0.5 }, (jobs) =>
          Promise.all(jobs.map((job) => handle(job.data.n))),
        );
        return;
      }
      for (;;) {
        const jobs = await boss.fetch(QUEUE, { batchSize: batch ?? tasks });
        if (!jobs.length) {
          await pause(500);
          continue;
        }
        const waiting = [...jobs];
        const runner = async () => {
          for (let job = waiting.pop(); job; job = waiting.pop()) await handle(job.data.n);
        };
        await Promise.all(Array.from({ length: tasks }, runner));
        await boss.complete(QUEUE, jobs.map((job) => job.id));
      }
    },
  };
}

const PEERS = {
  graphile: () => graphile(false),
  "graphile-local": () => graphile(true),
  "pg-boss": () => pgboss(),
  "pg-boss-batch": () => pgboss(300),
};

function handler(tasks) {
  const pipe = Number(process.env.COMPARE_PIPE);
  const expected = Number(process.env.COMPARE_JOBS);
  const workload = process.env.COMPARE_WORKLOAD;
  const say = (line) => writeSync(pipe, line + "\n");
  let pool = null;
  if (workload === "effect") pool = new (load("pg").Pool)({ connectionString, max: tasks, min: tasks });
  let started = 0;
  let ended = 0;
  return async (number) => {
    if (workload === "latency") say(`start ${number} ${now()}`);
    else if (started === 0) say(`first ${now()}`);
    started += 1;
    if (pool) await pool.query({ name: "effect", text: "INSERT INTO effects (number) VALUES ($1)", values: [number] });
    ended += 1;
    if (ended === expected) say(`handled ${now()}`);
  };
}

const [name, command, first, second] = process.argv.slice(2);
const peer = PEERS[name]();
if (command === "setup") await peer.setup();
if (command === "fill") {
  for (let start = 0; start < Number(first); start += CHUNK) {
    await peer.fill(Array.from({ length: Math.min(CHUNK, Number(first) - start) }, (_, place) => start + place));
  }
}
if (command === "trickle") {
  const put = await peer.putting();
  for (let number = 0; number < Number(first); number++) {
    await pause(Number(second));
    await put(number);
    console.log(`${number} ${now()}`);
  }
}
if (command === "work") await peer.work(Number(first), handler(Number(first)));
else process.exit(0);
