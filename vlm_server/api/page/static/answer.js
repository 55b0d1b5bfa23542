// One answer: its text as it comes, thoughts folded away, tool calls, marks on the picture, figures.

import { copy, count, h, pairs, percent, seconds } from "./dom.js";
import { findRegions } from "./regions.js";
import { rich } from "./rich.js";
import { progressBar } from "./serving.js";
import { asCurl, asPython } from "./snippets.js";

export class Answer {
  /** `media` are those of the whole request, in order; `coordinates` as the model's facts say. */
  constructor(body, media, coordinates) {
    Object.assign(this, { body, media, coordinates });
    this.text = "";
    this.thoughts = "";
    this.calls = [];
    this.usage = null;
    this.finish = null;
    this.started = performance.now();
    this.first = this.last = null;
    this.numNews = 0;
    this.textElement = h("div.text");
    this.extras = h("div.extras");
    this.waiting = h("div.waiting");
    this.wait({ state: "ready" });
    this.element = h(
      "article.answer",
      { "aria-label": "Answer", "aria-busy": "true" },
      this.waiting,
      this.textElement,
      this.extras,
    );
  }

  /** Says what the answer waits for. `progress` is that of its model while it loads. */
  wait({ id, state, progress }) {
    const text = state !== "ready" ? `Waiting for ${id}` : this.media.length ? "Looking" : "Reading";
    if (this.waiting.textContent !== text || progress)
      this.waiting.replaceChildren(
        h("p", h("span.pulse"), text),
        ...(progress ? [progressBar(progress)] : []),
      );
  }

  /** Takes one event of the stream. */
  take(event) {
    if (event.usage) this.usage = event.usage;
    const choice = event.choices[0];
    if (!choice) return;
    const { content, reasoning_content: thought, tool_calls: calls } = choice.delta;
    if (content || thought || calls) {
      this.last = performance.now();
      this.first ??= this.last;
      this.numNews++;
    }
    this.text += content ?? "";
    this.thoughts += thought ?? "";
    for (const call of calls ?? []) this.takeCall(call);
    if (choice.finish_reason) this.finish = choice.finish_reason;
    this.draw();
  }

  takeCall({ index, id, function: { name, arguments: more } }) {
    const call = (this.calls[index] ??= { id, name, arguments: "", result: null });
    call.arguments += more ?? "";
  }

  /** Draws at most once a frame. */
  draw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.drawNow();
    });
  }

  drawNow() {
    if (this.first) this.waiting.remove();
    if (this.thoughts && !this.thinking) this.element.prepend((this.thinking = thoughts()));
    if (this.thinking) {
      this.thinking.lastChild.textContent = this.thoughts;
      this.thinking.firstChild.textContent =
        this.text || this.calls.length || this.finish ? "Thoughts" : "Thinking…";
    }
    this.textElement.replaceChildren(...rich(this.text));
  }

  /** The answer is over: shows all that needs to be whole. `error` if it did not end well. */
  end({ stopped = false, error = null, retry = null } = {}) {
    if (this.frame) cancelAnimationFrame(this.frame);
    this.frame = null;
    this.drawNow();
    this.waiting.remove();
    this.element.setAttribute("aria-busy", "false");
    this.extras.append(...this.calls.map((call) => callElement(call)), ...this.figures());
    if (error) this.extras.append(problem(error, retry));
    else if (!this.text && !this.calls.length && !stopped)
      this.extras.append(note("The model answered nothing."));
    if (stopped) this.extras.append(note("Stopped."));
    else if (this.finish === "length")
      this.extras.append(note("Cut off at the longest answer allowed. You can raise it in the options."));
    if (!error) this.extras.append(this.footer());
  }

  /** What the next request has in its place; null if there is nothing to go on from. */
  messages() {
    if (!this.text && !this.calls.length) return null;
    const answer = { role: "assistant", content: this.text || null };
    if (this.thoughts) answer.reasoning_content = this.thoughts;
    if (!this.calls.length) return [answer];
    answer.tool_calls = this.calls.map(({ id, name, arguments: args }) => ({
      id,
      type: "function",
      function: { name, arguments: args },
    }));
    return [
      answer,
      ...this.calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result.value })),
    ];
  }

  /** The picture with what the answer points at, if it does. */
  figures() {
    const images = this.media.filter(({ kind }) => kind === "image");
    const picture = images.at(-1);
    if (!picture) return [];
    const seen = this.usage?.images?.at(-1);
    const texts = [this.text, ...this.calls.map((call) => call.arguments)];
    const regions = texts.flatMap((text) => findRegions(text, seen, this.coordinates));
    return regions.length ? [marked(picture, regions)] : [];
  }

  footer() {
    const { body, media } = this;
    const names = media.map(({ name }) => name);
    const button = (label, text) =>
      h("button", { class: "link", onclick: (event) => copy(event.currentTarget, text()) }, label);
    return h(
      "footer",
      body.model !== "default" && h("p.note", body.model),
      pairs("figures", this.measured()),
      h(
        "p.copies",
        button("Copy", () => this.text),
        button("Copy as curl", () => asCurl(body, names)),
        button("Copy as Python", () => asPython(body, names)),
      ),
    );
  }

  measured() {
    const shown = [];
    if (this.first)
      shown.push([
        "First token",
        seconds((this.first - this.started) / 1000),
        "From sending the question to the first token",
      ]);
    const { usage } = this;
    if (!usage) return shown;
    const tokens = usage.completion_tokens;
    const elapsed = (this.last - this.first) / 1000;
    const isSteady = this.numNews > 1 && !this.calls.length; // a call comes when it is complete
    if (isSteady && elapsed > 0.02)
      shown.push([
        "Speed",
        `${count((tokens - 1) / elapsed)} tokens/s`,
        `${count(tokens)} tokens in ${seconds(elapsed)} after the first`,
      ]);
    const cached = usage.prompt_tokens_details.cached_tokens;
    shown.push([
      "From cache",
      `${count(cached)} of ${count(usage.prompt_tokens)} tokens`,
      `${percent(cached, usage.prompt_tokens)} of the prompt did not have to be computed`,
    ]);
    const images = usage.images ?? [];
    if (images.length)
      shown.push([
        "Seen as",
        sizes(images),
        images.map((each) => `${each.width} × ${each.height}, ${count(each.tokens)} tokens`).join("\n"),
      ]);
    return shown;
  }
}

/** The sizes of the pictures; of many, those of the first two. */
function sizes(images) {
  const all = [...new Set(images.map(({ width, height }) => `${width} × ${height}`))];
  return all.slice(0, 2).join(", ") + (all.length > 2 ? ` and ${all.length - 2} more` : "");
}

const thoughts = () => h("details.thoughts", h("summary", "Thinking…"), h("div"));
const note = (text) => h("p.note", text);

function problem(error, retry) {
  const again = retry && h("button", { class: "link retry", onclick: retry }, "Try again");
  return h("div.error", { role: "alert" }, h("p", error.message), again);
}

/** A call, and a field for what is told of its result. */
function callElement(call) {
  call.result = h("input", {
    placeholder: "Sent with your next question",
    "aria-label": `Result of ${call.name}`,
  });
  return h(
    "div.call",
    h("p", h("span.kind", "Tool call"), h("code", call.name)),
    h("pre", { tabindex: "0", "aria-label": `Arguments of ${call.name}` }, h("code", pretty(call.arguments))),
    h("label", "Result", call.result),
  );
}

function pretty(json) {
  try {
    const value = JSON.parse(json);
    const line = JSON.stringify(value, null, 1).replace(/\n\s*/g, " ");
    return line.length < 60 ? line : JSON.stringify(value, null, 2);
  } catch {
    return json;
  }
}

/** The picture, and over it boxes and points: positions are set as properties, which the policy allows. */
function marked(picture, regions) {
  const share = (value) => `${100 * value}%`;
  const marks = regions.map(({ kind, x, y, width, height, label }, index) => {
    const name = label || (regions.length > 1 ? String(index + 1) : "");
    const mark = h("span", { class: `mark ${kind}` }, name && h("span", name));
    Object.assign(mark.style, { left: share(x), top: share(y) });
    if (kind === "box") Object.assign(mark.style, { width: share(width), height: share(height) });
    return mark;
  });
  const places = regions.map(({ kind, x, y, width, height, label }) => {
    const at = `${Math.round(100 * (x + width / 2))} % across, ${Math.round(100 * (y + height / 2))} % down`;
    return `${label || (kind === "box" ? "Box" : "Point")} at ${at}`;
  });
  return h(
    "figure.marked",
    h("div", h("img", { src: picture.url, alt: `Your picture with marks: ${places.join("; ")}` }), marks),
    h(
      "figcaption",
      places.slice(0, 3).join(" · ") + (places.length > 3 ? ` · and ${places.length - 3} more` : ""),
    ),
  );
}
