// What the server does now, from /v1/status: asked once a second while somebody looks.

import { ask, get } from "./api.js";
import { countOf } from "./charts.js";
import { $, bytes, count, empty, h, percent, words } from "./dom.js";
import { caches, engine, memory, requests, waits } from "./panels.js";

const EVERY_MS = 1000;

let timer = null;
const cancelled = new Set();

export function startNow() {
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : resume()));
}

export function showNow(isShown) {
  stop();
  if (isShown) refresh();
}

function stop() {
  clearTimeout(timer);
  timer = null;
}

const resume = () => !$("now").closest(".view").hidden && !timer && refresh();

async function refresh() {
  let pause = EVERY_MS;
  try {
    draw(await get("v1/status"));
  } catch (error) {
    pause = 5 * EVERY_MS;
    const text =
      error.status === 403
        ? "Your key may ask questions, but not see this. Use one with admin = true."
        : error.message;
    $("now").replaceChildren(empty("Nothing to show", text));
    if (error.status === 401 || error.status === 403) return;
  }
  stop();
  if (!document.hidden && !$("now").closest(".view").hidden) timer = setTimeout(refresh, pause);
}

/** Cards are made once and filled again, so that nothing jumps and the focus stays. */
function draw(status) {
  const root = $("now");
  if (!root.querySelector(".cards"))
    root.replaceChildren(
      h(
        "div",
        { class: "cards" },
        ["requests", "memory", "first", "between", "caches", "engine"].map((name) =>
          h("section", { class: `card ${name}` }),
        ),
      ),
    );
  const stats = status.engine.stats;
  put(
    "requests",
    "Requests",
    `${status.requests.in_flight} of ${status.requests.limit} places`,
    requests(status.requests.list, cancelled, cancel),
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
  put("engine", "Engine", words(status.engine.state), engine(status, stats));
}

function put(name, title, aside, content) {
  const card = document.querySelector(`#now .${name}`);
  if (card.matches(":active")) return; // a button that is replaced while it is pressed is never clicked
  const signature = JSON.stringify([aside, content.key]);
  if (card.dataset.key === signature && content.key !== undefined) return;
  card.dataset.key = signature;
  const focused = card.contains(document.activeElement) ? document.activeElement.dataset.id : null;
  card.replaceChildren(h("header", {}, h("h2", {}, title), h("p", {}, aside)), ...content.elements);
  if (focused) card.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
}

async function cancel(id) {
  cancelled.add(id);
  try {
    await ask(`v1/requests/${encodeURIComponent(id)}/cancel`, { method: "POST" });
  } catch {
    cancelled.delete(id); // it has ended meanwhile, or stays: the next reading shows which
  }
  stop();
  refresh();
}
