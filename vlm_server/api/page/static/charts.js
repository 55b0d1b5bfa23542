// Small charts, each with a name that says what it shows.

import { h, memorySize, svg } from "./dom.js";

const WIDTH = 600;
const HEIGHT = 150;

/** Memory over time, with a scale. `samples` hold from their time until the next one's; `series` are
 * drawn as [field, class], each over the one before; `limit` is a line if it is near, else a remark. */
export function memoryChart(samples, { now, span, series, limit, label, ticks }) {
  const begin = now - span;
  const highest = Math.max(1, ...samples.flatMap((sample) => series.map(([field]) => sample[field])));
  const isNear = limit > 0 && limit < 2 * highest;
  const { top, step } = scale(isNear ? Math.max(limit, highest) : highest);
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
  const bar = (name, value) => svg("line", { class: name, x1: 0, x2: WIDTH, y1: y(value), y2: y(value) });
  const marks = Array.from({ length: Math.round(top / step) }, (_, index) => (index + 1) * step);
  return h(
    "div.chart",
    h(
      "div.plot",
      svg(
        "svg",
        { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
        marks.map((value) => bar("rule", value)),
        paths,
        isNear && bar("limit", limit),
      ),
      marks.map((value) => placed("span.scale", y(value), memorySize(value))),
      isNear && placed("span.scale.bound", y(limit), `Limit ${memorySize(limit)}`),
    ),
    ticksElement(limit && !isNear ? [ticks[0], `Limit ${memorySize(limit)}, far above`, ticks[1]] : ticks),
  );
}

/** A round step, and a multiple of it that is not below `highest`. */
function scale(highest) {
  const unit = 2 ** (10 * Math.floor(Math.log2(highest) / 10));
  const rough = highest / unit / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) * unit;
  return { step, top: Math.ceil((1.02 * highest) / step) * step };
}

function placed(tag, at, text) {
  const element = h(tag, { "aria-hidden": "true" }, text);
  element.style.top = `${(100 * at) / HEIGHT}%`;
  return element;
}

const ticksElement = (ticks) =>
  h(
    "p.ticks",
    { "aria-hidden": "true" },
    ticks.map((each) => h("span", each)),
  );

/** A small line of `values`, which are evenly spaced, and what it shows in words. */
export function sparkline(values, label, ticks) {
  const y = (value) => (HEIGHT * (1 - value / Math.max(1, ...values))).toFixed(1);
  const line = values.map((value, index) => `${index ? "L" : "M"}${(WIDTH * index) / (values.length - 1)} ${y(value)}`).join("");
  return h(
    "div.chart.spark",
    svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
      svg("path", { class: "active area", d: `${line}V${HEIGHT}H0Z` }),
      svg("path", { class: "active line", d: line }),
    ),
    ticksElement(ticks),
  );
}

/** A bar of `share` from 0 to 1. */
export function meter(share, label) {
  const fill = h("i");
  fill.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
  return h("span.meter", { role: "img", "aria-label": label }, fill);
}

/** A bar of `parts`, as [class, value, text], of which `all` would fill it. */
export function stack(parts, all, label) {
  const shown = parts.filter(([, value]) => value > 0);
  return h(
    "span.stack",
    { role: "img", "aria-label": label },
    shown.map(([name, value, title]) => {
      const part = h(`i.${name}`, { title });
      part.style.flexBasis = `${(100 * value) / (all || 1)}%`;
      return part;
    }),
  );
}
