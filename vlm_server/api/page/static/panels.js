// What the cards of Now show: {elements}, and a {key} that changes with them where they seldom do.

import { memoryChart, meter, sparkline, stack } from "./charts.js";
import { count, empty, fileSize, h, memorySize, pairs, percent, seconds, short, words } from "./dom.js";
import { progressBar } from "./serving.js";

const HOUR = 3600;

const STATES = {
  reading: "Reading the request",
  sent: "On its way",
  waiting_for_model: "Waiting for its model",
  waiting: "Waiting",
  preparing: "Preparing",
  waiting_for_memory: "Waiting for memory",
  reading_disk: "Reading the disk cache",
  encoding: "Looking at pictures",
  prefill: "Reading the prompt",
  decode: "Answering",
};
const CLEARS = {
  clear_idle: "idle",
  clear_guard: "before a picture",
  clear_admission: "before a request",
  clear_chunk: "between chunks",
  clear_prefill: "after a prompt",
  clear_decode: "long answer",
  clear_others: "another program",
  clear_failure: "out of memory",
};
const CACHES = {
  prefix: "Prompts",
  encoder: "Encoded pictures",
  pixel: "Pixels",
  token_layout: "Layouts",
  tile: "Picture tiles",
  vector: "Vectors",
  disk: "Disk",
};

/** `cancelled` are ids of those that `cancel` was called with. */
export function requests(list, cancelled, cancel, areSeveral) {
  if (!list.length)
    return {
      key: "none",
      elements: [empty("Nothing is running", "Requests show here while they are answered.")],
    };
  return {
    elements: [
      h(
        "ul.rows",
        list.map((one) => request(one, cancelled.has(one.id), cancel, areSeveral)),
      ),
    ],
  };
}

function request(told, isCancelled, cancel, areSeveral) {
  const { id, route, model, key, state, done, total, images, videos, seconds: age } = told;
  const number = (many, word) => many && `${many} ${word}${many === 1 ? "" : "s"}`;
  const media = [number(images, "picture"), number(videos, "video")];
  const about = [areSeveral && model, key, route, ...media, seconds(age)].filter(Boolean).join(" · ");
  const progress = total
    ? `${percent(done, total)}: ${count(done)} of ${state === "decode" ? "at most " : ""}${count(total)} tokens`
    : "";
  return h(
    "li",
    h(
      "div",
      h("p", h("b", STATES[state] ?? words(state)), " ", h("span.muted", progress)),
      h("p.muted.small", about),
      meter(total ? done / total : 0, progress || "Not begun"),
    ),
    h(
      "button",
      {
        class: "quiet small",
        disabled: isCancelled,
        "data-id": id,
        "aria-label": `Cancel the request of ${seconds(age)} ago`,
        onclick: () => cancel(id),
      },
      isCancelled ? "Cancelling" : "Cancel",
    ),
  );
}

const SAMPLE = 10; // seconds
const NUM_SAMPLES = 60;

/** Tokens per second: `rates` of this moment, {written, read}, null if not known yet; and a line of the last ten minutes. */
export function speed({ time, engine }, rates) {
  const shown = (rate) => (rate === null ? "–" : `${rate < 10 ? +rate.toFixed(1) : count(rate)} tokens/s`);
  const values = writtenPerSecond(engine.memory_samples, time);
  const highest = `highest ${count(Math.max(...values))} tokens/s`;
  const figures = [["Answers", shown(rates.written)], ["Prompts", shown(rates.read)]];
  return {
    elements: [
      h(
        "div.speeds",
        pairs("figures", figures),
        sparkline(values, `Tokens of answers over the last ten minutes: ${highest}`, ["10 min ago", highest, "now"]),
      ),
    ],
  };
}

/** Tokens of answers per second in each ten seconds up to `now`. An engine that was restarted counts anew. */
function writtenPerSecond(samples, now) {
  const end = Math.floor(now / SAMPLE) * SAMPLE;
  const values = Array(NUM_SAMPLES).fill(0);
  samples.forEach(({ at, generated_tokens: tokens }, index) => {
    const before = samples[index - 1]?.generated_tokens ?? tokens;
    const place = NUM_SAMPLES - 1 - (end - at) / SAMPLE;
    if (place in values) values[place] = (tokens - (before > tokens ? 0 : before)) / (at === end ? Math.max(1, now - at) : SAMPLE);
  });
  return values;
}

export function memory(status, stats) {
  if (!stats)
    return { key: "none", elements: [empty("No figures yet", "The engine tells them once it runs.")] };
  const { memory: now } = stats;
  const samples = status.engine.memory_samples.filter(({ at }) => at <= status.time);
  const known = samples.length ? status.time - samples[0].at : 0;
  const span = Math.min(HOUR, Math.max(300, known));
  const chart = memoryChart(samples, {
    now: status.time,
    span,
    limit: now.limit_bytes,
    series: [
      ["footprint_bytes", "footprint"],
      ["active_bytes", "active"],
    ],
    label:
      `Memory over the last ${seconds(span)}: ${memorySize(now.active_bytes)} in use by arrays, ` +
      `${memorySize(now.footprint_bytes)} for the whole process, ${memorySize(now.limit_bytes)} allowed`,
    ticks: [`${seconds(span)} ago`, "now"],
  });
  const figures = [
    [[h("i.key.active"), "In use"], now.active_bytes],
    [[h("i.key.footprint"), "Whole process"], now.footprint_bytes],
    ["Highest", now.peak_bytes],
    ["Reserved for requests", now.reserved_bytes],
  ];
  return {
    elements: [
      h("ul.uses", { "aria-label": "Memory by model" }, status.models.filter(({ memory }) => memory).map(use)),
      legend(USES),
      chart,
      pairs(
        "grid",
        figures.map(([name, value]) => [name, memorySize(value)]),
      ),
      clears(now),
    ],
  };
}

/** What the governor did, most often first. */
function clears({ decisions, clear_seconds: spent }) {
  const kinds = Object.entries(decisions)
    .filter(([, times]) => times)
    .sort((a, b) => b[1] - a[1]);
  const isClear = ([kind]) => kind.startsWith("clear_");
  const cleared = kinds.filter(isClear);
  const times = cleared.reduce((sum, [, each]) => sum + each, 0);
  const others = { evict: "cache entries dropped", wait: "requests that waited", refuse: "requests refused" };
  return h(
    "div.sub",
    h("h3", "Cleared"),
    times
      ? h(
          "ul.tally",
          cleared.map(([kind, each]) =>
            h(
              "li",
              h("span", CLEARS[kind] ?? words(kind.slice(6))),
              meter(each / times, `${each} times`),
              h("b", count(each)),
            ),
          ),
        )
      : h("p.muted", "Not once since the engine’s start."),
    times > 0 && h("p.muted.small", `${seconds(spent)} in all`),
    h(
      "p.muted.small",
      kinds
        .filter((each) => !isClear(each))
        .map(([kind, each]) => `${count(each)} ${others[kind] ?? words(kind)}`)
        .join(" · "),
    ),
  );
}

const USES = {
  weights: "Weights",
  kv: "Requests (KV)",
  caches: "Caches",
  pool: "Kept for reuse",
};

/** What a model's memory is used for, against its limit. */
function use({ name, memory }) {
  const parts = Object.entries(USES).map(([part, text]) => {
    const value = memory[`${part}_bytes`];
    return [part, value, `${text}: ${memorySize(value)}`];
  });
  const held = parts.reduce((sum, [, value]) => sum + value, 0);
  const text = `${memorySize(held)} of ${memorySize(memory.limit_bytes)}`;
  const label = `${text}: ${parts.map(([, , title]) => title).join(", ")}`;
  return h(
    "li",
    h("p", h("b", name), h("span.muted", text)),
    stack(parts, memory.limit_bytes, label),
    h(
      "p.muted.small",
      parts
        .filter(([, value]) => value)
        .map(([, , title]) => title)
        .join(" · "),
    ),
  );
}

export const legend = (names) =>
  h(
    "p.legend",
    { "aria-hidden": "true" },
    Object.entries(names).map(([name, text]) => h("span", h(`i.key.${name}`), text)),
  );

const TIMES = {
  request_queue_time_seconds: "In the queue",
  time_to_first_token_seconds: "First token",
  inter_token_latency_seconds: "Between tokens",
  e2e_request_latency_seconds: "Whole answer",
};

/** Percentiles of the last answers: measured values, not estimates. */
export function times(latencies) {
  const known = Object.entries(TIMES).filter(([name]) => latencies[name].percentiles);
  if (!known.length)
    return { key: "none", elements: [empty("Nothing measured yet", "Ask something, and it shows here.")] };
  const head = ["", "Median", "90 %", "99 %", "Longest"];
  const rows = known.map(([name, text]) => {
    const found = latencies[name].percentiles;
    const cells = [found.p50, found.p90, found.p99, found.max].map((value) => h("td", seconds(value)));
    return h("tr", h("th", { scope: "row", title: `of the last ${count(found.count)}` }, text), cells);
  });
  return {
    key: JSON.stringify(known.map(([name]) => latencies[name].percentiles)),
    elements: [
      h(
        "table.times",
        h("thead", h("tr", head.map((text) => (text ? h("th", { scope: "col" }, text) : h("td"))))),
        h("tbody", rows),
      ),
    ],
  };
}

export function caches(stats) {
  if (!stats) return { key: "none", elements: [empty("No figures yet")] };
  const rows = stats.caches.map(({ name, hits, misses, size_bytes: size, limit_bytes: limit, entries }) => {
    const all = hits + misses;
    const shown = name === "disk" ? fileSize : memorySize;
    return h(
      "tr",
      h("th", { scope: "row" }, CACHES[name] ?? words(name)),
      h("td", meter(all ? hits / all : 0, `${percent(hits, all)} of ${all} look-ups found`)),
      h("td", percent(hits, all)),
      h(
        "td",
        { title: `${count(entries)} entries` },
        shown(size),
        limit > 0 && h("span.limit-of", ` of ${shown(limit)}`),
      ),
    );
  });
  const head = h(
    "tr",
    h("th", { scope: "col" }, "Cache"),
    h("th", { scope: "col", colspan: "2" }, "Found"),
    h("th", { scope: "col" }, "Holds"),
  );
  return { key: JSON.stringify(stats.caches), elements: [h("table", h("thead", head), h("tbody", rows))] };
}

export function engine({ engine: { pid, restarts, ends, quarantine, progress } }, stats) {
  const facts = [
    ["Process", pid ?? "none"],
    ["Restarts", count(restarts)],
    ["Sizes refused", count(quarantine.shapes)],
  ];
  if (stats)
    facts.push(
      ["Prompt tokens", short(stats.prompt_tokens)],
      ["Answer tokens", short(stats.generated_tokens)],
      ["Tool calls", short(stats.tool_calls)],
    );
  const history = ends.length
    ? h(
        "ul.rows.plain",
        ends.toReversed().map(({ at, reason }) => {
          const when = new Date(at * 1000);
          const shown = when.toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
          const time = h("time.muted", { datetime: when.toISOString() }, shown);
          return h("li", h("span", `It ${reason}`), time);
        }),
      )
    : h("p.muted", "No engine has ended by itself since the server’s start.");
  return {
    key: JSON.stringify([facts, ends, progress]),
    elements: [
      progress && progressBar(progress),
      pairs("grid", facts),
      h("div.sub", h("h3", "Restarts, and why"), history),
    ],
  };
}
