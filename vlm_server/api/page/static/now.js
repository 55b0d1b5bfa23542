// What the server does now, from /v1/status: asked once a second while somebody looks.

import { adminProblem, ask, get } from "./api.js";
import { $, count, empty, h, memorySize, percent, refill, whileSeen } from "./dom.js";
import { ended } from "./ended.js";
import { followLog, logCard } from "./log.js";
import { caches, engine, memory, requests, speed, times } from "./panels.js";
import { offer, stateWords } from "./serving.js";

const EVERY_MS = 1000;

const RATE_SECONDS = 5;

const cancelled = new Set();
/** {model, pid, at, written, read} of the last seconds: the counters of one engine. */
let counts = [];

export const showNow = whileSeen("now", refresh);

async function refresh() {
  const model = $("now-model").value;
  try {
    draw(await get(model ? `v1/status?model=${encodeURIComponent(model)}` : "v1/status"));
    await followLog();
    return EVERY_MS;
  } catch (error) {
    $("now-body").replaceChildren(empty("Nothing to show", adminProblem(error)));
    $("now-model").replaceChildren(); // the one that was chosen may be no more
    return error.status === 401 || error.status === 403 ? null : 5 * EVERY_MS;
  }
}

/** Cards are made once and filled again, so that nothing jumps and the focus stays. */
function draw(status) {
  const root = $("now-body");
  if (!root.querySelector(".cards"))
    root.replaceChildren(
      h(
        "div.cards",
        ["requests", "speed", "memory", "last", "delays", "caches", "engine"].map((name) =>
          h("section", { class: `card ${name}` }),
        ),
        logCard(),
      ),
    );
  offer(
    $("now-model"),
    status.models.map(({ name }) => name),
  );
  const stats = status.engine.stats;
  put(
    "requests",
    "Requests",
    `${status.requests.in_flight} of ${status.requests.limit} places`,
    requests(status.requests.list, cancelled, cancel, status.models.length > 1),
  );
  put("speed", "Speed", "At this moment", speed(status, rates(status, stats)));
  put("memory", "Memory", stats ? `${memorySize(stats.memory.active_bytes)} in use` : "", memory(status, stats));
  put("last", "Last requests", "", ended(status.requests.ended));
  const answers = status.latencies.e2e_request_latency_seconds.percentiles;
  put("delays", "Times", answers ? (answers.count === 1 ? "one answer" : `the last ${count(answers.count)} answers`) : "", times(status.latencies));
  put(
    "caches",
    "Caches",
    stats?.prompt_tokens ? `${percent(stats.cached_tokens, stats.prompt_tokens)} of prompt tokens` : "",
    caches(stats),
  );
  put("engine", "Engine", stateWords(status.engine.state), engine(status, stats));
}

/** Tokens per second over the last seconds, {written, read}; null before the engine was looked at twice. */
function rates({ model, time: at, engine: { pid } }, stats) {
  const count = { model, pid, at, written: stats?.generated_tokens ?? 0, read: stats?.prompt_tokens ?? 0 };
  counts = [...counts.filter((one) => one.model === model && one.pid === pid && at - one.at < RATE_SECONDS && one.at < at), count];
  const [first] = counts;
  const rate = (field) => (first === count ? null : (count[field] - first[field]) / (at - first.at));
  return { written: rate("written"), read: rate("read") };
}

function put(name, title, aside, content) {
  const card = document.querySelector(`#now section.${name}`);
  const signature = JSON.stringify([aside, content.key]);
  if (card.dataset.key === signature && content.key !== undefined) return;
  if (refill(card, [h("header", h("h2", title), h("p", aside)), ...content.elements]))
    card.dataset.key = signature;
}

async function cancel(id) {
  cancelled.add(id);
  try {
    await ask(`v1/requests/${encodeURIComponent(id)}/cancel`, { method: "POST" });
  } catch {
    cancelled.delete(id); // it has ended meanwhile, or stays: the next reading shows which
  }
  showNow();
}

$("now-model").addEventListener("change", showNow);
