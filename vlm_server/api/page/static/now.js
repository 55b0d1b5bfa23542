// What the server does now, from /v1/status: asked once a second while somebody looks.

import { adminProblem, ask, get } from "./api.js";
import { countOf } from "./charts.js";
import { $, bytes, count, empty, h, percent, refill, whileSeen } from "./dom.js";
import { caches, engine, memory, requests, waits } from "./panels.js";
import { offer, stateWords } from "./serving.js";

const EVERY_MS = 1000;

const cancelled = new Set();

export const showNow = whileSeen("now", refresh);

async function refresh() {
  const model = $("now-model").value;
  try {
    draw(await get(model ? `v1/status?model=${encodeURIComponent(model)}` : "v1/status"));
    return EVERY_MS;
  } catch (error) {
    $("now").replaceChildren(empty("Nothing to show", adminProblem(error)));
    $("now-model").replaceChildren(); // the one that was chosen may be no more
    return error.status === 401 || error.status === 403 ? null : 5 * EVERY_MS;
  }
}

/** Cards are made once and filled again, so that nothing jumps and the focus stays. */
function draw(status) {
  const root = $("now");
  if (!root.querySelector(".cards"))
    root.replaceChildren(
      h(
        "div.cards",
        ["requests", "memory", "first", "between", "caches", "engine"].map((name) =>
          h("section", { class: `card ${name}` }),
        ),
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
  put("memory", "Memory", stats ? `${bytes(stats.memory.active_bytes)} in use` : "", memory(status, stats));
  const { time_to_first_token_seconds: first, inter_token_latency_seconds: between } = status.latencies;
  put(
    "first",
    "Time to first token",
    countOf(first) ? `${count(countOf(first))} answers` : "",
    waits(first, "Time to first token", "Ask something, and it shows here."),
  );
  put(
    "between",
    "Between tokens",
    countOf(between) ? `${count(countOf(between))} tokens` : "",
    waits(between, "Time between tokens", "Appears with the second token."),
  );
  put(
    "caches",
    "Caches",
    stats?.prompt_tokens ? `${percent(stats.cached_tokens, stats.prompt_tokens)} of prompt tokens` : "",
    caches(stats),
  );
  put("engine", "Engine", stateWords(status.engine.state), engine(status, stats));
}

function put(name, title, aside, content) {
  const card = document.querySelector(`#now .${name}`);
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
