// A producer, a worker and a watcher in Node: over HTTP with fetch, and by SQL with pg where it is installed.
import { createRequire } from "node:module";
import { randomUUID } from "node:crypto";

const [api, dsn, modules] = process.argv.slice(2);
const json = { "Content-Type": "application/json" };
const call = async (method, path, body, headers = {}) => {
  const answer = await fetch(api + path, { method, headers: { ...json, ...headers }, body: body && JSON.stringify(body) });
  return { status: answer.status, body: await answer.json() };
};
const check = (holds, what) => {
  if (!holds) throw new Error(`not so: ${what}`);
};

// Produce.
const made = await call("POST", "/jobs", { type: "add", queue: "node", payload: { a: 2, b: 3 } }, { "Idempotency-Key": "n-1" });
check(made.status === 201, `made, ${made.status}`);
const again = await call("POST", "/jobs", { type: "add", queue: "node", payload: { b: 3, a: 2 } }, { "Idempotency-Key": "n-1" });
check(again.status === 200 && again.body.job_id === made.body.job_id, "the key is known");
const wrong = await call("POST", "/jobs", { type: "" });
check(wrong.status === 422 && wrong.body.errors[0].pointer === "/type", "a problem says where");

// Watch.
const seen = [];
const watching = (async () => {
  const stream = await fetch(`${api}/jobs/${made.body.job_id}/events`);
  let text = "";
  for await (const chunk of stream.body) text += Buffer.from(chunk).toString();
  for (const line of text.split("\n")) if (line.startsWith("event: ")) seen.push(line.slice(7));
})();
await new Promise((resolve) => setTimeout(resolve, 500));

// Work.
const worker_id = randomUUID();
const { body: claimed } = await call("POST", "/leases/claim", { worker_id, queues: ["node"], wait_ms: 5000 });
check(claimed.jobs.length === 1 && claimed.jobs[0].payload.b === 3, "a job was claimed");
const [{ job_id, attempts: attempt, payload }] = claimed.jobs;
const { body: done } = await call("POST", "/leases/complete", {
  worker_id,
  jobs: [{ job_id, attempt, result: { sum: payload.a + payload.b } }],
});
check(done.accepted[0] === job_id, "it was completed");
const { body: result } = await call("GET", `/jobs/${job_id}/result?wait=10`);
check(result.status === "completed" && result.result.sum === 5, "the result is there");
await watching;
check(seen.join() === "job.queued,job.started,job.completed", `what was seen: ${seen}`);

// By SQL.
if (modules) {
  const pg = createRequire(`${modules}/`)("pg");
  const client = new pg.Client({ connectionString: dsn });
  await client.connect();
  await client.query("begin");
  await client.query("insert into pgqueue.jobs (job_type, queue, payload) values ($1, 'node', $2)", ["add", { a: 1, b: 1 }]);
  await client.query("rollback");
  const { rows: [inserted] } = await client.query(
    "insert into pgqueue.jobs (job_type, queue, payload) values ($1, 'node', $2) returning job_id", ["add", { a: 4, b: 4 }]);
  const { rows } = await client.query("select * from pgqueue.claim($1, array['node'], 10)", [worker_id]);
  check(rows.length === 1 && rows[0].job_id === inserted.job_id, "only what was committed is claimed");
  await client.query("select pgqueue.complete($1, array[$2]::uuid[], array[$3]::int[], array[$4]::jsonb[])",
    [worker_id, rows[0].job_id, rows[0].attempts, JSON.stringify({ sum: 8 })]);
  const { body: bySql } = await call("GET", `/jobs/${inserted.job_id}/result`);
  check(bySql.result.sum === 8, "SQL and HTTP tell the same");
  let refused;
  await client.query("insert into pgqueue.jobs (job_type, priority) values ('a', 9)").catch((error) => (refused = error));
  check(refused?.code === "23514" && /priority/.test(refused.message), "an illegal value is named");
  await client.end();
}
console.log("well");
