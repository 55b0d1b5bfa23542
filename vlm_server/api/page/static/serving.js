// What a model is at, in words, and how one of several is picked.

import { meter } from "./charts.js";
import { fileSize, h, percent, seconds, words } from "./dom.js";

const STATES = {
  ready: "Ready",
  unloaded: "Not loaded",
  starting: "Loading",
  restarting: "Restarting",
  unresponsive: "Not responding",
};
const BUSY = ["waiting", "downloading", "starting", "restarting", "unloading", "stopping"];

const capital = (text) => text[0].toUpperCase() + text.slice(1);

export const stateWords = (state) => STATES[state] ?? capital(words(state));
export const isBusy = (state) => BUSY.includes(state);

/** A line and a bar on how far a load or a download is. The line seldom changes but for its hidden end. */
export function progressBar({ stage, fraction, bytes: done, total_bytes: total, bytes_per_second: rate }) {
  const amount = total ? `${fileSize(done ?? 0)} of ${fileSize(total)}` : fraction ? percent(fraction, 1) : "";
  const pace = rate && [`${fileSize(rate)}/s`, `${seconds((total - done) / rate)} left`];
  return h(
    "div.progress",
    h("p", capital(stage), amount && h("span", { "aria-hidden": "true" }, [amount, ...(pace || [])].join(" · "))),
    meter(fraction, amount || "Not begun"),
  );
}

/** Lets `select` offer `names`; returns the one that is chosen. One name is no choice: it is hidden. */
export function offer(select, names) {
  const shown = [...select.options].map(({ value }) => value);
  select.parentElement.hidden = names.length < 2;
  if (names.join("\n") !== shown.join("\n")) {
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => h("option", name)));
    select.value = names.includes(chosen) ? chosen : names[0];
  }
  return select.value;
}
