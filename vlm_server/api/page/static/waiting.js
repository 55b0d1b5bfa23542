// What one waits for before the first word of an answer, in words, with a bar where there is a measure.

import { meter } from "./charts.js";
import { count, h, percent, seconds } from "./dom.js";
import { progressBar } from "./serving.js";

const TROUBLES = {
  line: "The server can’t be reached",
  engine_died: "The model stopped, and is started again",
  engine_unavailable: "The model is being started",
  queue_full: "The server has as many requests as it takes",
  key_limit_reached: "Your key has as many requests as it may have",
};

/** The lines on `told`: what the server says of the request, or {trouble, seconds}; null if nothing is known yet. */
function words(told, hasMedia, model) {
  if (!told) return "Sending";
  if (told.trouble) return TROUBLES[told.trouble] ?? "Waiting";
  const { state, ahead } = told;
  const turn = ahead ? `${count(ahead)} ${ahead === 1 ? "request" : "requests"} before yours` : "";
  switch (state) {
    case "waiting_for_model":
      return `Waiting for ${model === "default" ? "the model" : model}`;
    case "waiting_for_memory":
      return `Waiting for memory${turn && `: ${turn}`}`;
    case "waiting":
    case "sent":
      return turn ? `Waiting: ${turn}` : "Waiting for its turn";
    case "reading_disk":
      return "Fetching what it has read before";
    case "encoding":
      return "Looking";
    case "prefill":
      return "Reading";
    case "decode":
      return "Writing";
    default:
      return hasMedia ? "Preparing what to look at" : "Preparing";
  }
}

export class Waiting {
  constructor(hasMedia, model) {
    this.hasMedia = hasMedia;
    this.model = model;
    this.told = null;
    this.line = h("span", { role: "status" });
    this.again = h("span", { "aria-hidden": "true" }); // changes each second, which nobody wants to hear
    this.clock = h("span.clock", { "aria-hidden": "true" });
    this.more = h("div");
    this.element = h("div.waiting", h("p", h("span.pulse"), h("span", this.line, this.again), this.clock), this.more);
    this.began = performance.now();
    this.timer = setInterval(() => this.tick(), 250);
    this.tell(null);
  }

  tell(told) {
    this.told = told;
    const text = words(told, this.hasMedia, this.model);
    if (this.line.textContent !== text) this.line.textContent = text;
    this.again.textContent = this.isRetry() ? `. Trying again in ${told.seconds}\u00a0s` : "";
    this.more.replaceChildren(...this.measure(told));
    this.tick();
  }

  /** Whether the seconds are those until the next try; with the server's progress they are those since the request. */
  isRetry() {
    return Boolean(this.told?.trouble && this.told.seconds);
  }

  measure(told) {
    if (told?.stage) return [progressBar(told)];
    if (!told?.total || !["encoding", "prefill"].includes(told.state)) return [];
    const what = told.state === "encoding" ? "of the pictures" : "of the prompt";
    const amount = `${count(told.done)} of ${count(told.total)} tokens`;
    return [
      h(
        "div.progress",
        h("p", `${percent(told.done, told.total)} ${what}`, h("span", amount)),
        meter(told.done / told.total, amount),
      ),
    ];
  }

  tick() {
    const passed = (performance.now() - this.began) / 1000;
    this.clock.textContent = passed < 1 || this.isRetry() ? "" : seconds(Math.round(passed)); // one number at a time
  }

  end() {
    clearInterval(this.timer);
    this.element.remove();
  }
}
