// The requests that ended last: who, how much, how long, and how they ended.

import { stack } from "./charts.js";
import { clock, count, empty, h, seconds, words } from "./dom.js";
import { legend } from "./panels.js";

const PHASES = {
  receive: "Arriving",
  queue: "Queue",
  prepare: "Preparing",
  encode: "Pictures",
  prefill: "Prompt",
  decode: "Answer",
};
const ENDS = {
  stop: "Done",
  length: "At its limit",
  tool_calls: "Tool call",
  abort: "Client left",
  error: "Failed",
};
const DIALECTS = { openai: "OpenAI", anthropic: "Anthropic", responses: "Responses", ollama: "Ollama" };

/** {elements}, and the {key} that changes with them. */
export function ended(list) {
  if (!list.length)
    return { key: "none", elements: [empty("None yet", "The last 50 show here, never what they said.")] };
  const head = ["Ended", "By", "Prompt", "Answer", "Queued", "First token", "Whole", "Where the time went", "End"];
  return {
    key: `${list[0].id} ${list.length}`,
    elements: [
      h("p.ended.head", { "aria-hidden": "true" }, head.map((text) => h("span", text))),
      h("ol.scrolled", { tabindex: "0", "aria-label": "Requests that have ended, the last one first" }, list.map(row)),
      legend(PHASES),
    ],
  };
}

function row(one) {
  const { model, key, dialect, route, images, videos, pages } = one;
  const [name, kind] = dialect.split(/[-.](.*)/);
  const api = [DIALECTS[name] ?? name, kind].filter(Boolean).join(" ");
  const media = [number(images, "picture"), number(videos, "video"), number(pages, "page")].filter(Boolean);
  const cached = one.cached_tokens ? ` (${count(one.cached_tokens)} cached)` : "";
  const isBad = one.finish === "error" || (one.status >= 400 && one.finish !== "abort");
  const end = isBad && one.error ? words(one.error) : (ENDS[one.finish] ?? words(one.error ?? `status ${one.status}`));
  return h(
    "li.ended",
    cell("Ended", clock(new Date(one.ended_at * 1000))),
    cell("By", h("b", model ?? "No model"), h("span.muted.small", { title: route }, [key, api, ...media].filter(Boolean).join(" · "))),
    cell("Prompt", one.prompt_tokens ? `${count(one.prompt_tokens)}${cached}` : "–"),
    cell("Answer", one.tokens ? count(one.tokens) : "–"),
    cell("Queued", time(one.queue_seconds)),
    cell("First token", time(one.first_token_seconds)),
    cell("Whole", time(one.seconds)),
    cell("Where the time went", bar(one)),
    cell("End", h("span.end", { "data-bad": isBad, title: `Status ${one.status}` }, end)),
  );
}

const cell = (label, ...content) => h("span", h("span.label", `${label} `), content);
const number = (many, word) => many && `${many} ${word}${many === 1 ? "" : "s"}`;
const time = (value) => (value === null ? "–" : seconds(value));

function bar({ phases, seconds: all }) {
  const parts = Object.entries(PHASES)
    .filter(([name]) => phases[name])
    .map(([name, text]) => [name, phases[name], `${text}: ${seconds(phases[name])}`]);
  return parts.length ? stack(parts, all, parts.map(([, , title]) => title).join(", ")) : h("span.none", "–");
}
