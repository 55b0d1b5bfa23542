// Small charts, each with a name that says what it shows.

import { h, pairs, seconds, svg } from "./dom.js";

const WIDTH = 600;
const HEIGHT = 150;

/** Memory over time. `samples` hold from their time until the next one's; `series` are drawn as
 * [field, class], each over the one before; `limit` is a line if it fits. */
export function memoryChart(samples, { now, span, series, limit, label, ticks }) {
  const begin = now - span;
  const highest = Math.max(1, ...samples.flatMap((sample) => series.map(([field]) => sample[field])));
  const top = limit && limit < 3 * highest ? Math.max(limit, highest) * 1.08 : highest * 1.2;
  const x = (at) => (WIDTH * Math.max(0, at - begin)) / span;
  const y = (value) => HEIGHT * (1 - value / top);
  const paths = series.flatMap(([field, name]) => {
    let line = "";
    samples.forEach((sample, index) => {
      const end = samples[index + 1]?.at ?? now;
      line += `${line ? "L" : "M"}${x(sample.at).toFixed(1)} ${y(sample[field]).toFixed(1)}H${x(end).toFixed(1)}`;
    });
    if (!line) return [];
    const first = x(samples[0].at).toFixed(1);
    return [
      svg("path", { class: `${name} area`, d: `${line}V${HEIGHT}H${first}Z` }),
      svg("path", { class: `${name} line`, d: line }),
    ];
  });
  const at = y(limit);
  const bound = limit > 0 && limit < top && svg("line", { class: "limit", x1: 0, x2: WIDTH, y1: at, y2: at });
  return h(
    "div.chart",
    svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
      paths,
      bound,
    ),
    ticksElement(ticks),
  );
}

const ticksElement = (ticks) =>
  h(
    "p.ticks",
    { "aria-hidden": "true" },
    ticks.map((each) => h("span", each)),
  );

/** A histogram of seconds as bars; buckets before the first and after the last one in use are left out. */
export function histogram({ bounds, counts }, name) {
  const total = counts.reduce((sum, each) => sum + each, 0);
  const used = counts.map((each, index) => (each ? index : -1)).filter((index) => index >= 0);
  const first = Math.max(0, used[0] - 1);
  const last = Math.min(counts.length - 1, used.at(-1) + 1);
  const shown = counts.slice(first, last + 1);
  const most = Math.max(...shown);
  const bars = shown.map((each) => {
    const bar = h("i", { class: each ? "bar-item" : "bar-item none" });
    bar.style.height = `${each ? Math.max(4, (100 * each) / most) : 0}%`;
    return bar;
  });
  const [middle, high] = [quantile(bounds, counts, total, 0.5), quantile(bounds, counts, total, 0.9)];
  const label = `${name}: half within ${seconds(middle)}, nine in ten within ${seconds(high)}, of ${total}`;
  return h(
    "div.histogram",
    pairs("pair", [
      ["Half within", seconds(middle)],
      ["9 of 10 within", seconds(high)],
    ]),
    h("div.bars", { role: "img", "aria-label": label }, bars),
    ticksElement([
      first ? seconds(bounds[first - 1]) : "0",
      last < bounds.length ? seconds(bounds[last]) : "more",
    ]),
  );
}

/** The upper bound of the bucket in which the quantile lies. */
function quantile(bounds, counts, total, share) {
  let seen = 0;
  const index = counts.findIndex((each) => (seen += each) >= share * total);
  return bounds[Math.min(index, bounds.length - 1)];
}

export const countOf = ({ counts }) => counts.reduce((sum, each) => sum + each, 0);

/** A bar of `share` from 0 to 1. */
export function meter(share, label) {
  const fill = h("i");
  fill.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
  return h("span.meter", { role: "img", "aria-label": label }, fill);
}
